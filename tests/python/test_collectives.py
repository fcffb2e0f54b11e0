"""all_reduce, reduce_scatter and all_gather against an fp64 reference: operators, dtypes, sizes, addresses, slices, and changes
from call to call; barrier."""

import random

import on_device
import pytest
import torch
from collective_calls import ALGORITHMS, DTYPES, OPS, WORKSPACE, Calls, check_barrier, merged, values
from on_device import cpu_only, run
from ranks import run_processes

import moe_a2a
from moe_a2a.collectives import SHARE_UNIT, even_shares

pytestmark = on_device.TESTS


def every_case_program(group, seed: int) -> None:
    """Every operator, dtype and algorithm at a small, an odd and a sliced size."""
    with moe_a2a.Collectives(group, WORKSPACE, timeout=20) as coll:
        calls = Calls(coll, seed)
        for dtype in DTYPES:
            for op in OPS if coll.num_ranks in (2, 4) else ["sum", "max", "min"]:  # thirds are not exact
                for algorithm in ALGORITHMS:
                    for count in (0, 1, 7, 1000, 9001):
                        calls.one("all_reduce", count, dtype, op, algorithm)
                calls.one("reduce_scatter", 2501, dtype, op, "")
                calls.one("all_gather", 2501, dtype, op, "")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_operator_dtype_and_algorithm(num_ranks, session_seed):
    run(num_ranks, every_case_program, session_seed)


def changing_calls_program(group, seed: int, num_calls: int) -> None:
    draw = random.Random(seed)
    num_blocks = (0, 1, 3)[moe_a2a.as_group(group).rank % 3]  # some blocks have several chunks, others one
    with moe_a2a.Collectives(group, WORKSPACE, num_blocks, timeout=20) as coll:
        calls = Calls(coll, seed)
        for _ in range(num_calls):
            kind = draw.choice(["all_reduce", "all_reduce", "reduce_scatter", "all_gather"])
            count = draw.choice([1, 7, 64, 300, draw.randrange(12000)])
            op = draw.choice(OPS if coll.num_ranks in (2, 4, 8) else OPS[:3])
            calls.one(kind, count, draw.choice(DTYPES), op, draw.choice([*ALGORITHMS, "auto"]))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_calls_change_in_every_way(num_ranks, session_seed):
    run(num_ranks, changing_calls_program, session_seed, 200)


@cpu_only
def test_calls_of_processes(session_seed):
    run_processes(3, changing_calls_program, session_seed, 100)


@cpu_only
def test_eight_ranks(session_seed):
    run(8, changing_calls_program, session_seed, 30)


def random_data_program(group, seed: int) -> list[torch.Tensor]:
    """The results of all algorithms and dtypes, checked against their error bounds."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    with moe_a2a.Collectives(group, 1 << 20, timeout=20) as coll:
        for dtype in DTYPES:
            xs = [torch.randn(30011, generator=generator).mul(100).to(dtype) for _ in range(coll.num_ranks)]
            sums = [coll.all_reduce(xs[coll.rank].to(coll.device), algorithm=name).cpu() for name in ALGORITHMS]
            assert torch.equal(sums[0], sums[1])  # rank order
            exact, size = sum(x.double() for x in xs), sum(x.double().abs() for x in xs)
            # One rounding to the dtype, and one of fp32 for each addition.
            bound = exact.abs() * torch.finfo(dtype).eps / 2 + size * coll.num_ranks * 2**-24
            assert all(((own.double() - exact).abs() <= bound).all() for own in sums)
            results += sums
    return results


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_data_is_rounded_once_and_equal_everywhere(num_ranks, session_seed):
    results = run(num_ranks, random_data_program, session_seed)
    for own in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(own, results[0], strict=True))


def special_values_program(group) -> None:
    nan, inf = float("nan"), float("inf")
    columns = torch.tensor([[1.0, nan, 0.0, inf, -inf, 1e-40], [nan, 1.0, -0.0, 5.0, inf, 1e-40]])
    with moe_a2a.Collectives(group, WORKSPACE, timeout=20) as coll:
        for algorithm in ALGORITHMS:
            x = columns[coll.rank].to(coll.device)
            for op in ("max", "min"):
                out = coll.all_reduce(x, op, algorithm).cpu()
                assert out[:2].isnan().all() and out[2] == 0
            assert coll.all_reduce(x, "max", algorithm).cpu()[3:5].tolist() == [inf, inf]
            assert coll.all_reduce(x, "min", algorithm).cpu()[3:5].tolist() == [5.0, -inf]
            total = coll.all_reduce(x, "sum", algorithm).cpu()
            assert total[[0, 1, 4]].isnan().all() and total[3] == inf and total[5] == 2 * columns[0, 5]
        big = coll.all_reduce(torch.full((9,), 2.0**127, dtype=torch.bfloat16, device=coll.device), "max")
        assert (big == 2.0**127).all()


def test_special_values():
    run(2, special_values_program)


def shapes_program(group) -> None:
    with moe_a2a.Collectives(group, timeout=20) as coll:
        ranks = coll.num_ranks
        x = values(coll.rank, 0, 2 * ranks * 15, torch.float32).reshape(2 * ranks, 3, 5).to(coll.device)
        every = [values(r, 0, 2 * ranks * 15, torch.float32).reshape(2 * ranks, 3, 5) for r in range(ranks)]
        total = merged(every, "sum")
        assert torch.equal(coll.all_reduce(x).cpu(), total)
        assert torch.equal(coll.reduce_scatter(x).cpu(), total[2 * coll.rank : 2 * coll.rank + 2])
        assert torch.equal(coll.all_gather(x).cpu(), torch.cat(every))
        counts = [1, *[0] * (ranks - 2), 2 * ranks - 1]
        rows = x[: counts[coll.rank]].contiguous()
        gathered = torch.cat([every[r][: counts[r]] for r in range(ranks)])
        assert torch.equal(coll.all_gather(rows, counts).cpu(), gathered)
        assert coll.all_reduce(x[0, 0, 0]).shape == ()
        assert coll.reduce_scatter(x, counts=counts).shape == (counts[coll.rank], 3, 5)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_have_any_shape(num_ranks):
    run(num_ranks, shapes_program)


def large_program(group) -> None:
    with moe_a2a.Collectives(group, timeout=20) as coll:
        x = torch.full(((64 << 20) // 2 + 1,), 1.0, dtype=torch.bfloat16, device=coll.device)
        x[-1] = coll.rank
        assert coll.all_reduce(x, out=x) is x
        coll.check()
        assert (x[:-1] == coll.num_ranks).all() and x[-1] == sum(range(coll.num_ranks))


def test_more_than_64_mib():
    run(2, large_program)


def many_calls_program(group, seed: int, num_calls: int) -> None:
    """Equal numbers, which every codec below preserves: a slot reused too early holds those of another call."""
    draw = random.Random(seed)
    with moe_a2a.Collectives(group, WORKSPACE, timeout=20) as coll:
        for call in range(num_calls):
            count, dtype, value = draw.choice([1, 7, 300, 1816, 5000]), draw.choice(DTYPES), float(call % 5)
            algorithm, codec = draw.choice([*((name, None) for name in ALGORITHMS), ("auto", "q8"), ("auto", "q4")])
            x = torch.full((count,), value, dtype=dtype, device=coll.device)
            out = coll.all_reduce(x, "sum", algorithm, codec)
            assert (out == value * coll.num_ranks).all(), (call, count, dtype, algorithm, codec)


def test_many_calls_without_anything_between(session_seed):
    run(2, many_calls_program, session_seed, 20_000)


def barrier_program(group, folder: str) -> None:
    with moe_a2a.Collectives(group, WORKSPACE, timeout=20) as coll:
        for step in range(20):
            check_barrier(coll, folder, step)
            assert coll.all_reduce(torch.ones(3, device=coll.device)).tolist() == [coll.num_ranks] * 3


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_barrier_waits_for_all_ranks(num_ranks, tmp_path):
    run(num_ranks, barrier_program, str(tmp_path))


def overwriting_program(group) -> None:
    """A backward pass that has saved what a call overwrites raises, as after PyTorch's own operations in place."""
    with moe_a2a.Collectives(group, WORKSPACE, timeout=20) as coll:
        x = torch.ones(coll.num_ranks, 3, device=coll.device)
        for call, length in ((coll.all_reduce, coll.num_ranks), (coll.reduce_scatter, 1), (coll.all_gather, 4)):
            given = torch.ones(4 // coll.num_ranks, 3, device=coll.device) if length == 4 else x
            weight = torch.ones(length, 3, device=coll.device, requires_grad=True)
            out = torch.full((length, 3), 2.0, device=coll.device)
            product = (weight * out).sum()
            call(given, out=out)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
        with torch.inference_mode():
            coll.all_reduce(x, out=torch.empty_like(x))  # such tensors have no version


def test_autograd_sees_what_a_call_overwrites():
    run(2, overwriting_program)


@cpu_only
def test_even_shares_are_whole_units():
    for count in (0, 1, 63, 64, 65, 1000, 12_345):
        for num_ranks in (1, 2, 3, 8):
            shares = even_shares(count, num_ranks)
            assert sum(shares) == count and len(shares) == num_ranks
            whole = [share for share in shares if share][:-1]  # all but the last non-empty one
            assert all(share % SHARE_UNIT == 0 for share in whole)
