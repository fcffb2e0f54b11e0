"""Back-to-back eager calls on several objects, each checked on the device; the host reads the count once per thousand calls.

Ranks agree only on the object and the number of blocks: each draws its own number of tokens and sleeps
at its own times. In 1,000 iterations a rank runs ahead of another as far as the protocol and the queue allow.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack

import exact
import torch

import moe_a2a

NUM_ITERATIONS = int(os.environ.get("MOE_A2A_SOAK_ITERATIONS", "0")) or 1_000  # in an ordinary session
CHECK_EVERY = 1_000
NUM_SAMPLES = 48  # prepared inputs per object: making them would cost more than a call
LONGEST = 1  # index of the longest sample
SHARE_OF_DELAYS = 0.005
LONGEST_DELAY = 0.002  # seconds
CYCLES_PER_SECOND = 1.5e9  # of a GPU's sleep, approximately

SHAPES = [
    {"num_topk": 8, "hidden": 256, "num_max_tokens_per_rank": 24, "dtype": torch.bfloat16, "num_buffers": 2,
     "num_max_ll_tokens": 12},
    {"num_topk": 3, "hidden": 1024, "num_max_tokens_per_rank": 9, "dtype": torch.bfloat16, "num_buffers": 1,
     "num_max_ll_tokens": 9},
    {"num_topk": 2, "hidden": 515, "num_max_tokens_per_rank": 40, "dtype": torch.float32, "num_buffers": 3,
     "num_max_ll_tokens": 0},
]  # fmt: skip


class Workload:
    """One ExpertParallel with inputs of many lengths, including zero and the maximum."""

    def __init__(self, ep: moe_a2a.ExpertParallel, rng: random.Random):
        self.ep = ep
        self.positions = exact.positions_of(ep)
        generator = torch.Generator(ep.device).manual_seed(rng.randrange(1 << 30))
        lengths = [rng.randint(0, ep.num_max_tokens_per_rank) for _ in range(NUM_SAMPLES)]
        lengths[0], lengths[LONGEST] = 0, ep.num_max_tokens_per_rank
        self.samples = [exact.make_tokens(ep, length, generator) for length in lengths]


def run(group, seed: int, num_iterations: int, plant_at: int = -1) -> int:
    """The total number of wrong values. In iteration `plant_at` rank 0 spoils one received row."""
    shared, own = random.Random(seed), random.Random(f"{seed} {group.rank}")
    with ExitStack() as stack:
        workloads = []
        for shape in SHAPES:
            ep = moe_a2a.ExpertParallel(group, **shape, num_experts=8 * group.num_ranks, timeout=20)
            workloads.append(Workload(stack.enter_context(ep), own))
        device = workloads[0].ep.device
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for index in range(num_iterations):
            workload, num_blocks = shared.choice(workloads), shared.choice((0, 0, 1, 7))
            tokens = own.choice(workload.samples) if index != plant_at else workload.samples[LONGEST]
            if own.random() < SHARE_OF_DELAYS:
                sleep(device, own.random() * LONGEST_DELAY)
            handle = workload.ep.dispatch(tokens.x, tokens.topk_idx, num_blocks=num_blocks)
            y = exact.run_experts(workload.ep, handle, workload.positions)
            if index == plant_at and group.rank == 0:
                y[0] += 1
            combined = workload.ep.combine(y, handle, num_blocks=num_blocks)
            exact.count_wrong(wrong, combined, tokens)
            if (index + 1) % CHECK_EVERY == 0 or index + 1 == num_iterations:
                check_so_far(workloads, wrong, f"seed {seed}, rank {group.rank}, by iteration {index}", plant_at)
        return wrong.item()


def check_so_far(workloads: list[Workload], wrong: torch.Tensor, where: str, plant_at: int) -> None:
    for workload in workloads:
        workload.ep.check()
    if plant_at < 0 and wrong.item() > 0:
        raise AssertionError(f"{where}: {wrong.item()} wrong values")


def sleep(device: torch.device, seconds: float) -> None:
    """On a GPU the stream sleeps, and with it the kernels that peers wait for; the host continues."""
    if device.type == "cpu":
        time.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
