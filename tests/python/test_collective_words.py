"""One-shot as LL words: the bits of one-shot as rows, for any preceding and following calls, and the same errors."""

import os
import random
import threading

import on_device
import pytest
import torch
from collective_calls import (
    ALGORITHMS,
    DTYPES,
    OPS,
    WORKSPACE,
    check_neighbours,
    check_works,
    placed,
    poisoned,
    send_words,
)
from on_device import run
from ranks import run_processes

import moe_a2a
from moe_a2a.tables.collective_tables import MOST_IN_WORDS

pytestmark = on_device.TESTS

# Elements: none, parts of a word, whole words of every dtype and target, chunks of 8 KiB, and the maximum.
COUNTS = [0, 1, 2, 3, 5, 6, 7, 12, 13, 64, 1000, 2047, 2048, 2049, 4097, 8191, 8192, 16383, 16384]


def drawn(draw: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of every magnitude, with zeros of both signs, infinities and NaNs."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    x = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-6, 5, (count,), generator=generator)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    places = torch.rand(count, generator=generator) < 0.05
    x[places] = special[torch.randint(0, 5, (int(places.sum()),), generator=generator)]
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of x, with all NaNs equal: a NaN's bits depend on which operand of an addition the machine code puts first."""
    x = x.cpu().clone()
    x[x.isnan()] = float("nan")
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def same_bits_program(group, seed: int) -> None:
    shared = random.Random(seed)
    with moe_a2a.Collectives(group, WORKSPACE, timeout=20) as coll:
        own = random.Random(seed * 64 + coll.rank)
        for dtype in DTYPES:
            for count in COUNTS:
                nbytes, op, in_place = count * dtype.itemsize, shared.choice(OPS), shared.random() < 0.5
                x = placed(drawn(own, count, dtype), coll.device, own.choice([0, 1, 2, 3]))
                send_words(coll, 0)
                expected = bits(coll.all_reduce(x, op, "one_shot"))
                send_words(coll)
                out = x if in_place else poisoned(count, x, own.choice([0, 1]))
                before = bits(x)
                coll.all_reduce(x, op, "one_shot", out=out)
                what = f"{count} {dtype}, {op}, {in_place=}, {nbytes} bytes"
                assert torch.equal(bits(out), expected), what
                assert in_place or torch.equal(bits(x), before), what
                check_neighbours(out)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_bits_are_those_of_rows(num_ranks, session_seed):
    run(num_ranks, same_bits_program, session_seed)


def test_the_bits_are_those_of_rows_on_eight_ranks(session_seed):
    run(8, same_bits_program, session_seed)


def by_turns_program(group, seed: int, num_calls: int) -> None:
    """Equal numbers, which every codec preserves: a word or row taken too early or too late is from another call."""
    draw = random.Random(seed)
    num_blocks = (0, 1, 3)[moe_a2a.as_group(group).rank % 3]
    with moe_a2a.Collectives(group, WORKSPACE, num_blocks, timeout=20) as coll:
        for call in range(num_calls):
            count, dtype, value = draw.choice([0, 1, 7, 300, 1816, 5000]), draw.choice(DTYPES), float(call % 5)
            send_words(coll, draw.choice([0, *[MOST_IN_WORDS] * 3]))
            methods = (
                [("one_shot", None)] * 4 + [(name, None) for name in ALGORITHMS] + [("auto", "q8"), ("auto", "q4")]
            )
            algorithm, codec = draw.choice(methods)
            x = torch.full((count,), value, dtype=dtype, device=coll.device)
            kind = draw.randrange(8)
            if kind == 0:
                out, merges = coll.all_gather(x), 1
            elif kind == 1:
                out, merges = coll.reduce_scatter(x, counts=[count, *[0] * (coll.num_ranks - 1)]), coll.num_ranks
            else:
                out, merges = coll.all_reduce(x, "sum", algorithm, codec), coll.num_ranks
            assert (out == value * merges).all(), (call, count, dtype, algorithm, codec, kind)


@pytest.mark.parametrize(("num_ranks", "num_calls"), [(2, 4_000), (4, 1_000)])
def test_words_and_rows_by_turns(num_ranks, num_calls, session_seed):
    run(num_ranks, by_turns_program, session_seed, num_calls)


@on_device.cpu_only
def test_words_and_rows_by_turns_of_processes(session_seed):
    run_processes(3, by_turns_program, session_seed, 1_000)


# What rank 1 does while the others send 50 float32 as words, and words that all errors contain.
OTHER_CALLS = {
    "count": (lambda coll: coll.all_reduce(torch.ones(51), algorithm="one_shot"), "of 51 float32, sum, one_shot in LL words"),
    "none": (lambda coll: coll.all_reduce(torch.ones(0), algorithm="one_shot"), "of 0 float32, sum, one_shot in LL words"),
    "dtype": (
        lambda coll: coll.all_reduce(torch.ones(50).half(), algorithm="one_shot"),
        "of 50 float16, sum, one_shot in LL words",
    ),
    "operator": (lambda coll: coll.all_reduce(torch.ones(50), "max", "one_shot"), "of 50 float32, max, one_shot in LL words"),
    "rows": (lambda coll: coll.all_reduce(torch.ones(50000), algorithm="one_shot"), "of 50000 float32, sum, one_shot"),
    "two-shot": (lambda coll: coll.all_reduce(torch.ones(50), algorithm="two_shot"), "of 50 float32, sum, two_shot"),
    "codec": (lambda coll: coll.all_reduce(torch.ones(50), codec="q4"), "of 50 float32, sum, two_shot, q4"),
    "kind": (lambda coll: coll.all_gather(torch.ones(50)), "all_gather of .* float32"),
    "wire": (
        lambda coll: send_words(coll, 0).all_reduce(torch.ones(50), algorithm="one_shot"),
        "of 50 float32, sum, one_shot",
    ),
}  # fmt: skip


def mismatch_program(group) -> None:
    with moe_a2a.Collectives(group, WORKSPACE, timeout=20) as coll, coll.device:
        send_words(coll)
        x = torch.arange(50.0)
        for call, words in OTHER_CALLS.values():
            with pytest.raises(moe_a2a.CallMismatchError) as caught:
                if coll.rank == 1:
                    call(coll)
                else:
                    coll.all_reduce(x, algorithm="one_shot", out=x)
                coll.check()
            send_words(coll)
            assert torch.equal(x, torch.arange(50.0))  # nothing was merged
            # Rank 1 may see any of the others first.
            assert (caught.value.peer == 1) == (coll.rank != 1)
            caught.match("of 50 float32, sum, one_shot in LL words")
            caught.match(f"rank 1 (calls )?(all_reduce )?{words}[,;]")
            check_works(coll)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_disagree_are_all_told(num_ranks):
    run(num_ranks, mismatch_program)


def refusal_program(group) -> None:
    with moe_a2a.Collectives(group, timeout=20) as coll, coll.device:
        send_words(coll)
        for failing in (1, 0, 1, 1):
            if coll.rank == failing:
                with pytest.raises(TypeError):
                    coll.all_reduce(None)
            else:
                with pytest.raises(moe_a2a.PeerRefusedError, match=f"rank {failing} refused its call: x is a NoneType"):
                    coll.all_reduce(torch.ones(3))
                    coll.check()
        check_works(coll)


def test_a_call_that_fails_on_one_rank_is_refused_on_all():
    run(2, refusal_program)


def absent_rank_program(group) -> str:
    with moe_a2a.Collectives(group, timeout=0.5) as coll, coll.device:
        check_works(send_words(coll))
        if coll.rank == 1:
            group.all_gather(None)
            return ""
        with pytest.raises(moe_a2a.PeerTimeoutError) as caught:
            coll.all_reduce(torch.ones(1000), algorithm="one_shot")
            coll.check()
        group.all_gather(None)
        assert (caught.value.operation, caught.value.phase) == ("one_shot_all_reduce", "call")
        return str(caught.value)


def test_an_absent_rank_is_named():
    said = run(2, absent_rank_program)
    assert "rank 1" in said[0]


def dying_program(group) -> None:
    with moe_a2a.Collectives(group, timeout=1.0) as coll:
        send_words(coll)
        x = torch.ones(4000)
        if coll.rank == 1:
            threading.Timer(0.1, os._exit, [1]).start()
        with pytest.raises(moe_a2a.PeerTimeoutError, match="rank 1"):
            while True:
                coll.all_reduce(x, algorithm="one_shot")


@on_device.cpu_only
def test_a_rank_that_dies_among_calls():
    run_processes(3, dying_program, mortal={1})
