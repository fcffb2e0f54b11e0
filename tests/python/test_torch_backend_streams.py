"""init_process_group("moe_a2a") with GPU tensors: how calls and wait() are ordered with streams, and captured graphs."""

import on_device
import pytest
import torch
import torch.distributed as dist
from backend_groups import full, new_group, run_processes

pytestmark = [on_device.TESTS, on_device.gpu_only]

BUSY_CYCLES = 50_000_000  # about 25 ms on an H200
NUM_REPLAYS = 100


def order_program(gloo) -> None:
    """A call sees what its caller's stream has written before; work of the waiting stream sees what the call has written.
    The host waits for neither."""
    ours = new_group()
    num_ranks, count = ours.size(), 100_000
    for is_warm in (False, True):  # the first round also loads kernels, which takes time
        for async_op in (False, True):
            for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
                with torch.cuda.stream(stream):
                    x = full(count, -1)
                    torch.cuda._sleep(BUSY_CYCLES)
                    x.fill_(1 + ours.rank())
                    work = dist.all_reduce(x, group=ours, async_op=async_op)
                    was_completed = async_op and work.is_completed()
                    assert not async_op or work.wait()
                    y = x + 1
                    was_idle = stream.query()
                stream.synchronize()
                expected = num_ranks * (num_ranks + 1) / 2
                assert (x == expected).all() and (y == expected + 1).all(), (async_op, stream)
                if is_warm:
                    assert not was_idle and not was_completed, (async_op, was_idle, was_completed)
                assert work is None or (work.is_completed() and work.is_success())


def overlap_program(gloo) -> None:
    """The caller's stream continues while an asynchronous call is running, until it waits."""
    ours = new_group()
    x = full(1000, 1)
    for is_late in (
        False,
        True,
    ):  # the first round loads kernels: CUDA may load none while one waits for a peer
        if is_late and ours.rank() == 1:
            dist.recv(torch.zeros(1), 0)  # rank 0 has observed the end of its own work
        before = x.clone()
        torch.cuda.synchronize()
        work = dist.all_reduce(x, group=ours, async_op=True)
        if ours.rank() == 0:
            y = before + 1
            torch.cuda.current_stream().synchronize()
            value = y[0].item()
            was_completed = work.is_completed()
            if is_late:
                assert value == 3 and not was_completed, (value, was_completed)
                dist.send(torch.zeros(1), 1)
        future = work.get_future().wait()
        total = future[0].clone()
        torch.cuda.synchronize()
        assert (total == 2 * before).all() and (x == total).all() and work.is_completed()


def freed_program(gloo) -> None:
    """Memory of a tensor that its caller has dropped is not reused before the call has read it."""
    ours = new_group()
    dist.all_reduce(full(1, 0), group=ours)
    results = []
    for round_idx in range(50):
        out = full(1 << 16, -1)
        x = full(ours.size() << 16, round_idx)
        results.append((dist.reduce_scatter_tensor(out, x, group=ours, async_op=True), out, ours.size() * round_idx))
        del x
        full(ours.size() << 16, 1e9)  # the allocator would give the memory to this tensor
    for work, out, expected in results:
        work.wait()
        assert (out == expected).all(), expected


def graph_program(gloo, seed: int) -> None:
    """Without async_op, every collective can be captured; each replay is a fresh call."""
    ours = new_group()
    num_ranks, count = ours.size(), 5000
    base, wrong = full(count, 0), torch.zeros((), dtype=torch.int64, device="cuda")
    scales = torch.arange(1.0, num_ranks + 1, device="cuda")[:, None]

    def step() -> None:
        x = base * (1 + ours.rank())
        dist.all_reduce(x, group=ours)
        wrong.add_((x != base * scales.sum()).sum())
        gathered = x.new_empty(num_ranks * count)
        dist.all_gather_into_tensor(gathered, base * (1 + ours.rank()), group=ours)
        wrong.add_((gathered.view(num_ranks, -1) != base * scales).sum())
        mine = x.new_empty(count)
        dist.reduce_scatter_tensor(mine, gathered, group=ours)
        wrong.add_((mine != num_ranks * base * (1 + ours.rank())).sum())

    graph, _ = on_device.capture(step)
    generator = torch.Generator("cuda").manual_seed(seed)  # the same on all ranks
    for _ in range(NUM_REPLAYS):
        base.copy_(torch.randint(-9, 10, (count,), generator=generator, device="cuda"))
        graph.replay()
    torch.cuda.synchronize()
    assert wrong.item() == 0, f"rank {ours.rank()}, seed {seed}: {wrong.item()} wrong values"


PROGRAMS = {"order": order_program, "overlap": overlap_program, "freed": freed_program}


@pytest.mark.parametrize("name", PROGRAMS)
def test_streams(name):
    run_processes(2, PROGRAMS[name])


def test_captured_graphs(session_seed):
    run_processes(2, graph_program, session_seed % 10_000)
