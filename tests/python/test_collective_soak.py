"""Collectives interleaved with dispatches and combines for as long as you like, and captured ones replayed with new data:

MOE_A2A_SOAK_ITERATIONS=50000 pytest tests/python/test_collective_soak.py -k interleaved -s
MOE_A2A_TEST_DEVICE=cuda pytest tests/python/test_collective_soak.py
"""

import collective_soak
import on_device
import pytest
import soak
import torch

import moe_a2a

pytestmark = on_device.TESTS

NUM_REPLAYS = 1_000


@pytest.mark.timeout(120 + soak.NUM_ITERATIONS // 50)
def test_interleaved_iterations(session_seed):
    num_ranks, iterations = min(4, on_device.most_ranks()), soak.NUM_ITERATIONS
    print(f"{iterations} calls on {num_ranks} ranks, seed {session_seed}", flush=True)
    wrong = on_device.run(num_ranks, collective_soak.run, session_seed, iterations, timeout=100 + iterations / 50)
    assert wrong == [0] * num_ranks


def test_one_wrong_value_is_found(session_seed):
    """Negative control of the test above: one wrong value on one rank, in the last call."""
    wrong = on_device.run(min(2, on_device.most_ranks()), collective_soak.run, session_seed, 21, 20)
    assert sum(wrong) > 0


def replay_program(group, seed: int) -> None:
    """One graph of all kinds and methods; each replay gets new data, the device checks the results."""
    count, num_ranks = 5_000, group.num_ranks
    with moe_a2a.Collectives(group, collective_soak.MAX_NBYTES, symmetric_nbytes=2 * count, timeout=20) as coll:
        direct = coll.empty(count, dtype=torch.bfloat16)
        generator = torch.Generator(coll.device).manual_seed(seed)  # the same on all ranks
        base = torch.zeros(count, device=coll.device)
        wrong = torch.zeros((), dtype=torch.int64, device=coll.device)
        gathered_scale = torch.arange(1.0, num_ranks + 1, device=coll.device)[:, None]

        def step() -> None:
            x = (base * (1 + coll.rank)).to(torch.bfloat16)
            total = collective_soak.merged(base, "sum", num_ranks)
            for algorithm, codec in collective_soak.METHODS:
                out = direct.copy_(x) if algorithm == "direct" else None
                sums = coll.all_reduce(x if out is None else out, "sum", algorithm, codec, out=out)
                off = (sums.float() - total).abs()
                wrong.add_((~(off <= (collective_soak.FP8_IS_OFF if codec == "fp8" else 0) * total.abs())).sum())
            wrong.add_((coll.all_gather(x).view(num_ranks, -1).float() != base * gathered_scale).sum())
            counts = [count - num_ranks + 1] + [1] * (num_ranks - 1)
            begin = sum(counts[: coll.rank])
            mine = coll.reduce_scatter(x, "sum", counts)
            wrong.add_((mine.float() != total[begin : begin + len(mine)]).sum())

        graph, _ = on_device.capture(step)
        for _ in range(NUM_REPLAYS):
            blocks = torch.randint(-6, 7, (-(-count // 32),), generator=generator, device=coll.device)
            base.copy_(blocks.repeat_interleave(32)[:count])
            graph.replay()
        coll.check()
        assert wrong.item() == 0, f"rank {coll.rank}, seed {seed}: {wrong.item()} wrong values"


@on_device.gpu_only
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_replays_of_a_captured_graph_with_new_data(num_ranks, session_seed):
    on_device.run(num_ranks, replay_program, session_seed, timeout=120)
