"""moe_a2a.integrations.deep_ep.EPBuffer: what differs from ElasticBuffer, whose calls it shares."""

import on_device
import pytest
import ranks
import torch
from deep_ep_cases import EXPERTS_PER_RANK, HIDDEN, SEED, TOPK, batches, by_route, combined, experts, on, received

import moe_a2a
from moe_a2a.devices import default_device
from moe_a2a.integrations import deep_ep

pytestmark = on_device.TESTS

MOST = 40


DEFERRED = {"async_with_compute_stream": True, "defer_epilogue": True}


def buffer_of(group, **options):
    options = {"num_max_tokens_per_rank": MOST, "num_gpu_timeout_secs": ranks.slack(10), **options}
    return deep_ep.EPBuffer(group, **options)


def dispatching(group, do_expand):
    """A buffer of one of two ranks, and a function that dispatches the same batch with each call."""
    buffer = buffer_of(group)
    batch = on(default_device(), *batches(2, 0)[buffer.rank_idx])
    return buffer, lambda: buffer.dispatch(*batch, num_experts=2 * EXPERTS_PER_RANK, do_expand=do_expand)


def ended(result, deferred):
    """The results of a call without its event, after the wait for that if it is deferred."""
    if not deferred:
        result[-1].current_stream_wait()
        return result[:-1]
    assert isinstance(result, deep_ep.EventOverlap)
    ends = result.current_stream_wait(release_handle=True)
    assert result.event is None and result.wait() is None
    return ends


def wanted(everything, rank, do_expand):
    """(rows, ids or None, weights) of a rank."""
    if do_expand:
        rows, weights, _ = by_route(everything, rank, 8)
        return rows, None, weights
    return received(everything, rank)


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_calls_end_with_their_event(num_ranks, sync, deferred, do_expand):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group, deterministic=True), default_device()
        later = {**DEFERRED, "defer_epilogue": deferred}
        options = {"num_experts": num_ranks * EXPERTS_PER_RANK, "expert_alignment": 8, "do_expand": do_expand, **later}
        for call in range(3):
            everything = batches(num_ranks, call)
            x, ids, weights = on(device, *everything[buffer.rank_idx])
            want, want_ids, want_weights = wanted(everything, buffer.rank_idx, do_expand)
            stats = torch.zeros(EXPERTS_PER_RANK, dtype=torch.int32, device=device)
            begun = buffer.dispatch(
                x, ids, weights, do_cpu_sync=sync, cumulative_local_expert_recv_stats=stats, **options
            )
            rows, recv_ids, recv_weights, handle = ended(begun, deferred)
            n = len(want)
            assert torch.equal(rows[:n].cpu(), want) and torch.equal(recv_weights[:n].cpu(), want_weights)
            assert recv_ids is None if do_expand else torch.equal(recv_ids[:n].cpu(), want_ids)
            assert torch.equal(stats, handle.num_unaligned_recv_tokens_per_expert)
            if sync:
                assert handle.num_recv_tokens == len(received(everything, buffer.rank_idx)[0])
                assert handle.num_expanded_tokens == len(by_route(everything, buffer.rank_idx, 8)[0])
            elif do_expand:
                assert handle.num_expanded_tokens == len(rows)
            else:
                assert handle.num_recv_tokens == len(rows)
            y, sums = rows, x * (ids >= 0).sum(1, keepdim=True)
            if not do_expand:
                y, sums = experts(buffer.rank_idx, rows, recv_ids, recv_weights), combined(x, ids, weights)
            out, back = ended(buffer.combine(y, handle, recv_weights, **later), deferred)
            assert torch.equal(out, sums) and torch.equal(back, weights.masked_fill(ids < 0, 0))
            again = buffer.dispatch(2 * x, handle=handle, topk_weights=3 * weights, **later)
            rows, recv_ids, recv_weights, same = ended(again, deferred)
            assert same is handle and torch.equal(rows[:n].cpu(), 2 * want)
            assert torch.equal(recv_weights[:n].cpu(), 3 * want_weights)
            out, none = ended(buffer.combine(y, handle, **later), deferred)
            assert torch.equal(out, sums) and none is None
        buffer.destroy()

    on_device.run(num_ranks, program)


@pytest.mark.parametrize("do_expand", [False, True])
def test_two_dispatches_are_under_way_at_once(do_expand):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        options = {"num_experts": 2 * EXPERTS_PER_RANK, "expert_alignment": 8, "do_expand": do_expand, **DEFERRED}
        both = [batches(2, call) for call in range(2)]
        tensors = [on(device, *everything[buffer.rank_idx]) for everything in both]
        begun = [buffer.dispatch(*mine, **options) for mine in tensors]
        ends = [event.current_stream_wait() for event in begun]
        sums = [buffer.combine(rows, handle, **DEFERRED) for rows, _, _, handle in ends]
        for everything, (x, ids, _), (rows, *_), event in zip(both, tensors, ends, sums, strict=True):
            assert torch.equal(rows.cpu(), wanted(everything, buffer.rank_idx, do_expand)[0])
            out, _ = event.current_stream_wait()
            per_rank = torch.stack([(ids // EXPERTS_PER_RANK == r).masked_fill(ids < 0, False).any(1) for r in (0, 1)])
            terms = (ids >= 0).sum(1) if do_expand else per_rank.sum(0)
            assert torch.equal(out, x * terms[:, None])
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("do_expand", [False, True])
def test_a_deferred_dispatch_is_lost_if_too_many_follow(do_expand):
    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank_idx])
        options = {"num_experts": 2 * EXPERTS_PER_RANK, "do_expand": do_expand}
        first = buffer.dispatch(x, ids, weights, **DEFERRED, **options)
        for _ in range(2):
            rows, *_, handle, _ = buffer.dispatch(x, ids, weights, **options)
        with pytest.raises(
            RuntimeError, match="a deferred dispatch of rank . was lost, since num_buffers=2 other dispatches followed"
        ):
            first.current_stream_wait()
        group.all_gather(None)
        assert len(buffer.combine(rows, handle)[0]) == len(x)
        first = buffer.dispatch(x, ids, weights, **DEFERRED, **options)
        buffer.destroy()
        with pytest.raises(RuntimeError, match="closed"):
            first.current_stream_wait()

    on_device.run(2, program)


def test_events_call_their_hook_once():
    event, called = deep_ep.EventOverlap(deep_ep.EventHandle()), []
    event.register_hook_after_wait(lambda: called.append(1) or "ended")
    with pytest.raises(RuntimeError, match="has a hook already"):
        event.register_hook_after_wait(print)
    assert event.wait() == "ended" and event.wait() is None and called == [1]
    event.register_hook_after_wait(lambda: called.append(2))
    with event(release_handle=True) as same:
        assert same is event and called == [1]
    assert called == [1, 2] and event.event is None


def test_a_call_that_fails_on_one_rank_is_told_to_the_others():
    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank_idx])
        fails, num_experts = buffer.rank_idx == 0, 2 * EXPERTS_PER_RANK
        refused = on_device.refusals(group, fails)

        *_, packed, _ = buffer.dispatch(x, ids, weights, num_experts=num_experts)
        for do_expand in (False, True):
            for wrong, text in (
                ({"do_handle_copy": True}, "do_handle_copy=True on rank 0"),
                ({"defer_epilogue": True}, "defer_epilogue=True without async_with_compute_stream on rank 0"),
            ):
                with refused(ValueError, text):
                    buffer.dispatch(x, ids, num_experts=num_experts, do_expand=do_expand, **(wrong if fails else {}))
                    packed.ep.check()
        for wrong, text in (
            ({"do_cpu_sync": True}, "do_cpu_sync=True with handle= on rank 0"),
            ({"expert_alignment": 4}, "expert_alignment=4 on rank 0, but the handle has 1"),
            ({"num_max_tokens_per_rank": 7}, "num_max_tokens_per_rank=7 on rank 0, but the handle has 40"),
        ):
            with refused(ValueError, text):
                buffer.dispatch(x, handle=packed, **(wrong if fails else {}))
                packed.ep.check()
        with refused(ValueError, "topk_weights has shape"):
            buffer.dispatch(x, handle=packed, topk_weights=weights[:, :2] if fails else weights)
            packed.ep.check()
        rows, *_, handle, _ = buffer.dispatch(x, ids, weights, num_experts=num_experts, do_expand=True)
        with refused(ValueError, "defer_epilogue=True without async_with_compute_stream on rank 0"):
            buffer.combine(rows, handle, defer_epilogue=fails)
            handle.ep.check()
        assert torch.equal(buffer.combine(rows, handle)[0], x * (ids >= 0).sum(1, keepdim=True))
        if fails:
            ids.add_(0)
        with refused(RuntimeError, "topk_idx of a handle of rank 0 has been changed"):
            buffer.dispatch(x, handle=handle)
            handle.ep.check()
        buffer.destroy()

    on_device.run(2, program)


def test_what_it_cannot_do_is_named():
    def program(group):
        with pytest.raises(ValueError, match="EPBuffer of moe_a2a has no lb_allocation_plan_or_num_bytes"):
            buffer_of(group, lb_allocation_plan_or_num_bytes=1 << 21)
        buffer, device = buffer_of(group), default_device()
        for name in ("lb_prefetch_weights", "lb_reduce_grads", "lb_get_theoretical_num_sms"):
            with pytest.raises(RuntimeError, match=f"EPBuffer of moe_a2a has no {name}"):
                getattr(buffer, name)()
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == buffer.get_physical_domain_size() == (1, 1)
        x, ids = torch.ones(2, HIDDEN, device=device), torch.zeros(2, TOPK, dtype=torch.int64, device=device)
        with pytest.raises(ValueError, match="got neither a handle nor a routing; pass topk_idx and num_experts"):
            buffer.dispatch(x)
        *_, handle, _ = buffer.dispatch(x, ids, num_experts=EXPERTS_PER_RANK)
        with pytest.raises(ValueError, match="combine of moe_a2a has no bias"):
            buffer.combine(x, handle, bias=x)
        buffer.barrier()
        buffer.destroy()
        with pytest.raises(RuntimeError, match="the EPBuffer of rank 0 has been destroyed"):
            buffer.dispatch(x)

    on_device.run(1, program)


@pytest.mark.parametrize("do_expand", [False, True])
def test_a_deferred_combine_is_lost_if_too_many_dispatches_follow(do_expand):
    """Before, the error was about a handle that was closed, and said to pass that of the newest dispatch."""
    print(f"seed {SEED}")

    def program(group):
        buffer, dispatch = dispatching(group, do_expand)
        rows, _, _, handle, _ = dispatch()
        want = buffer.combine(rows, handle)[0]
        begun = buffer.combine(rows, handle, **DEFERRED)
        for _ in range(2):
            dispatch()
        text = f"a deferred combine of rank {buffer.rank_idx} was lost, since num_buffers=2 other dispatches followed"
        with pytest.raises(RuntimeError, match=text):
            begun.current_stream_wait()
        assert want.any() and torch.equal(buffer.combine(rows, handle)[0], want)
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("do_expand", [False, True])
def test_topk_idx_that_changes_before_a_deferred_dispatch_ends(do_expand):
    """Before, the change was not seen, and what followed along the handle sent other tokens."""
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank_idx])
        begun = buffer.dispatch(x, ids, weights, num_experts=2 * EXPERTS_PER_RANK, do_expand=do_expand, **DEFERRED)
        ids.copy_(ids.flip(0))
        *_, handle = begun.current_stream_wait()
        with pytest.raises(
            (RuntimeError, moe_a2a.PeerRefusedError), match="topk_idx of a handle of rank . has been changed"
        ):
            buffer.dispatch(x, handle=handle, do_expand=do_expand)
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_combine_before_the_wait_for_another_of_the_handle(deferred, do_expand):
    """Before, one of them raised, and a second one that was not deferred returned the sums of the first."""
    print(f"seed {SEED}")

    def program(group):
        buffer, dispatch = dispatching(group, do_expand)
        rows, _, _, handle, _ = dispatch()
        want = buffer.combine(rows, handle)[0]
        assert want.any()
        for scale in (2, 4):
            first = buffer.combine(scale * rows, handle, **DEFERRED)
            second = buffer.combine((scale + 1) * rows, handle, **(DEFERRED if deferred else {}))
            assert torch.equal(first.current_stream_wait()[0], scale * want)
            assert torch.equal(ended(second, deferred)[0], (scale + 1) * want)
        buffer.destroy()

    on_device.run(2, program)
