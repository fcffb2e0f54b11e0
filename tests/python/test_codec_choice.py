"""The error bounds of the codecs, on data made to reach them, and the choices of codec="auto" and max_error=."""

import on_device
import pytest
import torch
from on_device import run

import moe_a2a
from moe_a2a import codecs
from moe_a2a.tables.collective_tables import CollectiveStep, CollectiveTable, Tables

pytestmark = on_device.TESTS

BLOCK = 32
SMALLEST_SEEN = {"fp8": 0.4, "q8": 0.5, "q6": 0.5, "q4": 0.4}  # share of its bound: the bound must not be loose


def worst_blocks(generator: torch.Generator, codec: str, num_blocks: int) -> torch.Tensor:
    """Blocks whose values lie between two codes, with magnitudes whose scale is rounded up as far as possible, both
    signs of the largest magnitude, neighbours of powers of two, and very different sizes within one block."""
    range_of = {"fp8": 448.0, "q8": 128.0, "q6": 32.0, "q4": 8.0}[codec]
    scale = 1 + torch.randint(0, 128, (num_blocks, 1), generator=generator) / 128  # exact in bfloat16
    scale = scale * (1 + torch.rand(num_blocks, 1, generator=generator) * 2**-7)  # and inexact
    size = torch.exp2(torch.randint(-60, 60, (num_blocks, 1), generator=generator).float())
    codes = torch.randint(-int(range_of) + 1, int(range_of), (num_blocks, BLOCK), generator=generator).float()
    x = codes + torch.tensor([0.5, 0.499, -0.5, 0.501])[torch.randint(0, 4, codes.shape, generator=generator)]
    powers = torch.exp2(torch.randint(-14, 9, codes.shape, generator=generator).float()) * (1 + 2**-4)
    x = torch.where(torch.rand(num_blocks, 1, generator=generator) < 0.3, powers.clamp(max=range_of), x)
    sign = 1 - 2 * torch.randint(0, 2, (num_blocks, 1), generator=generator).float()
    x[:, :1], x[:, 1:2] = sign * range_of, -sign * range_of
    return (x * scale * size).reshape(-1)


def bound_program(group, seed: int) -> dict[str, float]:
    """The largest observed error, relative to the bound."""
    worst = dict.fromkeys(codecs.CODECS, 0.0)
    with moe_a2a.Collectives(group, 1 << 20, timeout=20) as coll:
        for codec in codecs.CODECS:
            for alike in (True, False):  # errors of equal contributions add up
                generator = torch.Generator().manual_seed(seed)
                xs = [worst_blocks(generator, codec, 2048) for _ in range(coll.num_ranks)]
                xs = [xs[0]] * coll.num_ranks if alike else xs
                rows = torch.stack(xs).double()
                largest = rows.abs().reshape(coll.num_ranks, -1, BLOCK).amax(2)
                for op, exact, relative_to in [
                    ("sum", rows.sum(0), largest.sum(0)),
                    ("avg", rows.mean(0), largest.mean(0)),
                    ("max", rows.amax(0), largest.amax(0)),
                    ("min", rows.amin(0), largest.amax(0)),
                ]:
                    out = coll.all_reduce(xs[coll.rank].to(coll.device), op, codec=codec).cpu().double()
                    error = ((out - exact).abs().reshape(-1, BLOCK).amax(1) / relative_to).max().item()
                    allowed = codecs.max_error(codec) + 2**-22  # additions in fp32
                    assert error <= allowed, (codec, op, alike, seed, error, allowed)
                    worst[codec] = max(worst[codec], error / allowed)
    return worst


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_errors_keep_to_the_bound_on_the_worst_data(num_ranks, session_seed):
    for worst in run(num_ranks, bound_program, session_seed):
        assert all(worst[codec] >= SMALLEST_SEEN[codec] for codec in worst), worst


def test_bounds_grow_as_bits_shrink():
    bounds = [codecs.max_error(codec) for codec in (None, "q8", "q6", "q4")]
    assert bounds == sorted(bounds) and bounds[0] == 0
    assert [round(bound, 4) for bound in bounds[1:]] == [0.0158, 0.064, 0.2678]
    assert codecs.max_error("fp8") == 2 / 16 + 1 / 256


@pytest.mark.parametrize(
    ("limit", "nbytes", "expected"),
    [
        (None, 64 << 20, "q4"),
        (None, 3 << 20, "q4"),
        (None, 1 << 20, None),  # too small
        (0.3, 64 << 20, "q4"),
        (0.2, 64 << 20, "q6"),
        (0.2, 3 << 20, None),  # q6 does not pay, q4's error is larger
        (0.02, 64 << 20, "q8"),
        (0.015, 64 << 20, None),
        (0.0, 64 << 20, None),
    ],
)
def test_which_codec_is_chosen(limit, nbytes, expected):
    least = {"fp8": 8 << 20, "q8": 4 << 20, "q6": 4 << 20, "q4": 2 << 20}
    assert codecs.choose(nbytes, 4, limit, least) == expected
    assert codecs.choose(nbytes, 1, limit, least) is None
    assert codecs.choose(nbytes, 4, limit, {}) is None


def auto_program(group, seed: int) -> None:
    with moe_a2a.Collectives(group, timeout=20) as coll:
        steps = (CollectiveStep(8 << 10, "one_shot", 0), CollectiveStep(1 << 30, "two_shot", 0))
        table = CollectiveTable("all_reduce", "float32", steps, {"q8": 8 << 10, "q4": 4 << 10})
        coll.tables = Tables([table], "this test")
        x = torch.randn(4096, generator=torch.Generator().manual_seed(seed + coll.rank)).to(coll.device)
        for part, limit, codec in [
            (x, None, "q4"),
            (x, 0.02, "q8"),
            (x, 0.001, None),
            (x[:1024], None, "q4"),
            (x[:1024], 0.02, None),
            (x[:1000], None, None),
        ]:
            expected = coll.all_reduce(part, algorithm="two_shot", codec=codec)
            assert torch.equal(coll.all_reduce(part, codec="auto", max_error=limit, algorithm="two_shot"), expected)
            if limit is not None:  # implies codec="auto"
                assert torch.equal(coll.all_reduce(part, max_error=limit, algorithm="two_shot"), expected)
        exact = coll.all_reduce(x, algorithm="one_shot")
        assert torch.equal(coll.all_reduce(x), exact)  # lossless unless allowed
        assert torch.equal(coll.all_reduce(x, algorithm="one_shot", codec="auto"), exact)  # one-shot has no codecs
        for bad, error, text in [
            ({"codec": "q4", "max_error": 0.1}, ValueError, 'codec="q4" may be off by 0.268 > max_error=0.1 on rank'),
            ({"max_error": -1}, ValueError, "max_error=-1 is not a finite number >= 0 on rank"),
            ({"max_error": float("nan")}, ValueError, "max_error=nan is not a finite number"),
            ({"max_error": "small"}, TypeError, "max_error='small' is a str on rank"),
        ]:
            with pytest.raises(error, match=text):
                coll.all_reduce(x, **bad)
        assert torch.equal(coll.all_reduce(x, algorithm="one_shot"), exact)


def test_auto_takes_what_is_allowed(session_seed):
    run(2, auto_program, session_seed)
