"""init_process_group("moe_a2a"): collectives beside gloo's of the same run, delegated calls, DistributedDataParallel and
FSDP2, and failures. The default group is gloo's, on CPU tensors, whatever the session's device;
test_torch_backend_streams.py covers streams and graphs, which only GPUs have."""

import functools
import math
import os
import time
from datetime import timedelta

import on_device
import pytest
import ranks
import torch
import torch.distributed as dist
from backend_groups import (
    COLLECTIVES,
    DEVICE,
    REDUCE_OPS,
    all_reduce,
    full,
    integers,
    new_group,
    run_on_backend,
    run_processes,
    settle,
)
from ranks import DIED
from tiny_training import train
from torch.nn.parallel import DistributedDataParallel

import moe_a2a
from moe_a2a.arguments import ROW_DTYPES
from moe_a2a.rank_processes import RankProcesses
from moe_a2a.torch_backend import MoeA2aProcessGroup, Options

pytestmark = on_device.TESTS

NUM_STEPS = 20  # of training


def same_as_gloo_program(gloo, seed: int) -> None:
    ours = new_group()
    for dtype in ROW_DTYPES:
        for number, collective in enumerate(COLLECTIVES):
            for op in ("sum", "max", "min"):
                x = integers((37, 3), dtype, 1000 * seed + 10 * number + gloo.rank())
                expected = collective(gloo, REDUCE_OPS[op], x.cpu().float()).to(dtype)
                got = collective(ours, REDUCE_OPS[op], x)
                assert got.device.type == DEVICE, got.device
                assert torch.equal(got.cpu(), expected), (dtype, collective.__name__, op, seed)
        y = all_reduce(ours, REDUCE_OPS["avg"], integers((64,), dtype, seed) + ours.rank())
        assert torch.equal(y, integers((64,), dtype, seed) + (ours.size() - 1) / 2)
    assert [made.num_ranks for made in ours._made.values()] == [dist.get_world_size()]  # one object for everything
    dist.destroy_process_group(ours)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_collectives_give_what_gloo_gives(num_ranks, session_seed):
    run_processes(num_ranks, same_as_gloo_program, session_seed % 10_000)


def delegated_program(gloo) -> None:
    ours = new_group()
    rank, num_ranks = ours.rank(), ours.size()
    everybody = list(range(num_ranks))
    assert ours.delegates[DEVICE] == ("nccl" if on_device.IS_GPU else "gloo")

    x = full(5, rank + 1).long()
    dist.all_reduce(x, group=ours)
    assert torch.equal(x, full(5, sum(everybody) + num_ranks).long())
    x = full(5, rank + 1)
    dist.all_reduce(x, dist.ReduceOp.PRODUCT, group=ours)
    assert torch.equal(x, full(5, math.factorial(num_ranks)))

    x = full(3, rank)
    dist.broadcast(x, 1, group=ours)
    assert torch.equal(x, full(3, 1))
    parts = [full(2, -1) for _ in everybody] if rank == 0 else None
    dist.gather(full(2, rank), parts, 0, group=ours)
    assert rank != 0 or [part[0].item() for part in parts] == everybody
    for _ in range(100):  # a call that held the GIL while gloo freed the previous call's tensors deadlocked
        x = full(2, -1)
        dist.scatter(x, [full(2, 10 + r) for r in everybody] if rank == 0 else None, 0, group=ours)
        assert torch.equal(x, full(2, 10 + rank))
        x = full(num_ranks, -1)
        dist.all_to_all_single(x, torch.tensor([10.0 * rank + r for r in everybody], device=DEVICE), group=ours)
        assert x.tolist() == [10 * r + rank for r in everybody]
    x = full(2, rank)
    dist.reduce(x, 0, group=ours)
    assert rank != 0 or x[0] == sum(everybody)

    x, y = full(4, rank), full(4, -1)
    both = [
        dist.P2POp(dist.isend, x, (rank + 1) % num_ranks, group=ours),
        dist.P2POp(dist.irecv, y, (rank - 1) % num_ranks, group=ours),
    ]
    both = both if rank % 2 == 0 else both[::-1]  # NCCL: in an order in which the ranks meet
    for request in dist.batch_isend_irecv(both):
        request.wait()
    assert torch.equal(y, full(4, (rank - 1) % num_ranks))
    objects = [None] * num_ranks
    dist.all_gather_object(objects, {"rank": rank}, group=ours)
    assert objects == [{"rank": r} for r in everybody]
    assert ours._made == {}  # none of these calls made Collectives
    uneven = [full(r + 1, -1) for r in everybody]
    if on_device.IS_GPU:
        dist.all_gather(uneven, full(rank + 1, rank), group=ours)
        assert all(torch.equal(part, full(r + 1, r)) for r, part in enumerate(uneven))
    else:
        with pytest.raises(ValueError, match=rf"tensor_list has tensors of the shapes \[1\], .* on rank {rank}; pass"):
            dist.all_gather(uneven, full(rank + 1, rank), group=ours)
    dist.destroy_process_group(ours)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_is_delegated(num_ranks):
    run_processes(num_ranks, delegated_program)


def async_program(gloo) -> None:
    """After an asynchronous call its rank continues, even if the others call later; the order is kept."""
    ours = new_group()
    rank = ours.rank()
    dist.all_reduce(full(1, 1), group=ours)  # the first call makes Collectives; GPU ranks wait for each other then
    x, token = full(10_000, 1), torch.zeros(1)
    if rank == 0:
        work = dist.all_reduce(x, group=ours, async_op=True)
        dist.send(token, 1)  # rank 1 takes part after receiving this
    else:
        dist.recv(token, 0)
        work = dist.all_reduce(x, group=ours, async_op=True)
    works = [work] + [dist.all_reduce(x, group=ours, async_op=True) for _ in range(5)]
    dist.all_reduce(x, group=ours)  # runs after the queued calls
    assert torch.equal(x, torch.full_like(x, 2.0**7))
    for work in works:
        assert work.wait(timedelta(seconds=20))
    settle()
    for work in works:
        assert work.is_completed() and work.is_success()
        assert work.get_future().wait()[0] is x and work.exception() is None
    done = dist.barrier(group=ours, async_op=True)
    done.wait()
    dist.destroy_process_group(ours)
    assert ours._made == {}


def test_async_calls():
    run_processes(2, async_program)


def overwriting_program(gloo) -> None:
    """Autograd sees these writes, as with gloo."""
    ours = new_group()
    part, whole = full(3, 1), full(6, 1)
    for call, out, x in (
        (dist.all_gather_into_tensor, whole, part),
        (dist.reduce_scatter_tensor, part, whole.clone()),
        (dist.all_gather_into_tensor, full(6, 1).view(2, 3).t(), part.view(1, 3).t()),
    ):
        weight = torch.ones_like(out, requires_grad=True)
        product = (weight * out).sum()
        call(out, x, group=ours)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_autograd_sees_what_a_call_overwrites():
    run_processes(2, overwriting_program)


def subgroups_program(report) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "moe_a2a"
    x = full(100, rank)
    dist.all_reduce(x)
    assert torch.equal(x, full(100, sum(range(num_ranks))))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # with the default group's backend
    pair = pairs[rank // 2]
    assert isinstance(pair, MoeA2aProcessGroup)
    for _ in range(3):
        x = full(100, rank)
        dist.all_reduce(x, group=pair)
        assert torch.equal(x, full(100, 4 * (rank // 2) + 1))
        dist.barrier()
    assert torch.equal(moe_a2a.all_reduce(full(7, 1)), full(7, num_ranks))
    made = list(dist.group.WORLD._made.values())
    dist.destroy_process_group()
    assert made and all(coll.is_closed for coll in made)


def test_as_default_group_with_subgroups():
    run_on_backend(4, subgroups_program)


def made_again_program(report, file) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(file, num_ranks)
    for _ in range(3):
        dist.init_process_group("moe_a2a", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=10))
        x = full(100, 1)
        dist.all_reduce(x)
        assert torch.equal(x, full(100, num_ranks))
        time.sleep(0.2 * rank)  # rank 0 must not take what the others wrote for their last group for the next
        dist.destroy_process_group()


def test_a_group_can_be_destroyed_and_made_again_on_one_store(tmp_path):
    run_on_backend(3, made_again_program, str(tmp_path / "store"))


def ddp_program(gloo) -> None:
    ours = new_group()
    losses = [
        train(functools.partial(DistributedDataParallel, process_group=group, bucket_cap_mb=0.01), NUM_STEPS, DEVICE)[0]
        for group in (gloo, ours)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0] and ours._made
    dist.destroy_process_group(ours)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_distributed_data_parallel(num_ranks):
    """Losses equal gloo's up to rounding: the order of addition differs."""
    run_processes(num_ranks, ddp_program)


def fsdp_program(report, backend: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))

    def wrap(module):
        for layer in (module[0], module[2]):
            fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    losses, _ = train(wrap, NUM_STEPS, DEVICE)
    if backend == "moe_a2a":
        assert mesh.get_group()._made
        dist.destroy_process_group()
    return losses


def test_fsdp2():
    ours = run_on_backend(2, fsdp_program, "moe_a2a")
    peer = "nccl" if on_device.IS_GPU else "gloo"
    with RankProcesses(2, timeout=60, method="forkserver", backend=peer, prepare=ranks.take_device) as processes:
        theirs = processes.run(fsdp_program, peer, timeout=100)
    for of_ours, of_theirs in zip(ours, theirs, strict=True):
        assert of_ours == pytest.approx(of_theirs, rel=1e-5)


def dead_rank_program(gloo) -> None:
    group, asynchronous = new_group(timeout=timedelta(seconds=3)), new_group(timeout=timedelta(seconds=3))
    x = full(100, 1)
    for each in (group, asynchronous):
        dist.all_reduce(x, group=each)
    settle()
    if dist.get_rank() == 1:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(moe_a2a.PeerTimeoutError) as caught:
        dist.all_reduce(x, group=group)
        settle()
        dist.all_reduce(x, group=group)  # on a GPU the next call raises what kernels have found
    assert caught.value.peer == 1
    work = dist.all_reduce(x, group=asynchronous, async_op=True)
    with pytest.raises(moe_a2a.PeerTimeoutError):
        work.wait()
        settle()
        dist.all_reduce(x, group=asynchronous, async_op=True)
    if not on_device.IS_GPU:
        with pytest.raises(RuntimeError, match="PeerTimeoutError"):  # this is what DistributedDataParallel raises
            work.get_future().wait()
        assert not work.is_success() and isinstance(work.exception(), moe_a2a.PeerTimeoutError)
    assert time.monotonic() - start < ranks.slack(15)  # two deadlines
    with pytest.raises(RuntimeError):
        dist.all_reduce(x, group=group)


def test_a_dead_rank_is_named_within_the_deadline():
    assert run_processes(2, dead_rank_program, mortal={1})[1] == DIED


def bad_calls_program(gloo) -> None:
    rank = dist.get_rank()
    with pytest.raises(TypeError, match=rf"pg_options is a dict on rank {rank}; pass a moe_a2a.torch_backend.Options"):
        new_group(pg_options={"max_nbytes": 3})
    ours = new_group(pg_options=Options(max_nbytes=4096))
    x = full(100_000, 1)
    dist.all_reduce(x, group=ours)  # in slices
    assert torch.equal(x, full(100_000, 2))
    assert [coll.max_nbytes for coll in ours._made.values()] == [4096]
    with pytest.raises(moe_a2a.CallMismatchError, match="make the same calls in the same order"):
        dist.all_reduce(full(100 + rank, 1), group=ours)
        settle()
        dist.all_reduce(x, group=ours)  # the call still runs
    if not on_device.IS_GPU:
        dist.all_reduce(x, group=ours)  # the failed call is over
    assert torch.equal(x, full(100_000, 4))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MOE_A2A_BACKEND_NBYTES", "8192")
        other = new_group()
        dist.all_reduce(x, group=other)
        assert [coll.max_nbytes for coll in other._made.values()] == [8192]


def test_options_and_bad_calls():
    run_processes(2, bad_calls_program)


def barrier_beside_program(gloo) -> None:
    """A barrier was an all-reduce of one float32: the other rank got its own value as the sum of all."""
    ours, x = new_group(), full(3, 1)
    dist.all_reduce(x, group=ours)
    with pytest.raises(moe_a2a.CallMismatchError, match="rank 0( calls)? barrier"):
        dist.barrier(group=ours) if ours.rank() == 0 else dist.all_reduce(full(1, 1), group=ours)
        settle()
        dist.all_reduce(x, group=ours)  # the call still runs
    dist.destroy_process_group(ours)


def test_a_barrier_beside_an_all_reduce_of_one_value():
    run_processes(2, barrier_beside_program)
