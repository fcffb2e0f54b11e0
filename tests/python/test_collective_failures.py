"""Collectives whose ranks disagree, whose arguments are wrong, or whose peers do not arrive: what every rank raises, and that
the object keeps working afterwards."""

import os
import threading

import pytest
import torch
from collective_calls import check_works
from limits import limits
from ranks import run_processes, run_threads

import moe_a2a

pytestmark = pytest.mark.cpu


# What rank 1 does while the others call all_reduce(torch.ones(5000)) by one_shot, and words that all errors contain.
OTHER_CALLS = {
    "count": (lambda coll: coll.all_reduce(torch.ones(5001), algorithm="one_shot"), "all_reduce of 5001 float32, sum"),
    "slices": (
        lambda coll: coll.all_reduce(torch.ones(50001), algorithm="one_shot"),
        "all_reduce of 50001 float32, sum",
    ),
    "none": (lambda coll: coll.all_reduce(torch.ones(0), algorithm="one_shot"), "all_reduce of 0 float32, sum"),
    "dtype": (
        lambda coll: coll.all_reduce(torch.ones(5000, dtype=torch.float16), algorithm="one_shot"),
        "all_reduce of 5000 float16, sum, one_shot",
    ),
    "operator": (
        lambda coll: coll.all_reduce(torch.ones(5000), "max", "one_shot"),
        "all_reduce of 5000 float32, max, one_shot",
    ),
    "algorithm": (
        lambda coll: coll.all_reduce(torch.ones(5000), "sum", "two_shot"),
        "all_reduce of 5000 float32, sum, two_shot",
    ),
    "kind": (
        lambda coll: coll.reduce_scatter(torch.ones(5000), counts=[5000, *[0] * (coll.num_ranks - 1)]),
        "reduce_scatter of 5000 float32, sum",
    ),
    "gather": (lambda coll: coll.all_gather(torch.ones(7)), "all_gather of .* float32"),
    "barrier": (lambda coll: coll.barrier(), "barrier"),
}


def mismatch_program(group) -> None:
    with moe_a2a.Collectives(group, 16 << 10, timeout=20) as coll:
        for call, words in OTHER_CALLS.values():
            with pytest.raises(moe_a2a.CallMismatchError) as caught:
                if coll.rank == 1:
                    call(coll)
                else:
                    coll.all_reduce(torch.ones(5000), algorithm="one_shot")
            assert caught.value.peer == (0 if coll.rank == 1 else 1)
            caught.match(f"rank 1 (calls )?{words}")
            caught.match(
                "rank 0 (calls )?all_reduce of 5000 float32, sum, one_shot" if coll.rank < 2 else "rank 2 calls"
            )
            caught.match("make the same calls in the same order")
            check_works(coll)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_disagree_are_all_told(num_ranks):
    run_threads(num_ranks, mismatch_program)


def other_counts_program(group) -> None:
    with moe_a2a.Collectives(group, timeout=20) as coll:
        with pytest.raises(moe_a2a.CallMismatchError, match="divided by different counts"):
            coll.reduce_scatter(torch.ones(10), counts=[4, 6] if coll.rank else [5, 5])
        with pytest.raises(
            moe_a2a.CallMismatchError, match="all_gather of (10|8) float32, rank . all_gather of (10|8) "
        ):
            coll.all_gather(torch.ones(5 - coll.rank))
        check_works(coll)


def test_counts_that_differ():
    run_threads(2, other_counts_program)


def other_rows_program(group) -> None:
    """Unchecked, every rank gets the elements in its own shape, without an error."""
    with moe_a2a.Collectives(group, symmetric_nbytes=1 << 16, timeout=20) as coll:
        for shapes in [((4, 6), (8, 3)), ((2, 3, 4), (2, 4, 3)), ((24,), (24, 1)), ((0, 3), (0, 4))]:
            x = torch.ones(shapes[coll.rank])
            for in_symmetric_memory in (False, True):
                x = coll.empty(x.shape).copy_(x) if in_symmetric_memory else x
                for call in coll.all_gather, coll.reduce_scatter:
                    with pytest.raises(moe_a2a.CallMismatchError, match="or into rows of other shapes|or other rows"):
                        call(x)
                        coll.check()
        check_works(coll)


def test_rows_that_differ():
    run_threads(2, other_rows_program)


# Calls that fail before they begin, and what both ranks learn.
BAD_CALLS = [
    (lambda coll: coll.all_reduce("x"), TypeError, "x is a str on rank 1"),
    (lambda coll: coll.all_reduce(torch.ones(4), axis=1), TypeError, "unexpected keyword argument 'axis'"),
    (lambda coll: coll.all_gather(), TypeError, "missing 1 required positional argument: 'x'"),
    (lambda coll: coll.all_reduce(torch.ones(3, dtype=torch.int32)), TypeError, "x has dtype torch.int32 on rank 1"),
    (
        lambda coll: coll.all_reduce(torch.ones(3, dtype=torch.float64)),
        TypeError,
        "expected float32, float16 or bfloat16",
    ),
    (
        lambda coll: coll.all_reduce(torch.ones(4, 4).t()[1:]),
        ValueError,
        r"x is not contiguous \(strides \[1, 4\]\) on rank 1",
    ),
    (lambda coll: coll.all_reduce(torch._neg_view(torch.ones(4))), ValueError, "x "),
    (lambda coll: coll.all_reduce(torch.eye(4).to_sparse()), TypeError, "x has layout Sparse on rank 1"),
    (lambda coll: coll.all_reduce(torch.ones(4, requires_grad=True)), ValueError, "x requires grad.* on rank 1"),
    (
        lambda coll: coll.all_gather(torch.ones(4), out=torch.ones(8, requires_grad=True)),
        ValueError,
        "out requires grad.* on rank 1",
    ),
    (lambda coll: coll.all_reduce(torch.ones(4, device="meta")), ValueError, "x is on meta, these Collectives"),
    (
        lambda coll: coll.all_reduce(torch.ones(4), "prod"),
        ValueError,
        'op=.prod. is unknown on rank 1; pass one of "sum"',
    ),
    (lambda coll: coll.all_reduce(torch.ones(4), 3), TypeError, "op=3 is a int on rank 1"),
    (
        lambda coll: coll.all_reduce(torch.ones(4), algorithm="tree"),
        ValueError,
        "algorithm=.tree. is unknown on rank 1",
    ),
    (
        lambda coll: coll.all_reduce(torch.ones(4), out=torch.ones(5)),
        ValueError,
        "out is .5. of torch.float32, expected .4. of",
    ),
    (lambda coll: coll.all_reduce(torch.ones(4), out=[1]), TypeError, "out is a list on rank 1"),
    (
        lambda coll: (lambda x: coll.all_reduce(x[:-1], out=x[1:]))(torch.ones(5)),
        ValueError,
        "out overlaps x on rank 1",
    ),
    (
        lambda coll: coll.reduce_scatter(torch.ones(3)),
        ValueError,
        "3 rows, which 2 ranks cannot split evenly on rank 1",
    ),
    (lambda coll: coll.reduce_scatter(torch.tensor(1.0)), ValueError, "x has no dimension to split over the ranks"),
    (lambda coll: coll.reduce_scatter(torch.ones(3), counts=[3]), ValueError, "counts has 1 numbers for 2 ranks"),
    (lambda coll: coll.reduce_scatter(torch.ones(3), counts=[1, 3]), ValueError, "counts has the sum 4, x has 3 rows"),
    (lambda coll: coll.reduce_scatter(torch.ones(3), counts=[-1, 4]), ValueError, r"counts\[0\]=-1 is not in"),
    (lambda coll: coll.reduce_scatter(torch.ones(3), counts="12"), TypeError, "counts=.12. is a str"),
    (lambda coll: coll.reduce_scatter(torch.ones(3), counts=[1, 2.5]), TypeError, "counts="),
    (lambda coll: coll.all_gather(torch.ones(3), [3, 4]), ValueError, "x has 3 rows, counts says 4 on rank 1"),
    (
        lambda coll: coll.all_gather(torch.ones(3), out=torch.ones(3)),
        ValueError,
        "out is .3. of torch.float32, expected .6. of",
    ),
]


def bad_input_program(group) -> None:
    with moe_a2a.Collectives(group, 16 << 10, timeout=20) as coll:
        for bad, error, text in BAD_CALLS:
            if coll.rank == 1:
                with pytest.raises(error, match=text):
                    bad(coll)
            else:
                with pytest.raises(moe_a2a.PeerRefusedError, match="rank 1 refused its call: ") as caught:
                    coll.all_reduce(torch.ones(50000))  # several slices
                caught.match(text)
                assert caught.value.peer == 1
            check_works(coll)
        for _ in range(3):  # on all ranks, with no call in between
            with pytest.raises(ValueError, match="algorithm="):
                coll.all_reduce(torch.ones(3), algorithm="tree")
        check_works(coll)


def test_a_call_that_fails_on_one_rank_is_refused_on_all():
    run_threads(2, bad_input_program)


def early_refusal_program(group) -> None:
    """A rank's refusal does not wait for the others: they call long after it has raised."""
    with moe_a2a.Collectives(group, timeout=20) as coll:
        for failing in (1, 0, 1):
            if coll.rank == failing:
                with pytest.raises(TypeError):
                    coll.all_reduce(None)
            group.all_gather(None)
            if coll.rank != failing:
                with pytest.raises(moe_a2a.PeerRefusedError, match="x is a NoneType"):
                    coll.all_reduce(torch.ones(3))
        check_works(coll)


def test_a_refusal_does_not_wait():
    run_threads(2, early_refusal_program)


def construction_program(group) -> None:
    for bad, error, text in [
        (0, ValueError, "max_nbytes=0 is not in"),
        ("1", TypeError, "max_nbytes='1' is a str"),
        (True, TypeError, "max_nbytes=True"),
    ]:
        with pytest.raises(error, match=text):
            moe_a2a.Collectives(group, bad)
    with pytest.raises(ValueError, match="num_blocks=-1 is not in"):
        moe_a2a.Collectives(group, num_blocks=-1)
    with pytest.raises(TypeError, match=rf"^table={{}} is a dict on rank {group.rank}; pass the path of a file"):
        moe_a2a.Collectives(group, table={})
    with pytest.raises((ValueError, RuntimeError), match="ranks disagree.*max_nbytes"):
        moe_a2a.Collectives(group, 1000 + group.rank)
    with moe_a2a.Collectives(group, 1, timeout=20) as coll:  # 64 elements at a time
        check_works(coll)
        assert coll.nbytes < 1 << 20


def test_bad_arguments_of_the_constructor():
    run_threads(2, construction_program)


def absent_rank_program(group, algorithm: str) -> str:
    with moe_a2a.Collectives(group, symmetric_nbytes=400_000, timeout=0.5) as coll:
        x = coll.empty(100_000)
        check_works(coll)
        if coll.rank == 1:
            group.all_gather(None)
            return ""
        with pytest.raises(moe_a2a.PeerTimeoutError) as caught:
            coll.all_reduce(x, algorithm=algorithm, out=x)
        with pytest.raises(moe_a2a.PeerTimeoutError, match="rank 1"):  # it stays gone
            coll.all_gather(torch.ones(1))
        group.all_gather(None)
        assert (caught.value.operation, caught.value.phase) == (f"{algorithm}_all_reduce", "call")
        return str(caught.value)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring", "recursive_doubling", "direct"])
def test_an_absent_rank_is_named(algorithm):
    said = run_threads(3, absent_rank_program, algorithm)
    assert all("rank 1" in text for text in (said[0], said[2]))


def dying_program(group, algorithm: str) -> None:
    with moe_a2a.Collectives(group, 64 << 10, symmetric_nbytes=16 << 20, timeout=1.0) as coll:
        x = coll.empty(1 << 22).fill_(1)  # a few hundred slices of two_shot
        if coll.rank == 1:
            threading.Timer(0.1, os._exit, [1]).start()
        with pytest.raises(moe_a2a.PeerTimeoutError, match="rank 1"):
            while True:
                coll.all_reduce(x, algorithm=algorithm, out=x)


@pytest.mark.parametrize("algorithm", ["two_shot", "direct"])
def test_a_rank_that_dies_in_the_middle_of_a_call(algorithm):
    run_processes(3, dying_program, algorithm, mortal={1})


def no_thread_program(group) -> None:
    """The others waited until their deadline, and the error was "Resource temporarily unavailable"."""
    words = r"no thread left for block 2 of .*; pass a smaller num_blocks, or raise the limits"
    x = torch.ones(5000)
    with moe_a2a.Collectives(group, num_blocks=2, timeout=20.0) as coll:
        if coll.rank == 1:
            with limits(nbytes=1 << 20), pytest.raises(RuntimeError, match=words):  # less than a thread's stack
                coll.all_reduce(x, algorithm="two_shot")
        else:
            with pytest.raises(moe_a2a.PeerRefusedError, match="rank 1 refused its call: .*" + words):
                coll.all_reduce(x, algorithm="two_shot")
        check_works(coll)


def test_a_rank_that_can_start_no_thread():
    run_processes(2, no_thread_program, timeout=15)
