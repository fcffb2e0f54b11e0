"""The backend as PyTorch's own libraries use it: DTensor, functional collectives, DDP's join(), programs that do not destroy
their groups."""

import gc
import subprocess
import sys
import threading
import weakref

import on_device
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from backend_groups import DEVICE, full, new_group, run_on_backend, run_processes, settle
from torch.nn.parallel import DistributedDataParallel

from moe_a2a.torch_backend import process_group, tensors

pytestmark = on_device.TESTS

OTHER_DTYPES = (torch.float64, torch.int64)  # of delegated calls


def delegated_coalesced_program(report) -> None:
    """Functional collectives call the coalesced forms, which delegates lack in Python: an AttributeError."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (num_ranks,))
    for dtype in OTHER_DTYPES:
        x = torch.arange(5 * 6, device=DEVICE).view(5, 6).to(dtype)
        for placement in (Shard(0), Shard(1), Replicate()):
            assert torch.equal(distribute_tensor(x, mesh, [placement]).full_tensor(), x)
        partial = torch.distributed.tensor.DTensor.from_local(x, mesh, [Partial()])
        assert torch.equal(partial.redistribute(mesh, [Shard(0)]).full_tensor(), num_ranks * x)

        x = torch.arange(2 * num_ranks, device=DEVICE).to(dtype)
        gathered = functional.all_gather_into_tensor_coalesced([x + rank, x], dist.group.WORLD)
        assert torch.equal(gathered[0] + 0, torch.cat([x + r for r in range(num_ranks)]))
        assert torch.equal(gathered[1] + 0, x.repeat(num_ranks))
        scattered = functional.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], dist.group.WORLD)
        share = num_ranks * x[2 * rank : 2 * rank + 2]
        assert torch.equal(scattered[0] + 0, share) and torch.equal(scattered[1] + 0, 2 * share)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(gathered := x.new_zeros(num_ranks), x[rank : rank + 1])
    manager.wait()
    settle()
    assert torch.equal(gathered, x[:num_ranks])
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_coalesced_calls_of_other_dtypes(num_ranks):
    run_on_backend(num_ranks, delegated_coalesced_program)


def scalars_program(report) -> None:
    """Gloo reads the first size of the output, which a scalar lacks: the process ended by a segmentation fault."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, *OTHER_DTYPES):
        x = torch.arange(num_ranks, device=DEVICE).to(dtype)
        outs = x.new_empty(4).unbind()
        dist.reduce_scatter_tensor(outs[0], x)
        dist.reduce_scatter(outs[1], list(x.unbind()))
        with dist._coalescing_manager():
            for out in outs[2:]:
                dist.reduce_scatter_tensor(out, x)
        assert [out.item() for out in outs] == [num_ranks * rank] * 4, dtype
    dist.destroy_process_group()


def test_scalars_as_shares():
    run_on_backend(2, scalars_program)


def join_program(gloo) -> None:
    """C++ waits for a work that Python has dropped: "Work::getFuture not implemented", and the other rank waited."""
    sums = []
    for group in (gloo, new_group()):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 4).to(DEVICE), process_group=group)
        with model.join(divide_by_initial_world_size=False):
            for step in range(1 + dist.get_rank()):
                model(full(8, step).view(2, 4)).sum().backward()
        sums.append(model.module.weight.grad.sum().item())
    assert sums[0] == pytest.approx(sums[1])
    dist.destroy_process_group(group)


def test_join_that_divides_by_the_ranks_left():
    run_processes(2, join_program)


def inflight_program(report) -> None:
    """wait_tensor() returned at once: nobody had registered the works."""
    with functional.allow_inflight_collective_as_graph_input_ctx():
        for dtype in (torch.float32, torch.int64):
            x, gathered = full(100_000, 1).to(dtype), full(200_000, 0).to(dtype)
            dist.all_reduce(x, async_op=True)
            x = torch.ops._c10d_functional.wait_tensor(x)
            assert torch.equal(x, full(100_000, 2).to(dtype)), dtype
            dist.all_gather_into_tensor(gathered, x, async_op=True)
            assert torch.equal(torch.ops._c10d_functional.wait_tensor(gathered), full(200_000, 2).to(dtype)), dtype
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    dist.destroy_process_group()


def test_waiting_for_a_tensor():
    run_on_backend(2, inflight_program)


def freed_program(report) -> None:
    """Idle threads kept the tensors of the last call that each had run."""
    futures = [dist.all_reduce(full(1000, 1), async_op=True).get_future() for _ in range(20)]
    torch.futures.wait_all([future.then(lambda _: dist.all_reduce(full(1000, 1))) for future in futures])
    del futures
    x = full(1000, 1)
    dist.all_reduce(x, async_op=True).wait()
    gone = weakref.ref(x)
    del x
    dist.barrier(async_op=True).wait()
    gc.collect()
    assert gone() is None
    dist.destroy_process_group()


@on_device.cpu_only
def test_a_tensor_is_freed_after_its_call():
    run_on_backend(2, freed_program)


@on_device.cpu_only
@pytest.mark.parametrize("last", ["None", "dist.all_reduce(x, async_op=True).get_future().then(end).wait()"])
def test_exit_with_queued_calls(tmp_path, last):
    """The thread of a group that was not destroyed, or that a callback has destroyed, aborted the process at its end."""
    program = f"""
import torch, torch.distributed as dist, moe_a2a
dist.init_process_group("moe_a2a", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
x = torch.ones(10_000)
end = lambda _: dist.destroy_process_group()
futures = [dist.all_reduce(x, async_op=True).get_future() for _ in range(300)]
{last}
print("end", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout == "end\n", ended.stderr


@on_device.cpu_only
def test_exit_while_another_thread_is_in_a_call(tmp_path):
    """Regression: the process waited for the call, which may wait for its peers until the group's timeout."""
    program = f"""
import threading, torch.distributed as dist, moe_a2a
from moe_a2a.torch_backend import work
work.EXIT_SECONDS = 0.5
dist.init_process_group("moe_a2a", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
for group in [dist.group.WORLD, dist.new_group([0])]:
    has_begun = threading.Event()
    call = lambda: (has_begun.set(), threading.Event().wait(600))
    threading.Thread(target=group._thread.run, args=(call, [], True), daemon=True).start()
    has_begun.wait()
print("end", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout == "end\n", ended.stderr


def two_threads_program(gloo) -> None:
    """Regression: an asynchronous call returned only when the synchronous one of another thread had ended."""
    ours, token = new_group(), torch.zeros(1)
    x, y = full(3, 1), full(5, 1)
    dist.all_reduce(x, group=ours)
    if dist.get_rank() == 0:
        (coll,) = ours._made.values()
        all_reduce, has_begun = coll.all_reduce, threading.Event()
        coll.all_reduce = lambda *given, **how: has_begun.set() or all_reduce(*given, **how)
        thread = threading.Thread(target=lambda: dist.all_reduce(x, group=ours))
        thread.start()
        has_begun.wait()
        work = dist.all_reduce(y, group=ours, async_op=True)
        dist.send(token, 1)  # rank 1 takes part after receiving this
        work.wait()
        thread.join()
    else:
        dist.recv(token, 0)
        for tensor in (x, y):
            dist.all_reduce(tensor, group=ours)
    assert torch.equal(x, full(3, 4)) and torch.equal(y, full(5, 2))
    dist.destroy_process_group(ours)


@on_device.cpu_only
def test_calls_of_two_threads():
    run_processes(2, two_threads_program)


def split_program(report) -> None:
    """PyTorch's split_group() of a group made in Python crashed, since its store is null."""
    group, rank = dist.group.WORLD, dist.get_rank()
    with pytest.raises(
        RuntimeError, match=rf"rank {rank}: a moe_a2a group cannot be split; use torch.distributed.new_group"
    ):
        group.split_group([0])
    store = group.get_group_store()
    store.set(f"written by {rank}", "value")
    assert store.get(f"written by {1 - rank}") == b"value"
    dist.barrier()
    dist.destroy_process_group()


def test_store_and_split():
    run_on_backend(2, split_program)


def after_destroy_program(world) -> None:
    """A call of a group that was destroyed made Collectives anew, from what the ranks had posted for the first: "rank 0 cannot map
    the memory of rank 1", or with luck memory that nobody frees."""
    group, small = new_group(), torch.nn.Linear(2, 2).to(DEVICE)
    model, x = DistributedDataParallel(small, process_group=group), full(4, 1.0)
    model(full(2, 1.0)).sum().backward()
    dist.destroy_process_group(group)
    for call in (
        lambda: model(full(2, 1.0)).sum().backward(),
        lambda: group.allreduce([x]).wait(),
        lambda: group.barrier().wait(),
        lambda: group.broadcast([x]).wait(),  # by gloo or NCCL
    ):
        with pytest.raises(RuntimeError, match=f"rank {world.rank()}: this process group has been destroyed; make"):
            call()
    group.shutdown()  # again
    dist.barrier()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_calls_after_the_group_was_destroyed(num_ranks):
    run_processes(num_ranks, after_destroy_program)


def without_kernels_program(report) -> None:
    """A build for GPUs alone has no kernels for CPU tensors, on which barrier() meets before the group has used a GPU."""
    process_group.has_kernels = tensors.has_kernels = lambda device: False
    dist.barrier()
    dist.barrier(async_op=True).wait()
    x = torch.ones(3)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((3,), float(dist.get_world_size())))
    assert not dist.group.WORLD._made  # no Collectives
    dist.destroy_process_group()


def test_without_kernels_for_the_cpu():
    run_on_backend(2, without_kernels_program)
