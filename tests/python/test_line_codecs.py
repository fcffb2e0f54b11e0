"""all_reduce with a line codec: equals the NumPy model of line_codecs.py bit for bit, and keeps SQNR and error bounds."""

import line_codecs
import numpy as np
import on_device
import pytest
import torch
from on_device import run

import moe_a2a

pytestmark = on_device.TESTS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CODECS = ["fp8", "q8", "q6", "q4"]
# dB after two roundings of normal data; simulations gave 18.4, 30.4 and 42.5.
LEAST_SQNR = {"fp8": 28.0, "q8": 41.5, "q6": 29.5, "q4": 17.5}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, except those of NaNs."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0, 1.0, -1.0), b.nan_to_num(0.0, 1.0, -1.0))


def draw(generator: torch.Generator, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of very different sizes, some of zeros, some of one sign."""
    x = torch.randn(count, generator=generator)
    size = torch.exp2(torch.randint(-12, 8, (count // 32 + 1,), generator=generator).float()).repeat_interleave(32)[
        :count
    ]
    kind = torch.randint(0, 8, (count // 32 + 1,), generator=generator).repeat_interleave(32)[:count]
    x = torch.where(kind == 0, 0.0, torch.where(kind == 1, x.abs(), torch.where(kind == 2, -x.abs(), x)))
    return (x * size).to(dtype)


def model_program(group, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    results = []
    with moe_a2a.Collectives(group, 16 << 10, timeout=20) as coll:
        for codec in CODECS:
            for dtype in DTYPES:
                for count, op in [(1, "sum"), (31, "max"), (33, "min"), (1000, "sum"), (12345, "avg"), (0, "sum")]:
                    xs = [draw(generator, count, dtype) for _ in range(coll.num_ranks)]
                    x = xs[coll.rank].to(coll.device, copy=True)
                    out = coll.all_reduce(x, op, codec=codec, out=x if count % 2 else None).cpu()
                    assert same(out, line_codecs.two_shot(xs, codec, op)), (codec, dtype, count, op)
                    results.append(out)
    return results


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_bits_are_those_of_the_model_on_every_rank(num_ranks, session_seed):
    results = run(num_ranks, model_program, session_seed)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def check_near(out: torch.Tensor, expected: float, codec: str) -> None:
    """Equal numbers are exact if the codec's range is a power of two."""
    assert ((out.cpu().double() / expected - 1).abs() <= (2**-6 if codec == "fp8" else 0)).all()


def special_program(group) -> None:
    nan, inf = float("nan"), float("inf")
    blocks = torch.randn(12, 32, generator=torch.Generator().manual_seed(5))
    blocks[0, 3], blocks[1, 5], blocks[2, 7] = nan, inf, -inf
    blocks[3] = 0
    blocks[4] *= 2.0**-140  # denormal
    blocks[5] *= 2.0**-118
    blocks[6] *= 2.0**-112
    blocks[7] *= 2.0**124
    blocks[8] = 3.3e38
    blocks[9], blocks[9, 31] = -1.0, 1.0  # both signs of the largest magnitude
    blocks[10] = -0.0
    with moe_a2a.Collectives(group, timeout=20) as coll:
        for codec in CODECS:
            for dtype in (torch.float32, torch.bfloat16):
                x = blocks.to(dtype).reshape(-1)
                for op in ("max", "sum"):
                    xs = [x if r == 0 else x * 0.5 for r in range(coll.num_ranks)]
                    out = coll.all_reduce(xs[coll.rank].to(coll.device), op, codec=codec).cpu()
                    assert same(out, line_codecs.two_shot(xs, codec, op)), (codec, dtype, op)
                    rows = out.reshape(12, 32)
                    assert rows[:3].isnan().all()  # whole blocks
                    assert (rows[3:6] == 0).all() and (rows[10] == 0).all()
                    assert not rows[6:8].isnan().any() and (rows[6] != 0).any()
                    assert (op == "sum") or (rows[8] > 3e38).all()
            big = torch.full((100,), 2.0**100, dtype=torch.bfloat16, device=coll.device)  # above 65504
            check_near(coll.all_reduce(big, codec=codec), coll.num_ranks * 2.0**100, codec)
            halves = torch.full((100,), 2.0**-24, dtype=torch.float16, device=coll.device)  # the least float16
            check_near(coll.all_reduce(halves, codec=codec), coll.num_ranks * 2.0**-24, codec)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_special_values(num_ranks):
    run(num_ranks, special_program)


def quality_program(group, seed: int) -> None:
    count = 1 << 17
    xs = [torch.randn(count, generator=torch.Generator().manual_seed(seed + r)) for r in range(group.num_ranks)]
    exact = sum(x.double() for x in xs)
    with moe_a2a.Collectives(group, 1 << 20, timeout=20) as coll:
        for codec in CODECS:
            out = coll.all_reduce(xs[coll.rank].to(coll.device), codec=codec).cpu().double()
            sqnr = 10 * torch.log10(exact.square().sum() / (out - exact).square().sum())
            assert sqnr >= LEAST_SQNR[codec], (codec, sqnr)
            if codec == "fp8":
                continue
            # One step per rank's contribution and one for the sum; scales are rounded up by at most 2^-7.
            largest = [x.double().abs().reshape(-1, 32).amax(1) for x in xs]
            steps = sum(largest) * line_codecs.STEP[codec] * (1 + 2**-7)
            bound = steps + (exact.abs().reshape(-1, 32).amax(1) + steps) * line_codecs.STEP[codec] * (1 + 2**-7)
            assert ((out - exact).abs().reshape(-1, 32) <= bound[:, None] * (1 + 1e-6)).all(), codec


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_signal_to_noise_and_the_error_bound_of_each_block(num_ranks, session_seed):
    run(num_ranks, quality_program, session_seed)


def test_the_model_itself():
    """Against a table of all e4m3 values, and by hand."""
    codes = np.arange(256, dtype=np.uint8)[np.arange(256) & 127 != 127]
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert (line_codecs.e4m3_code(values) == codes).all() and (line_codecs.nearest_e4m3(values) == values).all()
    x = np.zeros(33, np.float32)
    x[:3], x[32] = [8.0, -7.0, 3.4], 1.0
    line, decoded = line_codecs.encode(x, "q4")
    # The scale of the first block is -1: codes 0, 15, 8 - 3 = 5, and 8 for zeros.
    assert line[:3].hex() == "f08588" and line[32:].hex() == "80bf" + "00be"
    assert decoded[:3].tolist() == [8.0, -7.0, 3.0] and decoded[32] == 1.0
    sizes = {codec: len(line_codecs.encode(np.ones(2048, np.float32), codec)[0]) for codec in CODECS}
    assert sizes == {"fp8": 2176, "q8": 2176, "q6": 1664, "q4": 1152}


def bad_codec_program(group) -> None:
    with moe_a2a.Collectives(group, timeout=20) as coll:
        x = torch.ones(100, device=coll.device)
        with pytest.raises(ValueError, match='codec=.q3. is unknown on rank .; pass one of "fp8", "q8", "q6", "q4"'):
            coll.all_reduce(x, codec="q3")
        with pytest.raises(TypeError, match="codec=8 is a int"):
            coll.all_reduce(x, codec=8)
        with pytest.raises(
            ValueError, match='codec="q8" with algorithm="one_shot" on rank .: only two_shot supports codecs'
        ):
            coll.all_reduce(x, algorithm="one_shot", codec="q8")
        with pytest.raises(
            moe_a2a.CallMismatchError, match=r"two_shot, q8, rank 1 .*two_shot, q4|two_shot, q4, rank 0"
        ):
            coll.all_reduce(x, codec="q4" if coll.rank else "q8")
            coll.check()
        assert (coll.all_reduce(x, codec="q8") == 2).all()


def test_codecs_that_do_not_exist_or_differ():
    run(2, bad_codec_program)
