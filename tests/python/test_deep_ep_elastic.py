"""moe_a2a.integrations.deep_ep.ElasticBuffer, against what one process with the tokens of all ranks computes.

Packed rows by source rank and token, and rows by route, expert by expert. Values are small integers: sums of them are exact.
"""

import on_device
import pytest
import ranks
import torch
from deep_ep_cases import EXPERTS_PER_RANK, HIDDEN, TOPK, batches, by_route, combined, experts, on, received

import moe_a2a
from moe_a2a.devices import default_device
from moe_a2a.integrations import deep_ep

pytestmark = on_device.TESTS

MOST = 40


def buffer_of(group, **options):
    return deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MOST, num_gpu_timeout_secs=ranks.slack(10), **options)


def dispatched(buffer, x, ids, weights, **options):
    return buffer.dispatch(x, ids, weights, num_experts=buffer.num_ranks * EXPERTS_PER_RANK, **options)


def worst_rows(num_ranks, alignment):
    rows = num_ranks * MOST * min(TOPK, EXPERTS_PER_RANK) + (alignment - 1) * EXPERTS_PER_RANK
    return -(-rows // alignment) * alignment


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_packed_rows(num_ranks, sync):
    def program(group):
        buffer, device = buffer_of(group), default_device()
        for call in range(4):
            everything = batches(num_ranks, call)
            x, ids, weights = on(device, *everything[buffer.rank_idx])
            want = on(device, *received(everything, buffer.rank_idx))
            stats = torch.ones(EXPERTS_PER_RANK, dtype=torch.int32, device=device)
            recv_x, recv_ids, recv_weights, handle, event = dispatched(
                buffer,
                x,
                ids,
                weights,
                expert_alignment=8,
                do_cpu_sync=sync,
                async_with_compute_stream=True,
                cumulative_local_expert_recv_stats=stats,
            )
            event.current_stream_wait()
            n = len(want[0])
            assert len(recv_x) == (n if sync else num_ranks * MOST)
            for got, wanted in zip((recv_x, recv_ids, recv_weights), want, strict=True):
                assert torch.equal(got[:n], wanted)
            assert (recv_ids[n:] == -1).all()
            counts = [int((want[1] == e).sum()) for e in range(EXPERTS_PER_RANK)]
            aligned = [-(-count // 8) * 8 for count in counts]
            assert handle.num_recv_tokens_per_expert_list == (aligned if sync else [])
            assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
            assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(aligned).cumsum(0).tolist()
            assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist()[-1] == n
            assert stats.tolist() == [1 + count for count in counts]
            y = experts(buffer.rank_idx, recv_x, recv_ids, recv_weights)
            y[n:] = torch.nan  # rows that hold nothing
            others = recv_weights.masked_fill(recv_ids < 0, torch.nan)  # columns of other ranks' experts
            sums, back, _ = buffer.combine(y, handle, 2 * others)
            assert torch.equal(sums, combined(x, ids, weights))
            assert torch.equal(back, (2 * weights).masked_fill(ids < 0, 0))
            again, ids_again, nothing, same, _ = buffer.dispatch(2 * x, handle=handle, num_sms=handle.num_sms)
            assert same is handle and nothing is None
            assert torch.equal(again[:n], 2 * want[0]) and torch.equal(ids_again, recv_ids)
        buffer.destroy()

    on_device.run(num_ranks, program)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_rows_by_route(num_ranks, sync, alignment):
    def program(group):
        buffer, device = buffer_of(group), default_device()
        for call in range(4):
            everything = batches(num_ranks, call)
            x, ids, weights = on(device, *everything[buffer.rank_idx])
            *want, counts = by_route(everything, buffer.rank_idx, alignment)
            want = on(device, *want)
            options = {"expert_alignment": alignment, "do_cpu_sync": sync, "do_expand": True}
            rows, no_ids, row_weights, handle, _ = dispatched(buffer, x, ids, weights, **options)
            n = len(want[0])
            assert no_ids is None and len(rows) == len(row_weights) == (n if sync else worst_rows(num_ranks, alignment))
            assert torch.equal(rows[:n], want[0]) and torch.equal(row_weights[:n], want[1])
            assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
            starts = torch.tensor([0, *(-(-count // alignment) * alignment for count in counts)]).cumsum(0)[:-1]
            assert handle.psum_num_recv_tokens_per_expert.tolist() == (starts + torch.tensor(counts)).tolist()
            chosen = (ids >= 0).sum(1, keepdim=True)
            for factor in (1, 3):  # the second opens another dispatch
                y = rows.clone()
                y[n:] = torch.nan
                sums, back, _ = buffer.combine(y, handle, factor * row_weights)
                assert torch.equal(sums, x * chosen)
                assert torch.equal(back, (factor * weights).masked_fill(ids < 0, 0))
            again, _, weights_again, _, _ = buffer.dispatch(2 * x, handle=handle, topk_weights=3 * weights)
            assert torch.equal(again[:n], 2 * want[0]) and torch.equal(weights_again[:n], 3 * want[1])
            sums, back, _ = buffer.combine(again, handle, weights_again)  # whose dispatch carried weights
            assert torch.equal(sums, 2 * x * chosen) and torch.equal(back, (3 * weights).masked_fill(ids < 0, 0))
            again, _, nothing, _, _ = buffer.dispatch(x, handle=handle)
            sums, nothing_either, _ = buffer.combine(again, handle)
            assert torch.equal(sums, x * chosen) and nothing is None and nothing_either is None
            *_, bare, _ = dispatched(buffer, x, ids, None, **options)
            again, _, weights_again, _, _ = buffer.dispatch(x, handle=bare, topk_weights=weights)
            back = buffer.combine(again, bare, weights_again)[1]
            assert torch.equal(back, weights.masked_fill(ids < 0, 0))
        buffer.destroy()

    on_device.run(num_ranks, program)


@pytest.mark.parametrize("do_expand", [False, True])
def test_float8_rows_bring_their_scales(do_expand):
    def program(group):
        buffer, device = buffer_of(group), default_device()
        everything = batches(2, 0)
        x, ids, weights = on(device, *everything[buffer.rank_idx])
        scales = torch.full((len(x), HIDDEN // 128), 0.5 + buffer.rank_idx, device=device)
        rows8 = x.to(moe_a2a.devices.float8_dtype(device))
        options = {"do_expand": do_expand, "use_tma_aligned_col_major_sf": True}
        (rows, row_scales), *_ = dispatched(buffer, (rows8, scales), ids, weights, **options)
        want = by_route(everything, buffer.rank_idx, 1) if do_expand else received(everything, buffer.rank_idx)
        assert torch.equal(rows.float(), want[0].to(device))
        assert row_scales.shape == (len(rows), HIDDEN // 128) and row_scales.stride() == (1, -(-len(rows) // 4) * 4)
        assert set(row_scales.unique().tolist()) <= {0.5, 1.5}
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_that_are_bytes(dtype, do_expand, sync):
    """Regression, by route: PyTorch cannot fill float8_e8m0fnu, and without do_cpu_sync four scales came as one float32."""

    def program(group):
        buffer, device = buffer_of(group), default_device()
        everything = batches(2, 0)
        x, ids, weights = on(device, *everything[buffer.rank_idx])
        width = HIDDEN // 32
        exponents = torch.full((len(x), width), 120, dtype=torch.uint8, device=device)
        exponents += torch.arange(width, dtype=torch.uint8, device=device)
        sent = x.to(moe_a2a.devices.float8_dtype(device)), exponents.view(dtype)
        (_, scales), *_ = dispatched(buffer, sent, ids, weights, do_expand=do_expand, do_cpu_sync=sync)
        want = by_route(everything, buffer.rank_idx, 1) if do_expand else received(everything, buffer.rank_idx)
        assert (scales.dtype, scales.shape[1]) == (dtype, width)
        row = torch.arange(120, 120 + width, dtype=torch.uint8, device=device)
        assert torch.equal(scales.view(torch.uint8)[: len(want[0])], row.expand(len(want[0]), width))
        buffer.destroy()

    on_device.run(2, program)


def test_a_call_that_fails_on_one_rank_is_told_to_the_others():
    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank_idx])
        fails = buffer.rank_idx == 0
        refused = on_device.refusals(group, fails)

        for do_expand in (False, True):
            with refused(ValueError, "topk_weights has shape"):
                dispatched(buffer, x, ids, weights[:, :2] if fails else weights, do_expand=do_expand)
        *_, packed, _ = dispatched(buffer, x, ids, weights)
        rows, _, _, handle, _ = dispatched(buffer, x, ids, weights, do_expand=True)
        for wrong in ({"topk_idx": ids}, {"do_expand": True}, {"topk_weights": weights}):
            with refused(ValueError, "both handle= and topk_idx|with a handle of packed rows"):
                buffer.dispatch(x, **(wrong if fails else {}), handle=packed)
                packed.ep.check()
        with refused(ValueError, r"x has 41 rows > num_max_tokens_per_rank=40 on rank 0; pass a larger one"):
            long = torch.ones(41, HIDDEN, device=device), ids.new_zeros(41, TOPK), torch.ones(41, TOPK, device=device)
            dispatched(buffer, *(long if fails else (x, ids, weights)), do_expand=True)
            handle.ep.check()
        with refused(ValueError, "x has shape"):
            buffer.combine(rows[:-1] if fails else rows, handle)
            handle.ep.check()
        with refused(TypeError, "handle is a NoneType on rank 0"):
            buffer.dispatch(x, handle=handle)
            buffer.combine(rows, None if fails else handle)
            handle.ep.check()
        assert torch.equal(buffer.combine(rows, handle)[0], x * (ids >= 0).sum(1, keepdim=True))
        buffer.destroy()

    on_device.run(2, program)


def test_what_it_cannot_do_is_named():
    def program(group):
        with pytest.raises(ValueError, match="no num_cpu_bytes"):
            buffer_of(group, num_cpu_bytes=1)
        buffer, device = buffer_of(group), default_device()
        x, ids = torch.ones(2, HIDDEN, device=device), torch.zeros(2, TOPK, dtype=torch.int64, device=device)
        with pytest.raises(ValueError, match="got neither a handle nor a routing; pass topk_idx and num_experts"):
            buffer.dispatch(x)
        with pytest.raises(ValueError, match="do_zero_padding=True without do_expand on rank 0"):
            dispatched(buffer, x, ids, None, do_zero_padding=True)
        with pytest.raises(ValueError, match=r"num_max_tokens_per_rank=0 is not in \[1, \d+\] on rank 0"):
            dispatched(buffer, x, ids, None, num_max_tokens_per_rank=0)
        *_, handle, _ = dispatched(buffer, x, ids, None)
        with pytest.raises(ValueError, match="combine of moe_a2a has no bias"):
            buffer.combine(x, handle, bias=x)
        assert torch.equal(buffer.combine(x, handle)[0], x)
        buffer.barrier()
        buffer.destroy()
        with pytest.raises(RuntimeError, match="the ElasticBuffer of rank 0 has been destroyed"):
            buffer.dispatch(x)

    on_device.run(1, program)
