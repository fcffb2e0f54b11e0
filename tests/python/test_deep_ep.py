"""moe_a2a.integrations.deep_ep, against what one process with the tokens of all ranks computes.

The contracts are DeepEP's: packed rows by source rank and token, local ids in the columns of the choices, weights that arrive
with the combine.
"""

import on_device
import pytest
import ranks
import torch
from deep_ep_cases import EXPERTS_PER_RANK, HIDDEN, SEED, TOPK, batches, combined, experts, factor, on, received

import moe_a2a
from moe_a2a.devices import default_device
from moe_a2a.integrations import deep_ep

pytestmark = on_device.TESTS


def buffer_of(group, **options):
    return deep_ep.Buffer(group, 1 << 20, timeout=ranks.slack(10), **options)


def dispatched(buffer, x, ids, weights, **options):
    num_experts = buffer.group_size * EXPERTS_PER_RANK
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
        ids, num_experts, async_finish=True
    )
    return buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
        previous_event=event,
        async_finish=True,
        **options,
    )


# ---- packed rows


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_come_packed_and_sums_return(num_ranks):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        for call, most in enumerate((40, 30, 40, 300, 5)):  # 300: more than the first ExpertParallel takes
            everything = batches(num_ranks, call, most)
            x, ids, weights = on(device, *everything[buffer.rank])
            recv_x, recv_ids, recv_weights, counts, handle, event = dispatched(
                buffer, x, ids, weights, expert_alignment=8
            )
            event.current_stream_wait()
            want_x, want_ids, want_weights = received(everything, buffer.rank)
            assert torch.equal(recv_x.cpu(), want_x) and torch.equal(recv_ids.cpu(), want_ids)
            assert torch.equal(recv_weights.cpu(), want_weights) and recv_ids.dtype == torch.int64
            assert counts == [-(-int((want_ids == e).sum()) // 8) * 8 for e in range(EXPERTS_PER_RANK)]
            y = experts(buffer.rank, recv_x, recv_ids, recv_weights)
            out, out_weights, _ = buffer.combine(y, handle, topk_weights=2 * recv_weights)
            assert torch.equal(out, combined(x, ids, weights))
            assert torch.equal(out_weights, (2 * weights).masked_fill(ids < 0, 0))
        buffer.destroy()
        buffer.destroy()

    on_device.run(num_ranks, program)


def test_the_layout_counts_tokens():
    def program(group):
        buffer, device = buffer_of(group), default_device()
        ids = torch.tensor([[0, 1, 5], [-1, -1, -1], [7, 4, -1]], device=device)
        per_rank, none, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 8)
        assert per_rank.tolist() == [1, 2] and none is None and per_rank.dtype == torch.int32
        assert per_expert.tolist() == [1, 1, 0, 0, 1, 1, 0, 1] and per_expert.dtype == torch.int32
        assert in_rank.tolist() == [[True, True], [False, False], [False, True]]
        buffer.destroy()

    on_device.run(2, program)


def test_a_bound_spares_the_host():
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        everything = batches(2, 0)
        x, ids, weights = on(device, *everything[buffer.rank])
        got = dispatched(buffer, x, ids, weights, num_worst_tokens=2 * 40)
        recv_x, recv_ids, recv_weights, counts, handle, _ = got
        want_x, want_ids, want_weights = received(everything, buffer.rank)
        n = len(want_x)
        assert counts == [] and len(recv_x) == len(recv_ids) == 80
        assert torch.equal(recv_x[:n].cpu(), want_x) and torch.equal(recv_ids[:n].cpu(), want_ids)
        assert (recv_ids[n:] == -1).all() and (recv_weights[n:] == 0).all()
        y = experts(buffer.rank, recv_x, recv_ids, recv_weights)
        y[n:] = torch.nan  # what experts leave there is nobody's
        assert torch.equal(buffer.combine(y, handle)[0], combined(x, ids, weights))
        with pytest.raises(ValueError, match=r"num_worst_tokens=\d+ allows 1 on each of 2 ranks|failed"):
            dispatched(buffer, torch.ones(2, HIDDEN, device=device), ids[:1].repeat(2, 1), None, num_worst_tokens=2)
        buffer.destroy()

    on_device.run(2, program)


@on_device.cpu_only
def test_a_bound_that_the_ranks_do_not_divide_drops_no_row():
    """Before, two ranks with 3 tokens each passed as num_worst_tokens=5, and the last row was missing from the sums."""
    everything = [(torch.full((3, HIDDEN), 1.0 + rank), torch.zeros(3, 1, dtype=torch.int64)) for rank in range(2)]

    def program(group):
        buffer = buffer_of(group)
        x, ids = everything[buffer.rank]
        with pytest.raises((ValueError, moe_a2a.PeerRefusedError), match="num_worst_tokens=5 allows 2 on each of 2"):
            dispatched(buffer, x, ids, None, num_worst_tokens=5)
        group.all_gather(None)
        recv_x, _, _, _, handle, _ = dispatched(buffer, x[:2], ids[:2], None, num_worst_tokens=5)
        assert len(recv_x) == 5 and torch.equal(buffer.combine(recv_x, handle)[0], x[:2])
        buffer.destroy()

    on_device.run(2, program)


def test_a_handle_serves_again_and_out_of_order():
    """More dispatches than buffers wait for their combine, and the combine of a handle follows a dispatch along it."""
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        calls = []
        for call in range(4):
            x, ids, weights = on(device, *batches(2, call)[buffer.rank])
            calls.append((x, ids, weights, dispatched(buffer, x, ids, weights)))
        for x, ids, weights, (recv_x, recv_ids, recv_weights, _, handle, _) in calls:
            y = experts(buffer.rank, recv_x, recv_ids, recv_weights)
            assert torch.equal(buffer.combine(y, handle)[0], combined(x, ids, weights))
            for scale in (2, 3):
                again, *nothing, event = buffer.dispatch(scale * x, handle=handle)
                assert torch.equal(again, scale * recv_x) and nothing == [None] * 4
                event.current_stream_wait()
            out, out_weights, _ = buffer.combine(scale * y, handle, topk_weights=recv_weights)
            assert torch.equal(out, scale * combined(x, ids, weights))
            assert torch.equal(out_weights, weights.masked_fill(ids < 0, 0))
        buffer.destroy()

    on_device.run(2, program)


def test_a_handle_outlives_its_topk_idx():
    """Before, a handle sent along what its caller's topk_idx held by then, and rows and sums were of other tokens."""
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank])
        changed = ids.clone()
        recv_x, recv_ids, recv_weights, _, handle, _ = dispatched(buffer, x, changed, weights)
        changed.copy_(ids.flip(0))
        assert torch.equal(buffer.dispatch(x, handle=handle)[0], recv_x)
        y = experts(buffer.rank, recv_x, recv_ids, recv_weights)
        for _ in range(2):  # the second one sends the routing again
            assert torch.equal(buffer.combine(y, handle)[0], combined(x, ids, weights))
        buffer.destroy()

    on_device.run(2, program)


def test_float8_rows_bring_their_scales():
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        everything = batches(2, 0)
        x, ids, weights = everything[buffer.rank]
        sent = [[x.to(moe_a2a.devices.float8_dtype(device)), x[:, ::128].contiguous()] for x, *_ in everything]
        values, scales = on(device, *sent[buffer.rank])
        (recv_x, recv_scales), recv_ids, *_, handle, _ = dispatched(buffer, (values, scales), *on(device, ids, weights))
        want_x, want_ids, _ = received(everything, buffer.rank)
        assert torch.equal(recv_x.float().cpu(), want_x) and torch.equal(recv_scales.cpu(), want_x[:, ::128])
        assert recv_x.dtype == values.dtype and torch.equal(recv_ids.cpu(), want_ids)
        out, *_ = buffer.combine(torch.ones(len(recv_x), HIDDEN, dtype=torch.bfloat16, device=device), handle)
        num_dst_ranks = torch.stack([(ids // EXPERTS_PER_RANK == rank).any(1) for rank in range(2)]).sum(0)
        assert torch.equal(out.float().cpu(), num_dst_ranks[:, None].float().expand(-1, HIDDEN))
        buffer.destroy()

    on_device.run(2, program)


class Dispatch(torch.autograd.Function):
    """As training frameworks wrap the two calls: the backward of each is the other, along the same handle."""

    @staticmethod
    def forward(ctx, buffer, x, ids, weights):
        recv_x, recv_ids, recv_weights, _, ctx.handle, _ = dispatched(buffer, x, ids, weights)
        ctx.buffer = buffer
        ctx.mark_non_differentiable(recv_ids)
        ctx.set_materialize_grads(True)
        return recv_x, recv_ids, recv_weights, ctx.handle

    @staticmethod
    def backward(ctx, grad_x, _, grad_weights, __):
        grad_x, grad_weights, _ = ctx.buffer.combine(grad_x.contiguous(), ctx.handle, topk_weights=grad_weights.float())
        return None, grad_x, None, grad_weights


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, y, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_through_two_layers(num_ranks):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, weights = on(device, *batches(num_ranks, 1)[buffer.rank])
        leaves = [[t.clone().requires_grad_() for t in (x / 8, weights / 4)] for _ in range(2)]
        rows, scores = leaves[0]
        for _ in range(2):
            recv_x, recv_ids, recv_weights, handle = Dispatch.apply(buffer, rows, ids, scores)
            rows = Combine.apply(buffer, experts(buffer.rank, recv_x, recv_ids, recv_weights), handle)
        rows.square().sum().backward()
        wanted, wanted_scores = leaves[1]
        out = wanted
        for _ in range(2):
            out = combined(out, ids, wanted_scores)
        out.square().sum().backward()
        torch.testing.assert_close(leaves[0][0].grad, wanted.grad)
        torch.testing.assert_close(leaves[0][1].grad, wanted_scores.grad)
        buffer.destroy()

    on_device.run(num_ranks, program)


# ---- rows by expert


@pytest.mark.parametrize("weights_at", ["dispatch", "combine"])
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_low_latency_pairs(num_ranks, hooks, weights_at):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group, low_latency_mode=True), default_device()
        num_experts, first = num_ranks * EXPERTS_PER_RANK, buffer.rank * EXPERTS_PER_RANK
        stats, total = torch.zeros(EXPERTS_PER_RANK, dtype=torch.int32, device=device), 0
        for call in range(5):
            everything = batches(num_ranks, call)
            x, ids, weights = on(device, *everything[buffer.rank])
            given = {"topk_weights": weights} if weights_at == "dispatch" else {}
            recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, 64, num_experts, stats, use_fp8=False, return_recv_hook=hooks, **given
            )
            event.current_stream_wait()
            hook() if hooks else None
            assert (hook is not None) == hooks and recv_x.shape == (EXPERTS_PER_RANK, num_ranks * 64, HIDDEN)
            y = torch.full_like(recv_x, torch.nan)
            for expert, count in enumerate(counts.tolist()):
                want = torch.cat([x[(ids == first + expert).any(1)] for x, ids, _ in everything])
                assert torch.equal(recv_x[expert, :count].cpu(), want)
                y[expert, :count] = recv_x[expert, :count] * factor(first + expert)
            total = total + counts
            out = torch.full_like(x, torch.nan) if call % 2 else None
            got, _, hook = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=hooks, out=out)
            hook() if hooks else None
            assert torch.equal(got, combined(x, ids, weights))
            assert out is None or out.data_ptr() == got.data_ptr()
        assert torch.equal(stats, total)
        buffer.destroy()

    on_device.run(num_ranks, program)


@pytest.mark.parametrize("hooks", [False, True])
def test_low_latency_float8(hooks):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        everything = batches(2, 0, dtype=torch.bfloat16)
        x, ids, weights = on(device, *everything[buffer.rank])
        (values, scales), counts, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, 64, 2 * EXPERTS_PER_RANK, return_recv_hook=hooks
        )
        hook() if hooks else None
        assert scales.shape == (*values.shape[:2], HIDDEN // 128) and scales.stride(1) == 1
        y = buffer.get_next_low_latency_combine_buffer(handle)
        y.copy_(values.float() * scales.repeat_interleave(128, 2))
        got, *_ = buffer.low_latency_combine(y, ids, weights, handle, zero_copy=True)
        want = x.float() * weights.masked_fill(ids < 0, 0).sum(1, keepdim=True)
        torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.5)
        assert int(counts.sum()) == sum(
            int((ids // EXPERTS_PER_RANK == buffer.rank).masked_fill(ids < 0, False).sum()) for _, ids, _ in everything
        )
        buffer.destroy()

    on_device.run(2, program)


# ---- what is refused


def test_what_it_cannot_do_is_named():
    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids = torch.ones(2, HIDDEN, device=device), torch.zeros(2, TOPK, dtype=torch.int64, device=device)
        for refused in ({"round_scale": True}, {"use_ue8m0": True}, {"dispatch_wait_recv_cost_stats": ids}):
            with pytest.raises(ValueError, match=f"low_latency_dispatch of moe_a2a has no {next(iter(refused))} "):
                buffer.low_latency_dispatch(x, ids, 8, 4, **refused)
        with pytest.raises(ValueError, match="got neither a handle nor a routing; pass topk_idx"):
            buffer.dispatch(x)
        *_, handle, _ = dispatched(buffer, x, ids, None)
        with pytest.raises(ValueError, match="combine of moe_a2a has no bias"):
            buffer.combine(x, handle, bias=x)
        with pytest.raises(ValueError, match=r"x has shape \[1, 256\] on rank 0; pass \[2, 256\]"):
            buffer.combine(x[:1], handle)
        assert torch.equal(buffer.combine(x, handle)[0], x)
        mask = torch.full((1,), 7, dtype=torch.int32, device=device)
        buffer.low_latency_query_mask_buffer(mask)
        assert mask.tolist() == [0]
        buffer.destroy()
        with pytest.raises(RuntimeError, match="the Buffer of rank 0 has been destroyed"):
            buffer.dispatch(x, topk_idx=ids)

    on_device.run(1, program)


def test_a_call_that_fails_on_one_rank_is_told_to_the_others():
    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank])
        fails = buffer.rank == 0
        wrong = weights[:, :2] if fails else weights
        refused = on_device.refusals(group, fails)

        for num_worst_tokens in (0, 80):
            with refused(ValueError, "topk_weights has shape"):
                dispatched(buffer, x, ids, wrong, num_worst_tokens=num_worst_tokens)
        recv_x, recv_ids, recv_weights, _, handle, _ = dispatched(buffer, x, ids, weights)
        y = experts(buffer.rank, recv_x, recv_ids, recv_weights)
        for bad in (y[:-1], y.double()):
            with refused((ValueError, TypeError), "x has shape|has dtype"):
                buffer.combine(bad if fails else y, handle)
                handle.ep.check()
        buffer.dispatch(x, handle=handle)
        with refused(TypeError, "handle is a tuple"):
            buffer.combine(y, ("not", "a", "handle") if fails else handle)
            handle.ep.check()
        assert torch.equal(buffer.combine(y, handle)[0], combined(x, ids, weights))
        with refused(TypeError, "handle is a list"):
            buffer.dispatch(x, handle=[] if fails else handle)
            handle.ep.check()
        other = buffer_of(group)
        *_, foreign, _ = dispatched(other, x, ids, weights)
        with refused(ValueError, "handle is one of another Buffer on rank 0"):
            buffer.dispatch(x, handle=foreign if fails else handle)
            handle.ep.check()
        other.destroy()
        buffer.dispatch(x, handle=handle)
        assert torch.equal(buffer.combine(y, handle)[0], combined(x, ids, weights))
        with refused(ValueError, r"x has shape \[256\] on rank 0; pass a row per token"):
            dispatched(buffer, x[0] if fails and len(x) else x, ids, weights)
        recv_x, _, low_latency, *_ = buffer.low_latency_dispatch(x, ids, 40, 2 * EXPERTS_PER_RANK, use_fp8=False)
        with refused(ValueError, r"topk_idx has shape \[0\] on rank 0; pass a row per token"):
            buffer.low_latency_dispatch(x, ids.flatten()[:0] if fails else ids, 40, 2 * EXPERTS_PER_RANK, use_fp8=False)
            low_latency.ep.check()
        if device.type == "cpu":  # on a GPU rank 1 would wait for its deadline
            with refused(ValueError, "topk_weights has shape"):
                buffer.low_latency_combine(recv_x, ids, wrong, low_latency)
        got, *_ = buffer.low_latency_combine(recv_x, ids, weights, low_latency)
        assert torch.equal(got, x * weights.masked_fill(ids < 0, 0).sum(1, keepdim=True))
        buffer.destroy()

    on_device.run(2, program)
