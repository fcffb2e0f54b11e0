"""batch_isend_irecv() over the backend, which pipeline schedules use: one batch of a delegate that can make one, as NCCL can. In one
test gloo stands in for NCCL, which starts the operations of a batch together."""

import on_device
import pytest
import torch
import torch.distributed as dist
from backend_groups import DEVICE, run_on_backend

pytestmark = on_device.TESTS


class Coalescing:
    """A delegate like NCCL: notes what it is called with, and starts the operations of a batch when that ends."""

    supports_coalescing = True

    def __init__(self, delegate):
        self.delegate, self.notes, self.batch = delegate, [], None

    def start(self, device):
        self.notes.append("start")
        self.batch = []

    def end(self, device):
        self.notes.append("end")
        works, self.batch = [getattr(self.delegate, name)(*arguments) for name, *arguments in self.batch], None
        return Together(works)

    def _called(self, name, *arguments):
        self.notes.append(name)
        if self.batch is None:
            return getattr(self.delegate, name)(*arguments)
        self.batch.append((name, *arguments))
        return None

    def send(self, *arguments):
        return self._called("send", *arguments)

    def recv(self, *arguments):
        return self._called("recv", *arguments)


class Together:
    """Each work of gloo can be waited for once, one of NCCL more often."""

    def __init__(self, works):
        self.works = works

    def wait(self, *timeout):
        works, self.works = self.works, []
        return all([work.wait(*timeout) for work in works])

    def is_completed(self):
        return all(work.is_completed() for work in self.works)


def fail(*arguments, **options):
    raise ValueError("fails in the middle of a batch")


def batches_program(report, seed: int) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    fake = Coalescing(group._get_backend(torch.device("cpu")))
    group._delegate = lambda *tensors: fake
    group._start_coalescing, group._end_coalescing = fake.start, fake.end
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, generator=generator)
    received = torch.full((5,), torch.nan)
    both = [dist.P2POp(dist.isend, x[rank], 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for _ in range(2):
        received.fill_(torch.nan)
        works = dist.batch_isend_irecv(both)
        assert len(works) == 2 and fake.notes == ["start", "send", "recv", "end"]
        for work in works:
            assert work.wait() and work.is_completed()
        assert torch.equal(received, x[1 - rank])
        fake.notes.clear()

    one = [dist.P2POp(dist.isend, x[0], 1) if rank == 0 else dist.P2POp(dist.irecv, received, 0)]
    for work in dist.batch_isend_irecv(one):
        work.wait()
    dist.recv(received, 1) if rank == 0 else dist.send(x[1], 0)
    assert fake.notes == (["send", "recv"] if rank == 0 else ["recv", "send"])
    fake.notes.clear()

    # A batch that fails halfway leaves nothing for the next.
    failing = dist.P2POp(dist.irecv, received, 1 - rank)
    failing.op = fail
    with pytest.raises(ValueError, match="fails in the middle of a batch"):
        dist.batch_isend_irecv([both[0], failing])
    assert fake.notes == []
    received.fill_(torch.nan)
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert torch.equal(received, x[1 - rank]) and fake.notes == ["start", "send", "recv", "end"]
    del group._delegate, group._start_coalescing, group._end_coalescing
    dist.destroy_process_group()


@pytest.mark.cpu
@pytest.mark.timeout(120)
def test_a_batch_is_started_with_its_last_operation(session_seed):
    run_on_backend(2, batches_program, session_seed)


def exchange_program(report, seed: int) -> None:
    """Both ranks send before they receive, as pipeline schedules do."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    for count in (3, 1 << 22):
        x = torch.randn(2, count, generator=generator).to(DEVICE)
        received = torch.full((count,), torch.nan, device=DEVICE)
        ops = [dist.P2POp(dist.isend, x[rank], 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(received, x[1 - rank])
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_both_ranks_send_first(session_seed):
    run_on_backend(2, exchange_program, session_seed)


def block_of(seed: int, stage: int) -> torch.nn.Module:
    torch.manual_seed(seed + stage)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).to(DEVICE)


def pipeline_program(report, seed: int) -> None:
    """Two steps of each schedule; the gradients are those of one process."""
    from torch.distributed import pipelining

    rank, num_ranks, num_batches, loss_of = dist.get_rank(), dist.get_world_size(), 4, torch.nn.functional.mse_loss
    torch.manual_seed(seed - 1)
    x, target = torch.randn(2, 8, 8).to(DEVICE)
    for schedule, num_own in (
        (pipelining.ScheduleGPipe, 1),
        (pipelining.Schedule1F1B, 1),
        (pipelining.ScheduleInterleaved1F1B, 2),
    ):
        num_stages = num_own * num_ranks
        whole = [block_of(seed, stage) for stage in range(num_stages)]
        for inputs, targets in zip(x.chunk(num_batches), target.chunk(num_batches), strict=True):
            loss_of(torch.nn.Sequential(*whole)(inputs), targets).backward()
        own = range(rank, num_stages, num_ranks)
        stages = [pipelining.PipelineStage(block_of(seed, s), s, num_stages, torch.device(DEVICE)) for s in own]
        run = schedule(stages if num_own > 1 else stages[0], num_batches, loss_fn=loss_of, scale_grads=False)
        for _ in range(2):
            for stage in stages:
                stage.submod.zero_grad()
            run.step(*([x] if rank == 0 else []), **({"target": target} if rank == num_ranks - 1 else {}))
            for stage, number in zip(stages, own, strict=True):
                for mine, expected in zip(stage.submod.parameters(), whole[number].parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, expected.grad, msg=f"{schedule.__name__}, stage {number}")
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_pipeline_schedules(session_seed):
    run_on_backend(2, pipeline_program, session_seed)
