"""dispatch and combine equal the reference bit for bit, over random configurations."""

import cases
import on_device
import pytest
import ranks
import torch
from case_calls import run_call

import moe_a2a

pytestmark = on_device.TESTS

NUM_CHUNKS = 15
NUM_CHUNK_CASES = 20  # 300 configurations with ranks as threads; make soak runs others for a given time
NUM_PROCESS_CASES = 12  # and 48 with ranks as processes
TIMEOUT = 20.0


def run_cases(group, seeds, num_ranks):
    for seed in seeds:
        case = cases.make_case(seed, num_ranks)
        try:
            with moe_a2a.ExpertParallel(group, timeout=TIMEOUT, **case.arguments) as ep:
                for call in case.calls:
                    run_call(ep, cases.make_data(case, call))
        except BaseException as error:
            raise AssertionError(f"seed {seed}, num_ranks {num_ranks}: {case}") from error


def run_random_cases(seeds):
    for seed in seeds:
        case = cases.make_case(seed, most_ranks=on_device.most_ranks())
        # Threads share the data; processes make it faster than they would receive it.
        shared = None if on_device.RANKS_ARE_PROCESSES else [cases.make_data(case, call) for call in case.calls]

        def program(group, case=case, shared=shared):
            with moe_a2a.ExpertParallel(group, timeout=TIMEOUT, **case.arguments) as ep:
                for call in shared or (cases.make_data(case, call) for call in case.calls):
                    run_call(ep, call)

        try:
            on_device.run(case.num_ranks, program)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {case}") from error


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_cases(chunk, session_seed):
    first = session_seed + chunk * NUM_CHUNK_CASES
    run_random_cases(range(first, first + NUM_CHUNK_CASES))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_random_cases_with_ranks_as_processes(num_ranks, session_seed):
    on_device.needs(num_ranks)
    first = session_seed + 1_000_000 * num_ranks
    seeds = range(first, first + NUM_PROCESS_CASES)
    run = on_device.run if on_device.RANKS_ARE_PROCESSES else ranks.run_processes
    run(num_ranks, run_cases, seeds, num_ranks, timeout=120)


def either_wire_program(group, num_tokens, seed):
    """The sums of the same calls, through LL words as far as possible and without."""
    sums = {}
    for num_max_ll_tokens in (0, 64):
        with moe_a2a.ExpertParallel(
            group,
            num_experts=6,
            num_topk=2,
            hidden=7168,
            num_max_tokens_per_rank=64,
            dtype=torch.float32,
            num_max_ll_tokens=num_max_ll_tokens,
            device=on_device.NAME,
            timeout=TIMEOUT,
        ) as ep:
            generator = torch.Generator().manual_seed(seed + ep.rank)
            for call in range(3):
                x = torch.randn(num_tokens, 7168, generator=generator).to(ep.device)
                weights, idx = torch.rand(num_tokens, 6, generator=generator).topk(2)
                handle = ep.dispatch(x, idx.to(ep.device), weights.to(ep.device))
                y = handle.recv_x[handle.expert_row_index[: handle.num_routes]] * (1 + ep.rank)
                sums[num_max_ll_tokens, call] = ep.combine(y, handle).cpu()
    for call in range(3):
        assert torch.equal(sums[0, call], sums[64, call]), f"call {call}"


# Rows are words up to 36 tokens (1 MiB), sums up to 54 (3 MiB from two ranks).
@pytest.mark.parametrize("num_tokens", [30, 50, 60], ids=["words", "rows", "rows and sums"])
def test_rows_and_sums_by_either_wire(num_tokens, session_seed):
    on_device.run(3, either_wire_program, num_tokens, session_seed)
