"""Options of the torch.distributed backend: nodes of several ranks, environment variables, registration."""

import itertools

import on_device
import pytest
import torch
import torch.distributed as dist
from backend_groups import (
    COLLECTIVES,
    DEVICE,
    REDUCE_OPS,
    TIMEOUT,
    all_gather_coalesced,
    full,
    integers,
    new_group,
    run_processes,
)

import moe_a2a
from moe_a2a.arguments import ROW_DTYPES
from moe_a2a.torch_backend import Options
from moe_a2a.torch_backend.options import Settled

pytestmark = on_device.TESTS


def two_level_program(gloo) -> None:
    """Two nodes of two ranks: every collective gives the result of a single level, in groups of every kind."""
    rank = dist.get_rank()
    options = Options(ranks_per_node=2, max_nbytes=4096, parallel_slices=3, staging_nbytes=10_000)
    two, flat = new_group(pg_options=options), new_group()
    for dtype in ROW_DTYPES:
        for number, collective in enumerate(COLLECTIVES):
            for op in ("sum", "max", "min", "avg"):
                x = integers((200, 30), dtype, 100 * number + rank)
                assert torch.equal(collective(two, REDUCE_OPS[op], x), collective(flat, REDUCE_OPS[op], x))
    x = full(10_000, 1)
    works = [dist.all_reduce(x, group=two, async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    assert torch.equal(x, full(10_000, 4**5))
    text = r"shape \[13\] on rank 0, the output \[3\]|failed on its node, 0: see that node's errors"
    with pytest.raises((ValueError, moe_a2a.PeerRefusedError), match=text):
        dist.reduce_scatter_tensor(full(3, 0), full(13 if rank == 0 else 12, 1), group=two)
    dist.barrier(group=two)
    (coll,) = two._made.values()
    assert isinstance(coll, moe_a2a.TwoLevelCollectives)
    assert (coll.node, coll.num_nodes, coll.max_nbytes, coll.parallel_slices) == (rank // 2, 2, 4096, 3)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MOE_A2A_BACKEND_RANKS_PER_NODE", "2")
        expected = {(0, 1): (1, 2), (2, 3): (1, 2), (0, 2): (2, 1), (1, 3): (2, 1), (0, 1, 2, 3): (2, 2)}
        for members, (num_nodes, num_ranks) in expected.items():
            group = dist.new_group(list(members), backend="moe_a2a", timeout=TIMEOUT)
            if rank not in members:
                continue
            x = full(100, rank)
            dist.all_reduce(x, group=group)
            assert torch.equal(x, full(100, sum(members)))
            assert (group._place.num_nodes, group._place.num_ranks) == (num_nodes, num_ranks)
    if rank < 3:
        with pytest.raises(
            ValueError, match=r"ranks \[0, 1, 2\] are placed on nodes of 2 ranks as \[\[0, 1\], \[2\]\]; pass"
        ):
            new_group([0, 1, 2], pg_options=options, use_local_synchronization=True)


def test_two_levels():
    run_processes(4, two_level_program)


def large_calls_program(gloo) -> None:
    """From nccl_nbytes on, counting inputs and outputs, NCCL makes every collective, with the same results, also of tensors
    that are not contiguous on some ranks. On the CPU gloo plays NCCL; it has no average, and its calls of lists and of single
    tensors do not match."""
    large, small = new_group(pg_options=Options(nccl_nbytes=20_000)), new_group(pg_options=Options(nccl_nbytes=1 << 30))
    delegated = []

    def noted(call):
        return lambda *given: delegated.append(given) or call(*given)

    large._nccl, large._delegate = noted(large._nccl), noted(large._delegate)
    operators, strided_ranks = dict(REDUCE_OPS), [(), (0,), (0, 1)]
    if DEVICE == "cpu":
        large._nccl_nbytes = lambda device: 20_000
        del operators["avg"]
        strided_ranks.remove((0,))
    for dtype, number, strided in itertools.product(ROW_DTYPES, range(len(COLLECTIVES)), strided_ranks):
        collective = COLLECTIVES[number]
        for (name, op), (num_rows, is_large) in itertools.product(operators.items(), ((11, False), (400, True))):
            x = integers((num_rows, 30), dtype, 100 * number + dist.get_rank())
            if dist.get_rank() in strided and collective is not all_gather_coalesced:  # whose test takes a view
                x = x.t().contiguous().t()
            delegated.clear()
            assert torch.equal(collective(large, op, x), collective(small, op, x)), (collective, name, dtype, strided)
            assert bool(delegated) == is_large, (collective, num_rows)
    rows = full(50_000, 1).view(5, 10_000)
    works = [dist.all_reduce(row, group=large, async_op=True) for row in rows]
    for work in works:
        work.wait()
    assert torch.equal(rows, full(50_000, 2).view(5, 10_000))
    dist.barrier(group=large)


def test_large_calls_go_to_nccl():
    run_processes(2, large_calls_program)


@on_device.cpu_only
def test_options_and_the_environment(monkeypatch):
    variables = {
        "max_nbytes": "MOE_A2A_BACKEND_NBYTES",
        "num_blocks": "MOE_A2A_BACKEND_BLOCKS",
        "ranks_per_node": "MOE_A2A_BACKEND_RANKS_PER_NODE",
        "parallel_slices": "MOE_A2A_BACKEND_PARALLEL_SLICES",
        "staging_nbytes": "MOE_A2A_BACKEND_STAGING_NBYTES",
        "nccl_nbytes": "MOE_A2A_BACKEND_NCCL_NBYTES",
    }
    for variable in variables.values():
        monkeypatch.delenv(variable, raising=False)
    assert Options().settled(0) == Settled(64 << 20, 0, 0, 2, 0, 8 << 20)
    for name, variable in variables.items():
        monkeypatch.setenv(variable, "7")
        assert getattr(Options().settled(0), name) == 7
        assert getattr(Options(**{name: 9}).settled(0), name) == 9
        for value in ("many", "-1", " ", "1" * 20):
            monkeypatch.setenv(variable, value)
            with pytest.raises(
                ValueError, match=rf"{variable} is '{value}' on rank 3; set it to a number from \d to \d"
            ):
                Options().settled(3)
            assert getattr(Options(**{name: 9}).settled(0), name) == 9
        monkeypatch.setenv(variable, "")  # as if it were unset
        assert Options().settled(0) == Settled(64 << 20, 0, 0, 2, 0, 8 << 20)
        monkeypatch.delenv(variable)
        with pytest.raises(ValueError, match=rf"{name}=-1 is not in .* on rank 3"):
            Options(**{name: -1}).settled(3)
    for variable in ("MOE_A2A_BACKEND_NBYTES", "MOE_A2A_BACKEND_PARALLEL_SLICES", "MOE_A2A_BACKEND_NCCL_NBYTES"):
        monkeypatch.setenv(variable, "0")
        with pytest.raises(ValueError, match=f"{variable} is '0'"):
            Options().settled(0)
        monkeypatch.delenv(variable)


def mesh_program(gloo) -> None:
    """A DeviceMesh reads the timeout of the options that it gets for a dimension: an AttributeError."""
    from torch.distributed.device_mesh import init_device_mesh

    def outer(options):
        override = {"outer": ("moe_a2a", options), "inner": "moe_a2a"}  # each call empties it
        names = ("outer", "inner")
        return init_device_mesh(DEVICE, (2, 1), mesh_dim_names=names, backend_override=override)["outer"].get_group()

    options = Options(max_nbytes=1 << 12)
    group = outer(options)
    assert group._options.max_nbytes == 1 << 12
    x = full(3000, 1)
    dist.all_reduce(x, group=group)
    assert torch.equal(x, full(3000, 2))
    options._timeout = TIMEOUT  # as users set that of NCCL's options
    assert outer(options)._seconds == TIMEOUT.total_seconds()


def test_options_of_a_dimension_of_a_mesh():
    run_processes(2, mesh_program)


@on_device.cpu_only
def test_registering_twice_changes_nothing():
    from moe_a2a import torch_backend

    before = list(dist.Backend.backend_list)
    torch_backend.register()
    assert dist.Backend.backend_list == before and "moe_a2a" in before
