"""Thousands of consecutive calls with changing shapes and nothing that keeps ranks together.

Ranks run ahead of each other as far as the protocol allows. If a slot is reused too early, or
an earlier call's signal is taken for this one's, rows of another call appear, with other values.
"""

import dataclasses
import random
import time

import cases
import on_device
import pytest
import ranks
import torch
from case_calls import run_call

import moe_a2a

pytestmark = on_device.TESTS

NUM_CALLS = 2_000  # the soaks have more
NUM_DISTINCT_CALLS = 64
CASE = cases.Case(
    seed=0, num_ranks=0, num_experts=0, num_topk=3, hidden=40, num_max_tokens_per_rank=12,
    dtype=torch.bfloat16, num_blocks=1, num_buffers=2, num_max_ll_tokens=6, calls=(),
)  # fmt: skip


def make_pool(seed, num_ranks, num_blocks):
    """Prepared calls with expectations: making them takes longer than running them."""
    case = dataclasses.replace(CASE, num_ranks=num_ranks, num_experts=6 * num_ranks, num_blocks=num_blocks)
    rng = random.Random(seed)
    calls = [
        dataclasses.replace(call, again=False)
        for _ in range(NUM_DISTINCT_CALLS)
        for call in cases.make_case(
            rng.randrange(1 << 30),
            num_ranks,
            num_calls=1,
            num_max_tokens=CASE.num_max_tokens_per_rank,
        ).calls
    ]
    return case, [cases.make_data(case, call) for call in calls]


def run_sequence(group, case, pool, seed, num_calls):
    order = random.Random(seed)
    with moe_a2a.ExpertParallel(group, timeout=20, **case.arguments) as ep:
        delays = random.Random(f"{seed} {ep.rank}")
        for index in range(num_calls):
            if delays.random() < 0.01:
                time.sleep(delays.random() * 0.002)
            data = order.choice(pool)
            try:
                run_call(ep, data, poison=False)
            except Exception as error:
                raise AssertionError(f"call {index} on rank {ep.rank}: {data.call}") from error


def run_sequence_in_process(group, num_ranks, num_blocks, seed, num_calls):
    case, pool = make_pool(seed, num_ranks, num_blocks)
    run_sequence(group, case, pool, seed, num_calls)


@pytest.mark.parametrize(("num_ranks", "num_blocks"), [(4, 1), (3, 2)])
@on_device.cpu_only
def test_ranks_as_threads(num_ranks, num_blocks, session_seed):
    case, pool = make_pool(session_seed, num_ranks, num_blocks)
    ranks.run_threads(num_ranks, run_sequence, case, pool, session_seed, NUM_CALLS // 2, timeout=120)


def test_ranks_as_processes(session_seed):
    if on_device.RANKS_ARE_PROCESSES:
        num_ranks = min(3, on_device.most_ranks())
        on_device.run(num_ranks, run_sequence_in_process, num_ranks, 1, session_seed, NUM_CALLS, timeout=120)
    else:
        ranks.run_processes(3, run_sequence_in_process, 3, 1, session_seed, NUM_CALLS, timeout=120)
