"""The random cases test themselves: they cover what they promise, and their checks detect errors."""

import copy
import dataclasses

import cases
import pytest
import torch


@pytest.fixture
def data():
    """A call with rows of 33 columns among three ranks."""
    case = cases.make_case(5, num_ranks=3, num_calls=1, num_max_tokens=9)
    case = dataclasses.replace(case, hidden=33, num_experts=6, num_topk=2, dtype=torch.float32)
    call = dataclasses.replace(
        case.calls[0],
        num_tokens=(9, 7, 8),
        num_max_tokens_per_rank=9,
        routing="random",
        row_type="plain",
        layout="rows",
        strided=False,
        scale=1.0,
    )
    return cases.make_data(case, call)


def test_a_seed_gives_the_same_case_and_the_same_data():
    case = cases.make_case(17)
    assert case == cases.make_case(17) != cases.make_case(18)
    one, other = (cases.make_data(case, case.calls[0]) for _ in range(2))
    assert all(cases.same_bits(a, b) for a, b in zip(one.x + one.y, other.x + other.y, strict=True))


def test_a_thousand_seeds_cover_every_option():
    made = [cases.make_case(seed) for seed in range(1000)]
    calls = [call for case in made for call in case.calls]
    assert {case.num_ranks for case in made} == set(range(1, 9))
    bounds = {call.num_max_tokens_per_rank < case.num_max_tokens_per_rank for case in made for call in case.calls}
    assert bounds == {True, False}
    assert {case.num_topk for case in made} == {1, 2, 3, 4, 6, 8, 16}
    assert {case.dtype for case in made} == {torch.float32, torch.float16, torch.bfloat16}
    assert {case.num_blocks for case in made} == {0, 1, 2, 3, 4, 20}
    assert {case.num_buffers for case in made} == {1, 2, 3}
    lines = {(case.num_max_ll_tokens > 0) + (case.num_max_ll_tokens == case.num_max_tokens_per_rank) for case in made}
    assert lines == {0, 1, 2}  # none, some and all batches as LL words
    assert {case.hidden for case in made} >= set(cases.HIDDENS)
    assert {call.routing for call in calls} == set(cases.ROUTINGS)
    assert {call.layout for call in calls} == {"rows", "expert_major", "masked"}
    assert {call.row_type for call in calls} == {"plain", "fp8", "quantized"}
    assert {call.idx_dtype for call in calls} == {torch.int32, torch.int64}
    assert any(0 in call.num_tokens for call in calls) and any(sum(call.num_tokens) == 0 for call in calls)
    for option in ("with_weights", "presummed", "halves", "again", "release", "strided"):
        assert {getattr(call, option) for call in calls} == {True, False}, option
    # Most calls move rows.
    assert sum(sum(call.num_tokens) > 0 and call.routing != "dropped" for call in calls) > len(calls) / 2


def test_y_is_nan_wherever_it_must_not_be_read(data):
    for y, handle in zip(data.y, data.handles, strict=True):
        is_read = handle.landed if data.call.presummed else handle.expert_row_index >= 0
        assert torch.equal(y.isnan().all(dim=1), ~is_read)


def test_a_misplaced_row_names_its_origin(data):
    handle = copy.deepcopy(data.handles[1])
    first, second = handle.landed.nonzero().squeeze(1)[[0, -1]].tolist()
    handle.recv_x[first] = handle.recv_x[second]
    rank, token = divmod(second, data.case.num_max_tokens_per_rank)
    with pytest.raises(AssertionError, match=rf"row {first} should hold .* it holds .*\({rank}, {token}\)"):
        cases.check_dispatch(handle, data, 1)


def test_one_wrong_bit_is_seen(data):
    for name in ("expert_offsets", "expert_counts", *cases.ROUTE_LISTS):
        handle = copy.deepcopy(data.handles[1])
        getattr(handle, name).view(torch.uint8)[0] ^= 1
        with pytest.raises(AssertionError, match=name):
            cases.check_dispatch(handle, data, 1)
    handle = copy.deepcopy(data.handles[1])
    row = handle.landed.nonzero()[0].item()
    handle.recv_x.view(torch.uint8)[row, 130] ^= 1
    with pytest.raises(AssertionError, match=f"row {row} should hold .* 1 wrong columns"):
        cases.check_dispatch(handle, data, 1)
    cases.check_dispatch(data.handles[1], data, 1)


def test_nan_equals_nan_only_on_request():
    quiet, other = torch.tensor([0x7FC00000, -0x3FFFFF], dtype=torch.int32).view(torch.float32)[:, None]
    assert quiet.isnan() and other.isnan()
    cases.assert_same("sum", quiet, other, any_nan=True)
    with pytest.raises(AssertionError, match="sum: .* bytes differ"):
        cases.assert_same("sum", quiet, other)
    with pytest.raises(AssertionError, match="sum"):
        cases.assert_same("sum", torch.tensor([0.0]), torch.tensor([-0.0]), any_nan=True)
