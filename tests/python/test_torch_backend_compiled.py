"""The backend under torch.compile. Where it breaks a graph, PyTorch calls the group while Dynamo compiles every Python function
that gets a tensor; it tried to compile the process group: InternalTorchDynamoError, in DDP's forward pass too."""

import on_device
import pytest
import torch
import torch.distributed as dist
from backend_groups import DEVICE, run_on_backend
from torch.nn.parallel import DistributedDataParallel

pytestmark = on_device.TESTS


def broadcast(x):
    dist.broadcast(x, 1)
    return x


def reduce(x):
    dist.reduce(x, 0)
    return x if dist.get_rank() == 0 else 0 * x


def send_and_receive(x):
    received, rank = torch.empty_like(x), dist.get_rank()
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    if rank == 1:
        ops.reverse()  # between GPUs, NCCL makes them one after another
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def receive_from_any_rank(x):
    dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x)
    return x


def scatter(x):
    own = torch.empty_like(x)
    dist.scatter(own, [x, 2 * x] if dist.get_rank() == 0 else None)
    return own


def all_reduce_later(x):
    work = dist.all_reduce(x, async_op=True)
    y = x.new_ones(3)
    work.wait()
    return x + y


def reduce_scatter(x):
    own = torch.empty_like(x)
    work = dist.reduce_scatter(own, [x, 2 * x], async_op=True)
    y = x + 1
    work.get_future().wait()
    return own + y


def barrier(x):
    work = dist.barrier(async_op=True)
    work.wait()
    return x


FUNCTIONS = [
    broadcast,
    reduce,
    send_and_receive,
    receive_from_any_rank,
    scatter,
    all_reduce_later,
    reduce_scatter,
    barrier,
]


def compiled(function):
    return torch.compile(function, backend="aot_eager")


def functions_program(report, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for function in FUNCTIONS:
        if DEVICE != "cpu" and function is receive_from_any_rank:
            continue  # NCCL receives from a named rank

        def between_operations(x, function=function):
            return function(x + 1) * 2

        x = torch.randint(-9, 9, (3,), generator=generator).to(DEVICE, torch.float32)
        expected = between_operations(x)
        assert torch.equal(compiled(between_operations)(x), expected), function.__name__
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_compiled_functions_that_make_calls(session_seed):
    run_on_backend(2, functions_program, session_seed)


def steps_program(report, seed: int) -> None:
    """Gradients of a compiled DDP model, and of a compiled step of one; batch norm has buffers, which DDP broadcasts."""
    gradients = []
    for how in ("eager", "model", "step"):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).to(DEVICE)
        model = DistributedDataParallel(model)
        called = compiled(model) if how == "model" else model

        def step(x, called=called):
            called(x).square().sum().backward()

        for number_of_rows in (3, 3, 5):
            torch.manual_seed(seed + number_of_rows + dist.get_rank())
            (compiled(step) if how == "step" else step)(torch.randn(number_of_rows, 4, device=DEVICE))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-4)
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_compiled_data_parallel_steps(session_seed):
    run_on_backend(2, steps_program, session_seed)
