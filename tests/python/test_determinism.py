"""Same inputs, same bits: twice on one object, for any number of blocks, and whichever batches are small."""

import dataclasses

import cases
import on_device
import torch

import moe_a2a

pytestmark = on_device.TESTS

NUM_MAX_LL_TOKENS = (0, 40, 50)  # no batch, some, all
NUM_BLOCKS = (1, 2, 5, 32, 64) if on_device.IS_GPU else (1, 2, 3, 4)
CASE = cases.make_case(11, num_ranks=4, num_calls=1, num_max_tokens=50)


def bits(values):
    return values.cpu().contiguous().view(torch.uint8).clone()


def results_of(group, num_blocks, num_max_ll_tokens, data):
    results = []
    arguments = {**data.case.arguments, "num_max_ll_tokens": num_max_ll_tokens}
    with moe_a2a.ExpertParallel(group, timeout=20, **arguments) as ep:
        landed, mine = data.handles[ep.rank].landed, data.on(ep.rank, ep.device)
        for _ in range(2):
            handle = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights, num_blocks=num_blocks)
            lists = [bits(getattr(handle, name)[: handle.num_routes]) for name in cases.ROUTE_LISTS]
            rows = bits(handle.recv_x.cpu()[landed])
            combined = bits(ep.combine(mine.y, handle, num_blocks=num_blocks))
            results.append([*lists, rows, combined])
    return results


def test_same_bits_twice_and_for_any_number_of_blocks():
    case = dataclasses.replace(CASE, hidden=300, num_topk=6, num_experts=16)
    call = dataclasses.replace(
        case.calls[0],
        num_tokens=(50, 0, 31, 50),
        num_max_tokens_per_rank=50,
        routing="random",
        row_type="plain",
        layout="rows",
        presummed=False,
        with_weights=True,
    )
    data = cases.make_data(case, call)
    ways = [(num_blocks, most) for num_blocks in NUM_BLOCKS for most in NUM_MAX_LL_TOKENS]
    per_way = [on_device.run(4, results_of, *way, data) for way in ways]
    for rank in range(4):
        runs = [run for result in per_way for run in result[rank]]
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))
