"""TwoLevelCollectives over the ranks of one machine, split into nodes, beside Collectives of all of them."""

import os
import time
from datetime import timedelta

import on_device
import pytest
import ranks
import torch
import torch.distributed as dist
from collective_calls import OPS, check_barrier
from node_groups import groups, integers, run
from ranks import DIED

import moe_a2a
from moe_a2a import TwoLevelCollectives

pytestmark = on_device.TESTS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SPLITS = [(2, 2), (2, 1), (1, 2), (2, 3), (3, 2)]  # nodes, ranks of each
SLICE = 3 << 12  # of 3072 floats
COUNTS = [0, 1, 7, 64, 500, 3072, 3073, 40_000]


def equal_program(world, num_nodes: int, num_local: int, seed: int) -> None:
    """Sums of integers are exact, so the bits equal those of a single level."""
    generator = torch.Generator().manual_seed(100 * seed + world.rank())
    num_ranks = world.size()
    with (
        moe_a2a.Collectives(world, timeout=20) as flat,
        TwoLevelCollectives(*groups(num_nodes, num_local), slice_nbytes=SLICE, parallel_slices=3, timeout=20) as two,
    ):
        assert (two.rank, two.num_ranks, two.num_nodes) == (world.rank(), num_ranks, num_nodes)
        assert (two.parallel_slices, two.nbytes > 0, two.is_closed) == (3, True, False)
        for dtype in DTYPES:
            for op in OPS:
                for count in COUNTS:
                    x = integers(generator, (count,), dtype)
                    before, expected = x.clone(), flat.all_reduce(x, op)
                    where = (dtype, op, count, seed)
                    assert torch.equal(two.all_reduce(x, op), expected) and torch.equal(x, before), where
                    result = two.all_reduce(x, op, out=x)
                    assert result is x and torch.equal(x, expected), where
                x = integers(generator, (5 * num_ranks, 3), dtype)
                expected = flat.reduce_scatter(x, op)
                out = torch.full_like(expected, float("nan"))
                assert two.reduce_scatter(x, op, out=out) is out and torch.equal(out, expected), (dtype, op, seed)
                own = x[5 * two.rank : 5 * two.rank + 5]
                assert torch.equal(two.reduce_scatter(x, op, out=own), expected)
            x = integers(generator, (5, 3), dtype)
            expected = flat.all_gather(x)
            assert torch.equal(two.all_gather(x), expected), (dtype, seed)
            out = torch.full_like(expected, float("nan"))
            own = out[5 * two.rank : 5 * two.rank + 5].copy_(x)
            assert torch.equal(two.all_gather(own, out=out), expected), (dtype, seed)
        two.check()
    assert two.is_closed
    with pytest.raises(RuntimeError, match="closed"):
        two.all_reduce(x)


@pytest.mark.parametrize("split", SPLITS)
def test_equals_one_level(split, session_seed):
    run(split, equal_program, session_seed % 10_000)


def barrier_program(world, num_nodes: int, num_local: int, folder: str) -> None:
    with TwoLevelCollectives(*groups(num_nodes, num_local), slice_nbytes=SLICE, timeout=20) as two:
        for step in range(10):
            check_barrier(two, folder, step)


@pytest.mark.parametrize("split", [(2, 2), (3, 1)])
def test_a_barrier_waits_for_all_ranks(split, tmp_path):
    run(split, barrier_program, str(tmp_path))


def close_program(world, num_nodes: int, num_local: int, seed: int) -> None:
    """Arbitrary data: rounded once more, between the nodes; the same bits on every rank."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(seed + world.rank()))
    with TwoLevelCollectives(*groups(num_nodes, num_local), slice_nbytes=SLICE, device="cpu", timeout=20) as two:
        total = two.all_reduce(x)
        rows = [torch.empty_like(x) for _ in range(world.size())]
        dist.all_gather(rows, x)
        torch.testing.assert_close(total.double(), torch.stack(rows).double().sum(0), rtol=1e-5, atol=1e-5)
        dist.all_gather(rows, total)
        assert all(torch.equal(row, total) for row in rows)
        x[3] = float("nan")
        assert two.all_reduce(x, "max").isnan().nonzero().tolist() == [[3]]


@on_device.cpu_only
def test_any_data(session_seed):
    run((2, 2), close_program, session_seed % 10_000)


def nan_program(world, num_nodes: int, num_local: int) -> None:
    """Regression: gloo's and NCCL's max and min dropped a NaN, depending on the node that had it."""
    shape = (world.size(), 1000)
    with (
        moe_a2a.Collectives(world, timeout=20) as flat,
        TwoLevelCollectives(*groups(num_nodes, num_local), slice_nbytes=SLICE, timeout=20) as two,
    ):
        for where in range(world.size()):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.full(shape, float(world.rank()), device=two.device, dtype=dtype)
                if world.rank() == where:
                    x[:, ::7] = float("nan")
                for op in ("max", "min"):
                    for call in ("all_reduce", "reduce_scatter"):
                        expected, got = getattr(flat, call)(x, op), getattr(two, call)(x, op)
                        assert expected[:, ::7].isnan().all() and not expected[:, 1::7].isnan().any()
                        assert torch.equal(got.isnan(), expected.isnan()), (where, dtype, op, call)
                        assert torch.equal(got.nan_to_num(9), expected.nan_to_num(9)), (where, dtype, op, call)


@pytest.mark.parametrize("split", SPLITS)
def test_a_nan_on_any_rank_gives_nan(split):
    run(split, nan_program)


def inference_program(world, num_nodes: int, num_local: int) -> None:
    """Regression: an average into a tensor that was made in inference mode failed outside of it, after the exchange."""
    with TwoLevelCollectives(*groups(num_nodes, num_local), slice_nbytes=SLICE, timeout=20) as two:
        with torch.inference_mode():
            out = torch.empty(3, device=two.device)
        x = torch.arange(3.0 * world.size(), device=two.device)
        assert two.reduce_scatter(x, "avg", out=out) is out
        assert torch.equal(out, x[3 * two.rank : 3 * two.rank + 3])


def test_an_average_into_a_tensor_of_inference_mode():
    run((2, 1), inference_program)


class Recorded:
    """A rail that records when its exchanges are queued and waited for."""

    def __init__(self, rail, events):
        self._rail, self._events, self._number = rail, events, 0

    def __getattr__(self, name):
        return getattr(self._rail, name)

    def all_reduce(self, x, op):
        work = self._rail.all_reduce(x, op)
        self._events.append(f"exchange {self._number}")
        self._number += 1
        return work, self._number - 1

    def wait(self, work):
        self._events.append(f"wait {work[1]}")
        self._rail.wait(work[0])


def overlap_program(world, num_nodes: int, num_local: int) -> None:
    """Slice k + 1 is reduced while slice k is in flight, up to the limits of `parallel_slices` and the staging memory."""
    node, rail = groups(num_nodes, num_local)
    share = SLICE // num_local
    for how, expected in [({"parallel_slices": 1}, 1), ({}, 2), ({"parallel_slices": 4}, 4), (
        {"parallel_slices": 4, "staging_nbytes": 3 * share + 5}, 3)]:  # fmt: skip
        with TwoLevelCollectives(node, rail, slice_nbytes=SLICE, timeout=20, **how) as two:
            events: list[str] = []
            two._rail = Recorded(two._rail, events)
            reduce_scatter = two._local.reduce_scatter
            two._local.reduce_scatter = lambda *a, of=reduce_scatter, e=events, **k: (e.append("reduce"), of(*a, **k))[
                1
            ]
            two.all_reduce(torch.ones(6 * SLICE // 4, device=two.device))
            assert two.parallel_slices == expected and two._staging.numel() == expected * share
            for k in range(6):
                assert events.index(f"exchange {k}") < events.index(f"wait {k}")
                reduced_before_wait = events[: events.index(f"wait {k}")].count("reduce")
                assert reduced_before_wait == min(6, k + expected), (how, events)


def test_slices_overlap():
    run((2, 1) if on_device.IS_GPU else (2, 2), overlap_program)


# ---- failures


def bad_arguments_program(world, num_nodes: int, num_local: int) -> None:
    node, rail = groups(num_nodes, num_local)
    rank = world.rank()
    with pytest.raises(TypeError, match=r"between is a int; pass a torch.distributed group of one rank of every node"):
        TwoLevelCollectives(node, 3)
    with pytest.raises(ValueError, match="not a member of between"):
        TwoLevelCollectives(node, dist.GroupMember.NON_GROUP_MEMBER)
    for how, error in [
        ({"parallel_slices": 0}, "parallel_slices=0 is not in"),
        ({"staging_nbytes": 10}, f"staging_nbytes=10 on rank {rank} is less than a share of a slice, {SLICE // num_local} bytes"),
    ]:  # fmt: skip
        how = how if rank == 1 else {}
        with pytest.raises(ValueError, match=error if rank == 1 else f"a rank other than rank {rank} has refused"):
            TwoLevelCollectives(node, rail, slice_nbytes=SLICE, timeout=20, **how)
    with pytest.raises(ValueError, match="the nodes differ: slice_nbytes on rank"):
        TwoLevelCollectives(node, rail, slice_nbytes=SLICE + 4096 * (rank // num_local), timeout=20)
    # Regression: the other nodes waited until their deadline for a node whose ranks could not make their Collectives.
    for how, error in [
        ({"slice_nbytes": "x"}, "slice_nbytes='x' is a str"),
        ({"slice_nbytes": 2 * SLICE}, "ranks disagree: max_nbytes"),
        ({"device": "nonsense"}, "device='nonsense' is not a device on rank 1"),
        ({"parallel_slices": 3}, "the nodes differ: parallel_slices on rank 1 of node 0: 3, on its peer of node 1: 2"),
    ]:
        start, how = time.monotonic(), {"slice_nbytes": SLICE, "timeout": 20} | (how if rank == 1 else {})
        with pytest.raises((ValueError, TypeError, RuntimeError, moe_a2a.PeerRefusedError)) as raised:
            TwoLevelCollectives(node, rail, **how)
        words = {1: error, 0: "rank 1 could not make|ranks disagree|ranks of node 0 differ: parallel_slices"}
        raised.match(words.get(rank, "the call of rank . failed on its node, 0|the nodes differ|a rank other than"))
        assert time.monotonic() - start < ranks.slack(8), how
    with TwoLevelCollectives(node, rail, slice_nbytes=SLICE, timeout=20) as two:
        assert two.all_reduce(torch.ones(9, device=two.device)).tolist() == [4] * 9


def test_arguments_that_differ_are_refused_on_every_rank():
    run((2, 2), bad_arguments_program)


def other_between_program(world, num_nodes: int, num_local: int) -> None:
    """Only the rank on whose rail the one with a wrong `between` is waits for it: the others are told."""
    node, rail = groups(num_nodes, num_local)
    rank, start = world.rank(), time.monotonic()
    errors = {1: "between is a int", 0: "^rank 1 could not make its Collectives: TypeError", 2: "failed on its node, 0"}
    kinds = (TypeError, RuntimeError, moe_a2a.PeerRefusedError)
    with pytest.raises(kinds, match=errors.get(rank, "the exchange between the nodes failed on rank 3, node 1")):
        TwoLevelCollectives(node, 3 if rank == 1 else rail, timeout=1 if rank == 3 else 30)
    assert time.monotonic() - start < ranks.slack(15)


def unknown_argument_program(world, num_nodes: int, num_local: int) -> None:
    """Regression: all others waited until their deadline."""
    node, rail = groups(num_nodes, num_local)
    rank, start = world.rank(), time.monotonic()
    words = {1: "unexpected keyword argument 'axis'", 0: "^rank 1 could not make its Collectives: TypeError"}
    with pytest.raises((TypeError, RuntimeError), match=words.get(rank, "failed on its node, 0")):
        TwoLevelCollectives(node, between=rail, timeout=20, **({"axis": 1} if rank == 1 else {}))
    assert time.monotonic() - start < ranks.slack(8)
    with TwoLevelCollectives(node, rail, timeout=20) as two:
        assert two.all_reduce(torch.ones(3))[0] == 4


@on_device.cpu_only
def test_a_rank_with_an_unknown_argument():
    run((2, 2), unknown_argument_program)


@on_device.cpu_only
def test_a_rank_with_a_wrong_between():
    run((2, 2), other_between_program)


def ragged_program(world, num_nodes: int, num_local: int) -> None:
    """Three ranks here, two there; then rails with the nodes in another order; then one that lacks a node."""
    limit, rank = timedelta(seconds=20), world.rank()

    def made(*all_members):
        mine = None
        for members in all_members:
            group = dist.new_group(members, timeout=limit)
            mine = group if rank in members else mine
        return mine

    nodes = made([0, 1, 2], [3, 4])
    with pytest.raises(
        ValueError, match=r"the nodes differ: ranks of its node|have these places in between:|other than rank"
    ):
        TwoLevelCollectives(nodes, made([0, 3], [1, 4], [2]), timeout=20)
    if rank == 4:
        return
    pairs = [[0, 1], [2, 3]]
    for rails in ([[0, 2], [3, 1]], [[0, 3], [1, 2]], [[0, 2], [1], [3]]):
        node = dist.new_group(pairs[rank // 2], timeout=limit, use_local_synchronization=True)
        rail = next(members for members in rails if rank in members)
        # Torch sorts the ranks of a group; a separate store keeps the order.
        store = dist.PrefixStore(f"{rails} {rail}", dist.distributed_c10d._get_default_store())
        between = dist.ProcessGroupGloo(store, rail.index(rank), len(rail), limit)
        with pytest.raises(ValueError, match=r"the nodes differ: place|have these places in between:|other than rank"):
            TwoLevelCollectives(node, between, timeout=20)


@on_device.cpu_only
def test_ragged_splits_are_refused_on_every_rank():
    run((1, 5), ragged_program)


def bad_calls_program(world, num_nodes: int, num_local: int) -> None:
    """The error says what is wrong and where; the other ranks learn of it at once, and the object stays usable."""
    rank, node = world.rank(), world.rank() // num_local
    with TwoLevelCollectives(*groups(num_nodes, num_local), slice_nbytes=SLICE, timeout=20) as two:
        good = torch.ones(64)

        def refused(call, error, match):
            """Makes `call` on rank 1 alone."""
            start = time.monotonic()
            with pytest.raises(error if rank == 1 else moe_a2a.PeerRefusedError, match=match if rank == 1 else None):
                call() if rank == 1 else two.all_reduce(good)
            assert time.monotonic() - start < ranks.slack(8), "a rank waited for its deadline"
            assert (two.all_reduce(good) == world.size()).all()

        refused(lambda: two.all_reduce([1.0]), TypeError, "x is a list on rank 1; pass a torch.Tensor")
        refused(lambda: two.all_reduce(good, "product"), ValueError, "op='product' is unknown on rank 1")
        refused(lambda: two.all_reduce(good.long()), (ValueError, TypeError), "float32, float16 or bfloat16")
        refused(
            lambda: two.all_reduce(torch.ones(8, 8).t()), ValueError, r"x is not contiguous on rank 1; pass x.contig"
        )
        refused(lambda: two.all_reduce(good, out=torch.ones(65)), ValueError, r"out is \[65\].*expected \[64\]")
        long = torch.ones(70)
        refused(lambda: two.all_reduce(long[:64], out=long[6:]), ValueError, "out overlaps x on rank 1")
        refused(lambda: two.reduce_scatter(torch.ones(6)), ValueError, "6 rows on rank 1, which 4 ranks cannot split")
        refused(lambda: two.all_gather(torch.tensor(1.0)), ValueError, "no dimension to split over the ranks on rank 1")
        refused(lambda: two.all_reduce(good, codec="q8"), TypeError, "unexpected keyword argument 'codec'")
        refused(lambda: two.all_gather(), TypeError, "missing 1 required positional argument: 'x'")
        with pytest.raises((TypeError, moe_a2a.PeerRefusedError)) as caught:
            two.all_reduce(good.long() if rank == 3 else good)
        assert str(caught.value).startswith("node 1, whose rank 0 is rank 2: ") == (node == 1)  # it is rank 1 there
        assert rank != 2 or caught.value.peer == 3
        with pytest.raises(moe_a2a.CallMismatchError) as caught:  # within each node
            two.all_reduce(torch.ones(64 + rank % num_local))
        assert caught.value.peer == rank ^ 1
        for call in (  # between the nodes
            lambda: two.all_reduce(torch.ones(100 + node)),
            lambda: two.all_reduce(good, "max" if node else "min"),
            lambda: two.all_reduce(good.to(DTYPES[node])),
            lambda: two.all_gather(good) if node else two.reduce_scatter(good),
            lambda: two.all_reduce(torch.ones(1), "min") if node else two.barrier(),
        ):
            with pytest.raises(moe_a2a.CallMismatchError, match=rf"rank {rank} called .*, rank \d of node {1 - node}"):
                call()
            assert (two.all_reduce(good) == world.size()).all()
    with pytest.raises(TypeError, match="unexpected keyword argument 'codec'"):  # closed: at once
        two.all_reduce(good, codec="q8")


@on_device.cpu_only
def test_bad_calls():
    run((2, 2), bad_calls_program)


def dead_rank_program(world, num_nodes: int, num_local: int) -> None:
    """Rank 3 dies in the middle of a call: rank 2 waits for it within their node, rank 1 between the nodes, rank 0 for either
    of them."""
    rank, timeout = world.rank(), 3
    with TwoLevelCollectives(*groups(num_nodes, num_local), slice_nbytes=SLICE, timeout=timeout) as two:
        x = torch.ones(20_000)
        two.all_reduce(x)
        if rank == 3:
            real, calls = two._rail.all_reduce, []

            def die_in_the_third(share, op):
                calls.append(op)
                return os._exit(0) if len(calls) == 3 else real(share, op)

            two._rail.all_reduce = die_in_the_third
        start = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            two.all_reduce(x)
        assert time.monotonic() - start < ranks.slack(3 * timeout + 4)
        if rank == 2:
            assert isinstance(caught.value, (moe_a2a.PeerTimeoutError, moe_a2a.PeerRefusedError)), caught.value
        if rank == 1:
            assert "the exchange between the nodes failed on rank 1, node 0" in str(caught.value)
        with pytest.raises(RuntimeError):
            for _ in range(2):
                two.all_reduce(x)


@on_device.cpu_only
def test_a_dead_rank():
    assert run((2, 2), dead_rank_program, mortal={3})[3] == DIED
