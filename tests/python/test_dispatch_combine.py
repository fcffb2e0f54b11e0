"""dispatch is equal to the reference bit for bit, and so is combine, over random configurations."""

import cases
import pytest
import ranks

import moe_a2a

NUM_THREAD_CHUNKS, NUM_THREAD_CASES = 20, 50  # 1,000 configurations with ranks as threads
NUM_PROCESS_CASES = 40  # and 160 with ranks as processes
TIMEOUT = 20.0


def dispatch(ep, data, handle=None):
    """Through the halves or the whole, checked; with `handle`, its routing instead of data's."""
    call, rank = data.call, ep.rank
    x, topk_idx, topk_weights = data.x[rank], data.topk_idx[rank], None
    if data.topk_weights is not None:
        topk_weights = data.topk_weights[rank]
    routing = (topk_idx, topk_weights) if handle is None else ()
    options = {"handle": handle, "quantize": data.quantize, "num_blocks": data.case.num_blocks}
    if data.x_scales is not None:
        options["x_scales"] = data.x_scales[rank]
    if call.halves:
        handle = ep.dispatch_send(x, *routing, **options)
        ep.dispatch_recv(handle, **data.layout, num_blocks=data.case.num_blocks)
    else:
        handle = ep.dispatch(x, *routing, **options, **data.layout)
    cases.check_dispatch(handle, data, rank)
    return handle


def combine(ep, data, handle):
    call, y = data.call, data.y[ep.rank]
    options = {"presummed": call.presummed, "num_blocks": data.case.num_blocks}
    if call.halves:
        ep.combine_send(y, handle, **options)
        combined = ep.combine_recv(handle, num_blocks=data.case.num_blocks)
    else:
        combined = ep.combine(y, handle, **options)
    cases.assert_same("combined_x", combined, data.combined[ep.rank], any_nan=True)


def run_call(ep, data, poison=True):
    """One call of the case on this rank, checked."""
    handle = dispatch(ep, data)
    if poison:
        cases.poison_past_the_end(handle, data.handles[ep.rank])
    if data.call.release:
        handle.release()
    else:
        combine(ep, data, handle)
    if data.call.again:
        other = cases.make_data(data.case, data.call, rows_seed=data.call.seed + 1)
        combine(ep, other, dispatch(ep, other, handle))


def run_cases(group, seeds, num_ranks):
    for seed in seeds:
        case = cases.make_case(seed, num_ranks)
        try:
            with moe_a2a.ExpertParallel(group, timeout=TIMEOUT, **case.arguments) as ep:
                for call in case.calls:
                    run_call(ep, cases.make_data(case, call))
        except BaseException as error:
            raise AssertionError(f"seed {seed}, num_ranks {num_ranks}: {case}") from error


def run_thread_cases(seeds):
    for seed in seeds:
        case = cases.make_case(seed)
        data = [cases.make_data(case, call) for call in case.calls]

        def program(group, case=case, data=data):
            with moe_a2a.ExpertParallel(group, timeout=TIMEOUT, **case.arguments) as ep:
                for call in data:
                    run_call(ep, call)

        try:
            ranks.run_threads(case.num_ranks, program)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {case}") from error


@pytest.mark.parametrize("chunk", range(NUM_THREAD_CHUNKS))
def test_random_cases_with_ranks_as_threads(chunk, session_seed):
    first = session_seed + chunk * NUM_THREAD_CASES
    run_thread_cases(range(first, first + NUM_THREAD_CASES))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_random_cases_with_ranks_as_processes(num_ranks, session_seed):
    first = session_seed + 1_000_000 * num_ranks
    seeds = range(first, first + NUM_PROCESS_CASES)
    ranks.run_processes(num_ranks, run_cases, seeds, num_ranks, timeout=120)
