"""Tensors of Collectives.empty(), which kernels read and write on all ranks: the same bits as other tensors give, calls back to
back, and what every rank raises where the tensors of ranks differ."""

import threading
import time

import on_device
import pytest
import torch
from collective_calls import DTYPES, OPS, WORKSPACE, Calls
from on_device import run
from ranks import run_processes

import moe_a2a

pytestmark = on_device.TESTS

ROOM = 256 << 10  # bytes of a tensor that serves one call after another


def collectives(group, symmetric_nbytes: int = 2 * ROOM, **options) -> moe_a2a.Collectives:
    return moe_a2a.Collectives(group, WORKSPACE, symmetric_nbytes=symmetric_nbytes, timeout=20, **options)


def rooms(coll: moe_a2a.Collectives) -> tuple[torch.Tensor, torch.Tensor]:
    return coll.empty(ROOM, dtype=torch.uint8), coll.empty(ROOM, dtype=torch.uint8)


def every_case_program(group, seed: int) -> None:
    with collectives(group) as coll:
        calls = Calls(coll, seed, rooms(coll))
        for dtype in DTYPES:
            for op in OPS if coll.num_ranks in (2, 4) else OPS[:3]:  # thirds are not exact
                for count in (0, 1, 7, 1000, 9001):
                    calls.one("all_reduce", count, dtype, op, "direct")
                    calls.one("all_reduce", count, dtype, op, "auto")
                calls.one("reduce_scatter", 2501, dtype, op, "")
                calls.one("all_gather", 2501, dtype, op, "")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_operator_and_dtype(num_ranks, session_seed):
    run(num_ranks, every_case_program, session_seed)


def same_bits_program(group, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + moe_a2a.as_group(group).rank)
    with collectives(group) as coll:
        x = coll.empty(3, 5003, dtype=torch.bfloat16)
        x.copy_(torch.randn(x.shape, generator=generator) * 100)
        expected = coll.all_reduce(x, algorithm="two_shot")  # a new out: not symmetric
        rows = [1, *[0] * (coll.num_ranks - 2), 2]
        scattered = coll.reduce_scatter(x.clone(), counts=rows)
        assert torch.equal(coll.reduce_scatter(x, counts=rows), scattered)
        assert coll.all_reduce(x, algorithm="direct", out=x) is x
        assert torch.equal(x, expected)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_same_bits_as_two_shot(num_ranks, session_seed):
    run(num_ranks, same_bits_program, session_seed)


def back_to_back_program(group, num_calls: int) -> None:
    """Each call's x is the previous one's result, and no rank waits for the others between calls."""
    num_blocks = (0, 1, 3)[moe_a2a.as_group(group).rank % 3]
    with collectives(group, num_blocks=num_blocks) as coll:
        x, out = (room.view(torch.float32) for room in rooms(coll))
        x.fill_(1)
        wrong = torch.zeros((), dtype=torch.int64, device=coll.device)
        for call in range(num_calls):
            count = (1, 64, 1816, ROOM // 4)[call % 4]
            coll.all_reduce(x[:count], "avg", "direct", out=out[:count])
            wrong += (out[:count] != call + 1).sum()
            x, out = out, x
            x.fill_(call + 2)
        assert wrong.item() == 0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_back_to_back(num_ranks):
    run(num_ranks, back_to_back_program, 1000)


def auto_program(group) -> None:
    """auto goes direct exactly where both tensors allow it. Where the other ranks call "direct", a difference is an error."""
    with collectives(group) as coll:
        x, out = (room.view(torch.float32) for room in rooms(coll))
        x.fill_(1)
        for one, other, algorithm in [(x, out, "direct"), (x, torch.empty_like(x), "two_shot"), (x, x, "direct")]:
            mine = "auto" if coll.rank == 0 else algorithm
            coll.all_reduce(one, algorithm=mine, out=other)
        coll.all_reduce(x.clone(), algorithm="auto" if coll.rank == 0 else "two_shot", out=out)
        coll.check()


def test_auto_chooses_direct():
    run(2, auto_program)


def mismatch_program(group) -> None:
    with collectives(group) as coll:
        if coll.rank == 1:
            coll.empty(1)
        x = coll.empty(100).fill_(1)
        with pytest.raises(moe_a2a.CallMismatchError, match="tensors that empty\\(\\) made in another order"):
            coll.all_reduce(x, algorithm="direct", out=x)
            coll.check()
        y = torch.ones(100, device=coll.device)
        with pytest.raises(moe_a2a.CallMismatchError, match="reduce_scatter of 100 float32, sum, direct"):
            coll.reduce_scatter(x if coll.rank == 1 else y, counts=[100, *[0] * (coll.num_ranks - 1)])
            coll.check()
        total = coll.all_reduce(x)
        assert (total == coll.num_ranks).all()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tensors_at_different_places(num_ranks):
    run(num_ranks, mismatch_program)


def refused_program(group) -> None:
    with collectives(group, 1000) as coll:
        for size, options, kind, words in [
            (
                [1000],
                {},
                ValueError,
                r"rank \d: 1000 bytes are left of symmetric_nbytes=1000, the tensor takes 4000; pass a larger",
            ),
            ([-1], {}, ValueError, r"size=\(-1,\), dtype=None on rank \d: .*negative"),
            (["2"], {}, TypeError, r"size=\('2',\), dtype=None on rank \d"),
            ([2], {"dtype": "float"}, TypeError, r"size=\(2,\), dtype='float' on rank \d"),
        ]:
            with pytest.raises(kind, match=words):
                coll.empty(*size, **options)
        x, y = coll.empty([2, 3]), torch.ones(2, 3, device=coll.device)
        assert (x.shape, x.dtype, x.device) == ((2, 3), torch.get_default_dtype(), coll.device)
        for one, out, name in [(y, x, "x"), (x, y, "out"), (x, None, "out")]:
            if coll.rank == 0:
                with pytest.raises(
                    ValueError, match=f'{name} does not lie in symmetric memory, which algorithm="direct" needs'
                ):
                    coll.all_reduce(one, algorithm="direct", out=out)
            else:
                with pytest.raises(moe_a2a.PeerRefusedError, match="does not lie in symmetric memory"):
                    coll.all_reduce(x, algorithm="direct", out=x)
                    coll.check()
            moe_a2a.as_group(group).all_gather(None)
        assert coll.all_reduce(x.fill_(1), out=x).eq(coll.num_ranks).all()
    assert x.eq(coll.num_ranks).all()  # it outlives close()
    with pytest.raises(RuntimeError, match="closed"):
        coll.empty(1)


def test_wrong_arguments():
    run(2, refused_program)


def empty_meanwhile_program(group) -> None:
    with collectives(group) as coll:
        x = torch.ones(3, device=coll.device)
        if coll.rank == 0:
            made: list[torch.Tensor] = []
            other = threading.Timer(0.3, lambda: made.append(coll.empty(4)))
            other.start()
            assert (coll.all_reduce(x) == 2).all()
            other.join()
            assert made[0].shape == (4,)
        else:
            time.sleep(1)
            coll.all_reduce(x)


@on_device.cpu_only
def test_empty_while_another_thread_waits():
    """Regression: it held the GIL, which the waiting thread needed to end its wait."""
    run_processes(2, empty_meanwhile_program, timeout=30)


def wrong_size_program(group) -> None:
    for nbytes, kind in [(-1, ValueError), (1 << 60, ValueError), ("1", TypeError)]:
        with pytest.raises(kind, match=f"symmetric_nbytes={nbytes!r}.* on rank"):
            collectives(group, nbytes)
    with pytest.raises(ValueError, match="symmetric_nbytes"):
        collectives(group, 1000 + moe_a2a.as_group(group).rank)


def test_wrong_symmetric_nbytes():
    run(2, wrong_size_program)


def graph_program(group) -> None:
    with collectives(group) as coll:
        x = coll.empty(5000)
        graph, _ = on_device.capture(lambda: coll.all_reduce(x, algorithm="direct", out=x))
        for replay in range(100):
            x.fill_(replay + coll.rank)
            graph.replay()
            assert (x == replay * coll.num_ranks + sum(range(coll.num_ranks))).all()


@on_device.gpu_only
def test_replays_of_a_captured_call():
    run(2, graph_program)
