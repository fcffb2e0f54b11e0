"""The backend's calls as PyTorch and its users make them: any strides, forms of ProcessGroup's methods, modes, join()."""

import time
from datetime import timedelta

import on_device
import pytest
import torch
import torch.distributed as dist
from backend_groups import DEVICE, full, integers, new_group, run_on_backend, run_processes, settle
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import moe_a2a
from moe_a2a.torch_backend import tensors

pytestmark = on_device.TESTS


def strided(x: torch.Tensor, is_contiguous: bool) -> torch.Tensor:
    """The same values, in column-major order unless is_contiguous."""
    return x if is_contiguous else x.t().contiguous().t()


def strides_program(gloo) -> None:
    """Tensors that are not contiguous on one rank went to gloo there, and the other waited for it in Collectives."""
    ours = new_group()
    rank, num_ranks = ours.rank(), ours.size()
    everyone = [integers((4, 3), torch.float32, r) for r in range(num_ranks)]
    for of_inputs, of_outputs in ((False, True), (True, False), (False, False)):
        x = strided(everyone[rank], of_inputs or rank != 0)

        def out(rows: int, of_outputs=of_outputs) -> torch.Tensor:
            return strided(full(3 * rows, -1).view(rows, 3), of_outputs or rank != 0)

        reduced = strided(x.clone(), of_outputs or rank != 0)
        dist.all_reduce(reduced, group=ours)
        parts = [out(4) for _ in everyone]
        dist.all_gather(parts, x, group=ours)
        gathered = out(4 * num_ranks)
        dist.all_gather_into_tensor(gathered, x, group=ours)
        share, listed = out(2), out(4)
        dist.reduce_scatter_tensor(share, x, group=ours)
        dist.reduce_scatter(listed, [x] * num_ranks, group=ours)
        total = sum(everyone)
        assert torch.equal(reduced, total) and torch.equal(listed, total)
        assert all(map(torch.equal, parts, everyone)) and torch.equal(gathered, torch.cat(everyone))
        assert torch.equal(share, total[2 * rank : 2 * rank + 2])
    error = ValueError if rank == 0 else moe_a2a.PeerRefusedError
    with pytest.raises(error, match=r"out is \[9\] of torch.float32"):
        dist.all_gather_into_tensor(full(8 + (rank == 0), 0), full(4, 1), group=ours)
        settle()
        dist.barrier(group=ours)
    if rank == 0 and DEVICE != "cpu":  # the other rank's barrier, which raised the refusal, was launched all the same
        dist.barrier(group=ours)
    dist.destroy_process_group(ours)


def test_tensors_that_are_contiguous_on_some_ranks_only():
    run_processes(2, strides_program)


def no_memory_program(gloo) -> None:
    """The copy of a tensor that is not contiguous fails on rank 1: the others waited until the group's timeout."""
    ours = new_group(timeout=timedelta(seconds=20))
    rank, num_ranks = ours.rank(), ours.size()
    x, share, gathered = full(4 * num_ranks, 1), full(4, 0), full(4 * num_ranks**2, 0)
    parts = list(gathered.chunk(num_ranks))
    calls = [
        lambda: dist.all_reduce(x.clone(), group=ours),
        lambda: dist.all_gather(parts, x, group=ours),
        lambda: dist.all_gather_into_tensor(gathered, x, group=ours),
        lambda: dist.reduce_scatter_tensor(share, x, group=ours),
    ]
    kept = tensors.flat

    def no_memory(x):
        raise MemoryError("no memory")

    for call in calls:
        tensors.flat = no_memory if rank == 1 else kept
        with pytest.raises(MemoryError if rank == 1 else moe_a2a.PeerRefusedError, match="no memory"):
            call()
            settle()
            dist.barrier(group=ours)
        tensors.flat = kept
        dist.barrier(group=gloo)
    dist.destroy_process_group(ours)


@on_device.cpu_only
def test_a_copy_that_fails_on_one_rank():
    run_processes(2, no_memory_program)


def modes_program(gloo) -> None:
    """Calls in the forms that ProcessGroup itself has, in inference mode, and of tensors that require grad."""
    ours = new_group()
    x, seconds = full(2, 1), timedelta(seconds=20)
    for numbers in (x, x.int()):
        for call in (
            lambda y: ours.allreduce(y),
            lambda y: ours.allreduce([y], dist.ReduceOp.SUM, seconds),
            lambda y: ours.allreduce(y, op=dist.ReduceOp.SUM),
            lambda y: ours.reduce_scatter(y, [y.clone(), y.clone()], dist.ReduceOp.SUM, seconds),
        ):
            y = numbers.clone()
            call(y).wait()
            assert torch.equal(y, 2 * numbers)
        parts = [torch.zeros_like(numbers) for _ in range(2)]
        ours.allgather(parts, numbers, seconds).wait()
        assert all(torch.equal(part, numbers) for part in parts)
        y = numbers * ours.rank()
        ours.broadcast(y, 1, seconds).wait()
        assert torch.equal(y, numbers)
    ours.barrier(timeout=seconds).wait()
    for mode in (torch.inference_mode, torch.enable_grad):
        for async_op in (False, True):
            with mode():
                y, parts = full(2, 1), [full(2, 0).requires_grad_(mode is torch.enable_grad) for _ in range(2)]
                works = (
                    dist.all_reduce(y, group=ours, async_op=async_op),
                    dist.all_gather(parts, y, group=ours, async_op=async_op),
                )
                for work in works if async_op else ():
                    work.wait()
                assert torch.equal(y, full(2, 2)) and all(torch.equal(part, y) for part in parts)
    dist.destroy_process_group(ours)


def test_forms_and_modes_of_calls():
    run_processes(2, modes_program)


def inference_tensors_program(gloo) -> None:
    """Outside of inference mode PyTorch refuses to copy into a tensor that was made in it, so calls raised that copy their results:
    to tensors with gaps, which only some ranks may have, and to lists. All others take such tensors."""
    ours = new_group()
    for async_op in (False, True):
        with torch.inference_mode():
            y, parts = full(6, 1).view(2, 3).t(), [full(2, 0) for _ in range(2)]
            y = y if ours.rank() == 1 else y.contiguous()
        works = (
            dist.all_reduce(y, group=ours, async_op=async_op),
            dist.all_gather(parts, full(2, 1), group=ours, async_op=async_op),
        )
        for work in works if async_op else ():
            work.wait()
        assert (y == 2).all() and all(torch.equal(part, full(2, 1)) for part in parts)
    dist.destroy_process_group(ours)


def test_tensors_of_inference_mode():
    run_processes(2, inference_tensors_program)


class TwoBranches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return self.branches[0](x)


def join_program(gloo) -> None:
    """Ranks with batches of different numbers: the one that ends first answers the others' calls by ProcessGroup's methods."""
    ours = new_group()
    model = DistributedDataParallel(TwoBranches().to(DEVICE), process_group=ours, find_unused_parameters=True)
    with model.join():
        for _ in range(1 + ours.rank()):
            model(full(8, 1).view(2, 4)).sum().backward()
    assert model.module.branches[0].weight.grad is not None
    dist.destroy_process_group(ours)


def test_join_with_unused_parameters():
    run_processes(2, join_program)


def callbacks_program(report) -> None:
    """Callbacks of futures make calls and wait for them, as DDP's powerSGD_hook does."""

    def again(future):
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()

    for i in range(40):
        future = dist.all_reduce(full(100, i), async_op=True).get_future().then(again).then(again)
        assert torch.equal(future.wait()[0], full(100, 8 * i))
    for _ in range(200):
        work = dist.all_reduce(full(3, 1), async_op=True)
        future = work.get_future()
        work.wait()
        assert future.done()
        settle()
        assert work.is_completed()
    destroyed = dist.all_reduce(full(3, 1), async_op=True).get_future().then(lambda _: time.sleep(0.2))
    dist.destroy_process_group()
    assert destroyed.done()


def test_callbacks_that_make_calls():
    run_on_backend(2, callbacks_program)


def hook_program(report) -> None:
    """With one bucket: the order in which callbacks of several make calls would be that of their threads."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6))).to(DEVICE))
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    for step in range(6):
        loss = model(full(64, 1 + dist.get_rank()).view(2, 32)).square().sum()
        loss.backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        sums = grads.clone()
        dist.all_reduce(sums)
        assert torch.equal(sums, 2 * grads) and grads.isfinite().all() and grads.any(), step
    dist.destroy_process_group()


def test_powersgd_hook():
    run_on_backend(2, hook_program)


def barrier_program(report) -> None:
    """A rank that begins a barrier goes on with what its peers need before they join it."""
    for _ in range(20):
        x = full(2, 1)
        if dist.get_rank() == 0:
            work = dist.barrier(async_op=True)
            dist.send(x, 1)
            assert work.wait()
        else:
            dist.recv(x, 0)
            dist.barrier()
    dist.destroy_process_group()


def test_asynchronous_barrier():
    run_on_backend(2, barrier_program)


def lists_program(report) -> None:
    """A list that has not one tensor per rank, or tensors of another size, on one rank: both learn of it, and the group remains usable."""
    is_wrong = dist.get_rank() == 0
    for length in (0, 1, 3, 4):
        parts = [full(3, 0) for _ in range(length if is_wrong else 2)]
        error = ValueError if is_wrong else moe_a2a.PeerRefusedError
        for call, text in (
            (lambda: dist.all_gather(parts, full(3, 1)), f"tensor_list has {length} tensors on rank 0; pass 2"),  # noqa: B023
            (lambda: dist.reduce_scatter(full(3, 0), parts), f"input_list has {length} tensors on rank 0; pass 2"),  # noqa: B023
        ):
            with pytest.raises(error, match=text):
                call()
    parts = [full(3 + is_wrong, 0) for _ in range(2)]
    for call, text in (
        (
            lambda: dist.all_gather(parts, full(3, 1)),
            r"tensor_list has tensors of shape \[4\] on rank 0, and tensor has \[3\]",
        ),
        (
            lambda: dist.reduce_scatter(full(3, 0), parts),
            r"input_list has tensors of shape \[4\] on rank 0, and output has \[3\]",
        ),
    ):
        with pytest.raises(ValueError if is_wrong else moe_a2a.PeerRefusedError, match=text):
            call()
    # Regression: gloo refused it on this rank, and the other waited in Collectives until the group's timeout.
    parts = [full(3, 0), full(3 + is_wrong, 0)]
    for call, text in (
        (lambda: dist.all_gather(parts, full(3, 1)), r"tensor_list has tensors of the shapes \[3\], \[4\] on rank 0"),
        (
            lambda: dist.reduce_scatter(full(3, 0), parts),
            r"input_list has tensors of the shapes \[3\], \[4\] on rank 0",
        ),
    ):
        with pytest.raises(ValueError if is_wrong else moe_a2a.PeerRefusedError, match=text):
            call()
    # Regression: "x has 5 rows, which 2 ranks cannot split evenly; pass counts=[rows of every rank]"
    error = ValueError if is_wrong else moe_a2a.PeerRefusedError
    with pytest.raises(error, match=r"shape \[5\] on rank 0, the output \[2\]; pass an input of \[4\], an equal part"):
        dist.reduce_scatter_tensor(full(2, 0), full(5 if is_wrong else 4, 1))
    x = full(2, 1)
    dist.all_reduce(x)
    assert torch.equal(x, full(2, 2))
    dist.destroy_process_group()


@on_device.cpu_only
def test_lists_of_wrong_length():
    run_on_backend(2, lists_program)


def outputs_program(report) -> None:
    """Outputs that do not fit the input on one rank: its calls went to gloo, and were one apart from the others' from then on."""
    ours, x, is_wrong = dist.group.WORLD, full(4, 1), dist.get_rank() == 0
    for wrong, text in (
        (lambda x: x.double(), r"out is \[.*\] of torch.float64, expected \[.*\] of torch.float32 on rank 0"),
        (lambda x: x.to_sparse(), "out has layout Sparse on rank 0"),
    ):

        def out(size: int, wrong=wrong) -> torch.Tensor:
            return wrong(full(size, 0)) if is_wrong else full(size, 0)

        calls = [
            lambda out=out: dist.all_gather_into_tensor(out(8), x),
            lambda out=out: dist.reduce_scatter_tensor(out(4), full(8, 1)),
        ]
        if "float64" in text:  # PyTorch compares the dtypes of lists, but not in the methods of the group
            calls.append(lambda out=out: ours.allgather([[out(4), out(4)]], [x]).wait())
            calls.append(lambda out=out: ours.reduce_scatter([out(4)], [[x, x]]).wait())
        for call in calls:
            with pytest.raises((ValueError, TypeError) if is_wrong else moe_a2a.PeerRefusedError, match=text):
                call()
            y = full(2, 1)
            dist.all_reduce(y)
            assert torch.equal(y, full(2, 2))
    dist.destroy_process_group()


@on_device.cpu_only
def test_outputs_that_do_not_fit_on_one_rank():
    run_on_backend(2, outputs_program)


def gaps_program(gloo) -> None:
    """Gloo takes the elements of a tensor with gaps for adjacent, and returns wrong values."""
    ours = new_group()
    rank, num_ranks = ours.rank(), ours.size()

    def gapped() -> torch.Tensor:
        return integers((3, 8), torch.int64, rank)[:, ::2]

    def dense() -> torch.Tensor:
        return torch.empty(3, 4, dtype=torch.int64)

    first = dist.get_global_rank(ours, 0)
    calls = {
        "all_reduce": lambda x: dist.all_reduce(x, group=ours),
        "broadcast": lambda x: dist.broadcast(x, first, group=ours),
        "reduce": lambda x: dist.reduce(x, first, group=ours),
        "gather": lambda x: dist.gather(
            x, [dense() for _ in range(num_ranks)] if rank == 0 else None, first, group=ours
        ),
        "scatter": lambda x: dist.scatter(
            x, [dense() for _ in range(num_ranks)] if rank == 0 else None, first, group=ours
        ),
        "all_gather": lambda x: dist.all_gather([dense() for _ in range(num_ranks)], x, group=ours),
        "all_to_all_single": lambda x: dist.all_to_all_single(torch.empty(6, 2, dtype=torch.int64), x.t(), group=ours),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"strides \[.*2.*\] on rank {rank}; gloo, .*pass .contiguous\(\)"):
            call(gapped())
            pytest.fail(f"{name} took a tensor with gaps")
    x, total = gapped().contiguous(), sum(integers((3, 8), torch.int64, r)[:, ::2] for r in range(num_ranks))
    dist.all_reduce(x, group=ours)
    assert torch.equal(x, total)
    dist.destroy_process_group(ours)


@on_device.cpu_only
def test_tensors_with_gaps_that_gloo_would_misread():
    run_processes(2, gaps_program)


def negative_program(gloo) -> None:
    """Gloo sent the memory of a negative view, such as `z.conj().imag`: the values with the opposite sign."""
    ours = new_group()
    first, rank = dist.get_global_rank(ours, 0), ours.rank()
    negative = torch._neg_view(torch.ones(2, dtype=torch.int64))
    calls = {
        "all_reduce": lambda x: dist.all_reduce(x, dist.ReduceOp.MAX, group=ours),
        "broadcast": lambda x: dist.broadcast(x, first, group=ours),
        "all_to_all_single": lambda x: dist.all_to_all_single(torch.empty_like(x), x, group=ours),
        "all_to_all_single, the output": lambda x: dist.all_to_all_single(x, torch.ones_like(x), group=ours),
        "recv from any rank": lambda x: dist.recv(x, group=ours),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"shape \[2\] is a negative view on rank {rank}.*pass .resolve_neg\(\)"):
            call(negative)
            pytest.fail(f"{name} took a negative view")
    resolved = negative.resolve_neg()
    dist.all_reduce(resolved, dist.ReduceOp.MAX, group=ours)
    assert resolved.tolist() == [-1, -1]
    dist.destroy_process_group(ours)


@on_device.cpu_only
def test_negative_views_whose_memory_the_delegates_would_send():
    run_processes(2, negative_program)
