"""Ids out of range, and routes without a position, that only the kernels see: the host does not read GPU tensors.

The kernels treat them as dropped and count them; the next call that synchronises (ep.check(), ep.close(), or a property
that reads) raises them with value, rank and row. Only these routes are lost, and the object stays usable.
On the CPU target the dispatch itself raises; see test_bad_input.py, and the first test here.
"""

import time

import exact
import on_device
import pytest
import torch

import moe_a2a

pytestmark = on_device.TESTS

CONFIG = {
    "num_experts": 12, "num_topk": 4, "hidden": 136, "num_max_tokens_per_rank": 16,
    "dtype": torch.float32, "timeout": 2,
}  # fmt: skip
NUM_TOKENS, ROW, COLUMN = 11, 7, 2
# Truncated to int32, 2**32 + 3 would be expert 3, and 2**31 negative.
BAD_IDS = [
    (torch.int32, 12), (torch.int32, -2), (torch.int32, 2**31 - 1), (torch.int32, -(2**31)),
    (torch.int64, 12), (torch.int64, -2), (torch.int64, 2**31), (torch.int64, 2**32 + 3), (torch.int64, -(2**32)),
    (torch.int64, 2**63 - 1), (torch.int64, -(2**63)),
]  # fmt: skip
CULPRIT = 1


def good_tokens(ep, idx_dtype=torch.int64, seed=0):
    return exact.make_tokens(ep, NUM_TOKENS, torch.Generator(ep.device).manual_seed(7 * seed + ep.rank), idx_dtype)


def tokens_with(ep, bad):
    """(row, column) -> id: puts these ids into CULPRIT's topk_idx; the expected output counts them as dropped."""
    tokens = good_tokens(ep, torch.int32 if all(abs(value) < 2**31 for value in bad.values()) else torch.int64)
    return plant(ep, tokens, bad)


def plant(ep, tokens, bad):
    if ep.rank == CULPRIT % ep.num_ranks:
        for place in bad:
            tokens.topk_idx[place] = -1
        tokens.expected.copy_(exact.expected_of(tokens.x, tokens.topk_idx))
        for place, value in bad.items():
            tokens.topk_idx[place] = value
    return tokens


def is_culprit(ep):
    return ep.rank == CULPRIT % ep.num_ranks


def assert_names(raised, ep, value):
    text = str(raised.value)
    assert "topk_idx" in text
    for words in (f"[{ROW}", str(value), f"num_experts={ep.num_experts}", f"rank {ep.rank}"):
        assert words in text, f"{words!r} is not in {text!r}"


def assert_is_usable(ep):
    positions = exact.positions_of(ep)
    for seed in range(3):  # more often than there are buffers
        tokens = good_tokens(ep, seed=seed)
        assert torch.equal(exact.step(ep, tokens, positions), tokens.expected)
    ep.check()  # an error is raised only once


def run(program, num_ranks=None):
    def with_ep(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            program(ep)

    on_device.run(num_ranks or min(3, on_device.most_ranks()), with_ep, timeout=30)


@pytest.mark.parametrize(("idx_dtype", "value"), BAD_IDS)
def test_value_rank_and_row_are_named(idx_dtype, value):
    def program(ep):
        tokens = plant(ep, good_tokens(ep, idx_dtype), {(ROW, COLUMN): value})
        if not on_device.IS_GPU:
            with pytest.raises(ValueError if is_culprit(ep) else moe_a2a.PeerRefusedError) as raised:
                ep.dispatch(tokens.x, tokens.topk_idx)
            if is_culprit(ep):
                assert_names(raised, ep, value)
        else:
            combined = exact.step(ep, tokens, exact.positions_of(ep))
            if is_culprit(ep):
                with pytest.raises(ValueError) as raised:
                    ep.check()
                assert_names(raised, ep, value)
            else:
                ep.check()  # its table is valid
            assert torch.equal(combined, tokens.expected)
        assert_is_usable(ep)

    run(program)


@on_device.gpu_only
@pytest.mark.parametrize("halves", [False, True])
def test_all_bad_ids_are_counted(halves):
    bad = {(row, column): 12 + row for row in range(NUM_TOKENS) for column in range(row % 3)}

    def program(ep):
        tokens = tokens_with(ep, bad)
        if halves:
            handle = ep.dispatch_send(tokens.x, tokens.topk_idx)
            ep.dispatch_recv(handle)
        else:
            handle = ep.dispatch(tokens.x, tokens.topk_idx)
        torch.cuda.synchronize()  # not through ep, so the host has seen nothing
        if is_culprit(ep):
            with pytest.raises(ValueError, match=rf"\b{len(bad)}\b ids"):
                ep.check()
        y = exact.run_experts(ep, handle, exact.positions_of(ep))
        combined = ep.combine(y, handle)  # the handle is valid
        assert torch.equal(combined, tokens.expected)
        assert_is_usable(ep)

    run(program)


READS = {
    "check": lambda ep, handle: ep.check(),
    "close": lambda ep, handle: ep.close(),
    "num_routes": lambda ep, handle: handle.num_routes,
    "recv_rows": lambda ep, handle: handle.recv_rows,
}


@on_device.gpu_only
@pytest.mark.parametrize("name", READS)
def test_what_touches_the_host_raises(name):
    read, value = READS[name], 2**32 + 3

    def program(ep):
        tokens = tokens_with(ep, {(ROW, COLUMN): value})
        handle = ep.dispatch(tokens.x, tokens.topk_idx)
        if is_culprit(ep):
            with pytest.raises(ValueError) as raised:
                read(ep, handle)
            assert_names(raised, ep, value)
        else:
            read(ep, handle)
        assert ep.is_closed == (name == "close")
        if not ep.is_closed:
            combined = ep.combine(exact.run_experts(ep, handle, exact.positions_of(ep)), handle)
            assert torch.equal(combined, tokens.expected)
            assert_is_usable(ep)

    run(program)


@on_device.gpu_only
def test_the_end_of_a_with_block_raises_and_hides_no_other_error():
    def program(group):
        def use(error=None):
            with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
                tokens = tokens_with(ep, {(ROW, COLUMN): 12})
                exact.step(ep, tokens, exact.positions_of(ep))
                if error is not None:
                    raise error

        if group.rank == CULPRIT % group.num_ranks:
            with pytest.raises(ValueError, match=f"num_experts=12.*rank {group.rank}"):
                use()
        else:
            use()
        with pytest.raises(ArithmeticError):
            use(ArithmeticError("on purpose"))

    on_device.run(min(2, on_device.most_ranks()), program)


@on_device.gpu_only
def test_the_next_call_of_the_hot_path_neither_raises_nor_refuses():
    """combine and the next dispatch are good calls: a rank that sent bad ids must not cost its peers their results."""

    def program(ep):
        positions = exact.positions_of(ep)
        tokens = tokens_with(ep, {(ROW, COLUMN): 12})
        handle = ep.dispatch(tokens.x, tokens.topk_idx)
        torch.cuda.synchronize()  # the kernels have found it by now
        combined = ep.combine(exact.run_experts(ep, handle, positions), handle)
        torch.cuda.synchronize()
        good = good_tokens(ep, seed=1)
        assert torch.equal(exact.step(ep, good, positions), good.expected)
        assert torch.equal(combined, tokens.expected)
        if is_culprit(ep):
            with pytest.raises(ValueError) as raised:
                ep.check()
            assert_names(raised, ep, 12)
        assert_is_usable(ep)

    run(program)


@on_device.gpu_only
def test_no_call_of_the_hot_path_waits_for_the_device():
    def program(ep):
        tokens, positions = tokens_with(ep, {(ROW, COLUMN): 12}), exact.positions_of(ep)
        exact.step(ep, tokens, positions)  # loads PyTorch's kernels
        if is_culprit(ep):
            with pytest.raises(ValueError):
                ep.check()
        torch.cuda.synchronize()
        asleep = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)  # about a second
        asleep.record()
        start = time.monotonic()
        combined = exact.step(ep, tokens, positions)
        elapsed = time.monotonic() - start
        assert not asleep.query() and elapsed < 0.3, elapsed
        if is_culprit(ep):
            with pytest.raises(ValueError):
                ep.check()
        assert torch.equal(combined, tokens.expected)

    run(program)


@on_device.gpu_only
def test_a_tensor_that_changes_under_a_graph():
    def program(ep):
        tokens, positions = good_tokens(ep), exact.positions_of(ep)
        graph, combined = on_device.capture(lambda: exact.step(ep, tokens, positions))
        for value in (12, -7, 2**40):
            tokens.copy_(good_tokens(ep, seed=value % 5))
            plant(ep, tokens, {(ROW, COLUMN): value})
            graph.replay()
            if is_culprit(ep):
                with pytest.raises(ValueError) as raised:
                    ep.check()
                assert_names(raised, ep, value)
            assert torch.equal(combined, tokens.expected)
            tokens.copy_(good_tokens(ep, seed=9))
            graph.replay()
            ep.check()
            assert torch.equal(combined, tokens.expected)
        assert_is_usable(ep)

    run(program)


def test_routes_without_a_place_in_the_masked_layout():
    """Every token of every rank names expert 0 four times: num_topk times as many routes as positions."""

    def program(ep):
        x = good_tokens(ep).x.repeat(2, 1)[: ep.num_max_tokens_per_rank]
        topk_idx = torch.zeros(len(x), ep.num_topk, dtype=torch.int64, device=ep.device)
        num_lost = (ep.num_topk - 1) * ep.num_ranks * ep.num_max_tokens_per_rank

        def dispatch_and_check():
            handle = ep.dispatch(x, topk_idx, layout="masked")  # on the CPU this raises
            try:
                ep.check()
            finally:
                handle.release()

        if ep.rank == 0:
            with pytest.raises(ValueError, match=rf"{num_lost} routes .*masked.*rank 0.*rows"):
                dispatch_and_check()
        else:
            dispatch_and_check()
        assert_is_usable(ep)

    run(program)


@on_device.gpu_only
def test_y_with_too_few_rows():
    def program(ep):
        tokens = good_tokens(ep)
        handle = ep.dispatch(tokens.x, tokens.topk_idx)
        y = exact.run_experts(ep, handle, exact.positions_of(ep))[: handle.num_routes - 2].clone()
        ep.combine(y, handle)
        with pytest.raises(ValueError, match=rf"2 routes.*rank {ep.rank}.*expert_offsets\[-1\]"):
            ep.check()
        assert_is_usable(ep)

    run(program)
