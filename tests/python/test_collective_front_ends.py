"""Front ends of Collectives: moe_a2a.all_reduce() on the default group, QuickReduce's interface, and the gradient hook of
DistributedDataParallel."""

import pytest
import tiny_training
import torch
import torch.distributed as dist
from ranks import run_processes
from torch.nn.parallel import DistributedDataParallel

import moe_a2a
import moe_a2a.ddp
import moe_a2a.quickreduce as qr
from moe_a2a.default_collectives import default_collectives

pytestmark = pytest.mark.cpu


def default_group_program(group) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.arange(1000.0) + rank
    expected = torch.arange(1000.0) * ranks + sum(range(ranks))
    assert torch.equal(moe_a2a.all_reduce(x), expected)
    assert moe_a2a.all_reduce(x, "max", "two_shot", out=x) is x and x[0] == ranks - 1
    first = default_collectives(x.device)
    assert default_collectives(torch.device("cpu")) is first  # made once
    with pytest.raises(TypeError if rank == 0 else moe_a2a.PeerRefusedError, match="x is a list on rank 0"):
        moe_a2a.all_reduce([1.0] if rank == 0 else x)
    first.close()  # on every rank, as after a PeerTimeoutError
    x = torch.arange(1000.0) + rank
    assert torch.equal(moe_a2a.all_reduce(x), expected)
    second = default_collectives(x.device)
    assert second is not first
    dist.barrier()
    dist.destroy_process_group()
    assert second.is_closed


def wrong_calls_program(group) -> None:
    """Of the default group's all_reduce() on rank 0, also as the first call."""
    x, is_wrong = torch.ones(5), dist.get_rank() == 0
    for given, options, error, match in (
        ((x,), {"axis": 0}, TypeError, "unexpected keyword argument 'axis'"),
        ((), {}, TypeError, "missing 1 required positional argument: 'x'"),
        ((x.to("meta"),), {}, ValueError, "x is on meta"),
    ):
        expected = (error, match) if is_wrong else (moe_a2a.PeerRefusedError, f"rank 0.*{match}")
        with pytest.raises(expected[0], match=expected[1]):
            moe_a2a.all_reduce(*given, **options) if is_wrong else moe_a2a.all_reduce(x)
        assert torch.equal(moe_a2a.all_reduce(x), 2 * x)


def test_a_wrong_all_reduce_on_the_default_group_is_refused_on_every_rank():
    """The others waited for half a minute, and then no rank could call it again."""
    run_processes(2, wrong_calls_program)


def test_all_reduce_on_the_default_group():
    run_processes(2, default_group_program)


def test_all_reduce_without_a_group():
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group"):
        moe_a2a.all_reduce(torch.ones(1))


def quickreduce_program(group) -> None:
    """QuickReduce's own demo, and calls that its interface refuses."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with pytest.raises(RuntimeError, match=r"call init\(world_size, rank\) first"):
        qr.get_comm_handle()
    qr.init(ranks, rank)
    assert (qr.get_world_size(), qr.get_rank()) == (ranks, rank)
    handles = [None] * ranks
    dist.all_gather_object(handles, qr.get_comm_handle())
    qr.set_comm_handles(handles)
    tensor = torch.ones(1024, dtype=torch.float16)
    for profile in qr.Profile:
        result = qr.allreduce(profile, tensor)
        assert result is not tensor and (result - ranks).abs().max() <= (0.05 if profile == qr.Profile.FP8 else 0)
    assert (qr.allreduce(1, tensor) == ranks).all()
    for bad, error, text in [
        ((6, tensor), ValueError, r"profile=6 is not in \[1, 5\]"),
        ((1, "x"), TypeError, "tensor is a str"),
        ((1, tensor.double()), TypeError, "tensor has dtype torch.float64 on rank 0; pass torch.float16, "),
        ((1, tensor[::2]), ValueError, "tensor is not contiguous on rank 0; pass tensor.contig"),
        ((1, torch.empty((512 << 19) + 1, dtype=torch.float32)), ValueError, "> 536870912 on rank"),
    ]:
        with pytest.raises(error if rank == 0 else moe_a2a.PeerRefusedError, match=text):
            qr.allreduce(*(bad if rank == 0 else (1, tensor)))
    dist.barrier()
    qr.close()


def test_quickreduce():
    run_processes(2, quickreduce_program)


@pytest.mark.parametrize(
    ("world_size", "rank", "text"),
    [
        (2, 2, r"rank=2 is not in \[0, 1\]; pass"),
        (2, -1, r"rank=-1 is not in \[0, 1\]; pass"),
        (0, 2, r"world_size=0 is not in \[1, 64\]; pass"),
        (65, 0, r"world_size=65 is not in \[1, 64\]; pass"),
    ],
)
def test_quickreduce_of_no_such_rank(world_size, rank, text):
    """The errors named num_ranks, which init() does not have, or no number to pass. An instance from before is kept."""
    qr.init(1, 0)
    with pytest.raises(ValueError, match=f"^{text}"):
        qr.init(world_size, rank)
    assert qr.get_world_size() == 1
    qr.close()


def failed_feedback_program(group) -> None:
    """What precedes the all-reduce fails on rank 0."""
    with moe_a2a.Collectives(group, timeout=20) as coll:
        state = moe_a2a.ddp.GradientState(coll, "q8")
        if coll.rank == 0:
            state.close()
        with pytest.raises(
            RuntimeError if coll.rank == 0 else moe_a2a.PeerRefusedError, match="this GradientState is closed"
        ):
            train(state, 1)
        state.close()


def untaken_program(group, codec: str | None) -> None:
    """The error named rank 0 on every rank; without a codec, a tensor `x` and what to pass instead."""
    with moe_a2a.Collectives(group, timeout=20) as coll:
        state = moe_a2a.ddp.GradientState(coll, codec)
        for module, x, text in (
            (
                torch.nn.Linear(3, 2, dtype=torch.float64),
                torch.ones(1, 3, dtype=torch.float64),
                "have dtype torch.float64",
            ),
            (torch.nn.Embedding(3, 2, sparse=True), torch.tensor([1]), "are sparse"),
        ):
            model = DistributedDataParallel(module)
            model.register_comm_hook(state, moe_a2a.ddp.average_gradients)
            with pytest.raises(TypeError, match=f"the gradients {text} on rank {coll.rank}; make the "):
                model(x).sum().backward()
        state.close()


@pytest.mark.parametrize("codec", [None, "q8"])
def test_gradients_that_collectives_do_not_take(codec):
    run_processes(2, untaken_program, codec)


def test_a_state_is_checked_when_it_is_made():
    with pytest.raises(TypeError, match="collectives is a NoneType; pass a moe_a2a.Collectives"):
        moe_a2a.ddp.GradientState(None)
    with moe_a2a.Collectives(moe_a2a.thread_group(1)[0], device="cpu") as coll:
        with pytest.raises(ValueError, match="codec='q5' is unknown"):
            moe_a2a.ddp.GradientState(coll, "q5")
        with pytest.raises(TypeError, match="error_feedback='no' is a str on rank 0; pass True or False"):
            moe_a2a.ddp.GradientState(coll, "q4", error_feedback="no")
    with pytest.raises(ValueError, match="collectives is closed on rank 0; pass an open one"):
        moe_a2a.ddp.GradientState(coll)


@pytest.mark.parametrize("handles", [None, b"x", [None], 5])
def test_what_are_no_handles(handles):
    group = moe_a2a.HandleExchange(0, 1)
    with moe_a2a.Collectives(group, device="cpu") as coll:
        with pytest.raises(TypeError, match="pass the list of get_comm_handle\\(\\) of every rank"):
            coll.set_comm_handles(handles)


def test_error_feedback_that_fails_on_one_rank():
    run_processes(2, failed_feedback_program)


def train(state: moe_a2a.ddp.GradientState | None, num_steps: int) -> tuple[list[float], torch.Tensor]:
    """This rank's losses, and the weights."""

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        model = DistributedDataParallel(module, bucket_cap_mb=0.01)  # several buckets
        if state is not None:
            model.register_comm_hook(state, moe_a2a.ddp.average_gradients)
        return model

    losses, module = tiny_training.train(wrap, num_steps)
    return losses, torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def same_on_all_ranks(weights: torch.Tensor) -> bool:
    every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weights)
    return all(torch.equal(other, weights) for other in every)


def hook_program(group) -> tuple[float, ...]:
    steps = 60
    losses, _ = train(None, steps)
    ends = [losses[-1]]
    with moe_a2a.Collectives(group, timeout=20) as coll:
        for codec, feedback in [(None, True), ("q8", True), ("q4", True), ("q4", False)]:
            state = moe_a2a.ddp.GradientState(coll, codec, error_feedback=feedback)
            own, weights = train(state, steps)
            state.close()
            assert same_on_all_ranks(weights), codec
            ends.append(own[-1])
            if codec is None:
                assert own == pytest.approx(losses, rel=1e-5)
            assert own[-1] < 0.6 * own[0]
    return tuple(ends)


def test_gradients_through_the_hook():
    """Without a codec the losses equal gloo's up to rounding; with one they end close."""
    for gloo, plain, q8, q4, q4_alone in run_processes(2, hook_program):
        assert plain == pytest.approx(gloo, rel=1e-5)
        assert q8 == pytest.approx(gloo, rel=0.01)
        assert q4 == pytest.approx(gloo, rel=0.05)
        assert q4_alone == pytest.approx(gloo, rel=0.2)


def feedback_program(group) -> None:
    """What one step loses is added in the next: over many steps of equal gradients the mean is exact."""

    rank, count, steps = dist.get_rank(), 1000, 64
    weights = torch.nn.Parameter(torch.zeros(count))

    class Bucket:
        def __init__(self, gradients: torch.Tensor):
            self.gradients = gradients

        def buffer(self) -> torch.Tensor:
            return self.gradients

        def index(self) -> int:
            return 0

        def parameters(self) -> list[torch.Tensor]:
            return [weights]

    own = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]
    exact = sum(own) / len(own)
    errors = []
    with moe_a2a.Collectives(group, timeout=20) as coll:
        for feedback in (True, False):
            state = moe_a2a.ddp.GradientState(coll, "q4", error_feedback=feedback)
            total = torch.zeros(count)
            for _ in range(steps):
                total += moe_a2a.ddp.average_gradients(state, Bucket(own[rank].clone())).wait()
            errors.append((total / steps - exact).square().mean().item())
            state.close()
    assert errors[0] < 0.5 * errors[1]  # encoding the average loses the rest


def test_error_feedback():
    run_processes(2, feedback_program)


class RegisteredInAnotherOrder(torch.nn.Module):
    """Before the first step DDP's bucket has the gradients in the order of the parameters, then in that of their arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = (torch.nn.Parameter(torch.zeros(1024)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.unused * 0).sum() + (self.used * x).sum()


def rebuilt_buckets_program(group) -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(dist.get_rank()))
    with moe_a2a.Collectives(group, timeout=20) as coll:
        state = moe_a2a.ddp.GradientState(coll, "q4")
        model = DistributedDataParallel(RegisteredInAnotherOrder())
        model.register_comm_hook(state, moe_a2a.ddp.average_gradients)
        for _ in range(3):
            model(x).backward()
            assert model.module.unused.grad.abs().max() == 0
        state.close()


def test_what_a_weight_has_lost_is_not_given_to_another_in_rebuilt_buckets():
    run_processes(2, rebuilt_buckets_program)
