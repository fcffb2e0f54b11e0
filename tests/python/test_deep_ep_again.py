"""A dispatch along a handle that fails on one rank. On that rank the handle kept its open dispatch, on a GPU's other ranks it
did not: a later combine sent the routing again on some ranks only, and these waited until their deadline."""

import on_device
import pytest
import torch
from deep_ep_cases import EXPERTS_PER_RANK, batches, by_route, combined, experts, on, received
from test_deep_ep import buffer_of as buffer_of_v1
from test_deep_ep import dispatched
from test_deep_ep_25 import buffer_of
from test_deep_ep_hybrid import buffer_of as hybrid_buffer_of
from test_deep_ep_hybrid import maps

import moe_a2a
from moe_a2a.devices import default_device

pytestmark = on_device.TESTS

LATER = {"async_with_compute_stream": True, "defer_epilogue": True}


class Calls:
    """The calls of a program whose rank 0 fails."""

    def __init__(self, group, rank):
        self.group, self.fails = group, rank == 0

    def refused(self, ep, call, wrong=None, text="", **right):
        """call() with `wrong` on rank 0 fails there, and is refused on the others."""
        with on_device.refusals(self.group, self.fails)(Exception, text):
            result = call(**({**right, **(wrong or {})} if self.fails else right))
            if isinstance(result, moe_a2a.integrations.deep_ep.EventOverlap):
                result.current_stream_wait()
            ep.check()

    def num_dispatches(self, ep, call):
        """(what call() returns, the dispatches that it makes, which all ranks agree on)."""
        before = ep._num_dispatches
        result = call()
        counts = self.group.all_gather(ep._num_dispatches - before)
        assert len(set(counts)) == 1, counts
        return result, counts[0]


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_handle_is_not_open_after_a_dispatch_that_failed(num_ranks, deferred, do_expand):
    def program(group):
        buffer, device = buffer_of(group), default_device()
        calls, everything = Calls(group, buffer.rank_idx), batches(num_ranks, 0)
        x, ids, weights = on(device, *everything[buffer.rank_idx])
        rows, recv_ids, recv_weights, handle, _ = buffer.dispatch(
            x, ids, weights, num_experts=num_ranks * EXPERTS_PER_RANK, do_expand=do_expand
        )
        y, sums = rows, x * (ids >= 0).sum(1, keepdim=True)
        if not do_expand:
            y, sums = experts(buffer.rank_idx, rows, recv_ids, recv_weights), combined(x, ids, weights)
        right = {"x": x, "handle": handle, "topk_weights": weights, **(LATER if deferred else {})}
        for wrong, text in (
            ({"expert_alignment": 4}, "expert_alignment=4 on rank 0"),
            ({"topk_weights": weights[:, :2]}, "topk_weights has shape"),
            ({"x": x[:, :8]}, "x has shape"),
        ):
            calls.refused(handle.ep, buffer.dispatch, wrong, text, **right)
            assert not handle._routing.is_open
            (out, _, _), made = calls.num_dispatches(handle.ep, lambda: buffer.combine(y, handle))
            assert torch.equal(out, sums) and made == 1
        again = buffer.dispatch(**{**right, "x": 2 * x, "topk_weights": 3 * weights})
        rows, _, recv_weights, *_ = again.current_stream_wait() if deferred else again
        want, want_weights = by_route(everything, buffer.rank_idx, 1)[:2] if do_expand else (None, None)
        if not do_expand:
            want, _, want_weights = received(everything, buffer.rank_idx)
        assert torch.equal(rows.cpu(), 2 * want) and torch.equal(recv_weights.cpu(), 3 * want_weights)
        (out, _, _), made = calls.num_dispatches(handle.ep, lambda: buffer.combine(y, handle))
        assert torch.equal(out, sums) and made == 0
        buffer.destroy()

    on_device.run(num_ranks, program)


def test_weights_along_a_packed_handle_keep_their_bits():
    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank_idx])
        *_, handle, _ = buffer.dispatch(x, ids, num_experts=2 * EXPERTS_PER_RANK)
        some = torch.tensor([torch.nan, -0.0, 0.0, 1e-42, -torch.inf, 0.1], device=device)
        odd = some[torch.arange(weights.numel(), device=device) % len(some)].view_as(weights)
        odd = odd.t().contiguous().t()
        *_, first, _, _ = buffer.dispatch(x, ids, odd, num_experts=2 * EXPERTS_PER_RANK)
        *_, again, _, _ = buffer.dispatch(x, handle=handle, topk_weights=odd)
        assert again.dtype == torch.float32 and torch.equal(again.view(torch.int32), first.view(torch.int32))
        buffer.destroy()

    on_device.run(2, program)


def test_other_handles_stay_alike_on_all_ranks():
    def program(group):
        buffer, device = buffer_of(group), default_device()
        calls = Calls(group, buffer.rank_idx)
        x, ids, _ = on(device, *batches(2, 0)[buffer.rank_idx])
        options = {"num_experts": 2 * EXPERTS_PER_RANK, "do_expand": True}
        rows, *_, first, _ = buffer.dispatch(x, ids, **options)
        *_, second, _ = buffer.dispatch(x, ids, **options)
        calls.refused(first.ep, buffer.dispatch, {"expert_alignment": 4}, "expert_alignment=4", x=x, handle=second)
        for handle in (first, second):  # the dispatch that failed ended the first, on rank 0, too
            (out, _, _), made = calls.num_dispatches(handle.ep, lambda handle=handle: buffer.combine(rows, handle))
            assert torch.equal(out, x * (ids >= 0).sum(1, keepdim=True)) and made == 1
        buffer.destroy()

    on_device.run(2, program)


def test_buffer():
    def program(group):
        buffer, device = buffer_of_v1(group), default_device()
        calls = Calls(group, buffer.rank)
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank])
        recv_x, recv_ids, recv_weights, _, handle, _ = dispatched(buffer, x, ids, weights)
        y = experts(buffer.rank, recv_x, recv_ids, recv_weights)
        calls.refused(handle.ep, buffer.dispatch, {"x": (x, x, x)}, "x is a tuple of 3 on rank 0", x=x, handle=handle)
        (out, _, _), made = calls.num_dispatches(handle.ep, lambda: buffer.combine(y, handle))
        assert torch.equal(out, combined(x, ids, weights)) and made == 1
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("do_expand", [False, True])
def test_a_combine_that_fails_where_a_peer_needs_no_sum(do_expand):
    """Before, that peer ended its combine, and the handle stayed open on the rank that had failed: the next combine of it, or the
    second dispatch from then on, waited until the deadline."""

    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, _ = on(device, *batches(2, 0)[buffer.rank_idx])
        if buffer.rank_idx == 1:  # rank 0 gets none of its tokens
            ids = torch.where(ids < 0, -1, EXPERTS_PER_RANK + ids % EXPERTS_PER_RANK)
        per_rank = torch.stack([((ids >= 0) & (ids // EXPERTS_PER_RANK == rank)).any(1) for rank in (0, 1)])
        sums = x * ((ids >= 0).sum(1) if do_expand else per_rank.sum(0))[:, None]
        for combines_again in (True, False, False):
            rows, *_, handle, _ = buffer.dispatch(x, ids, num_experts=2 * EXPERTS_PER_RANK, do_expand=do_expand)
            assert torch.equal(buffer.combine(rows, handle)[0], sums)
            buffer.dispatch(x, handle=handle)
            if buffer.rank_idx == 0:
                with pytest.raises(ValueError, match="x has shape"):
                    buffer.combine(rows[:, :8], handle)
            else:
                assert torch.equal(buffer.combine(rows, handle)[0], sums)
            assert not handle._routing.is_open
            group.all_gather(None)
            if combines_again:
                assert torch.equal(buffer.combine(rows, handle)[0], sums)
        buffer.destroy()

    on_device.run(2, program)


def test_of_hybrid_ep_buffer():
    def program(group):
        buffer, device = hybrid_buffer_of(group), default_device()
        calls = Calls(group, buffer.rank)
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank])
        dense = maps(buffer, ids, weights)
        rows, probs, *_, handle = buffer.dispatch_with_permute(hidden=x, **dense)
        again, combine, sums = (
            buffer.dispatch_with_permute,
            buffer.combine_with_unpermute,
            x * (ids >= 0).sum(1)[:, None],
        )
        call = {"hidden": x, "handle": handle}
        calls.refused(handle.ep, again, {"num_permuted_tokens": 1}, "num_permuted_tokens=1", **call)
        (out, _), made = calls.num_dispatches(handle.ep, lambda: combine(hidden=rows, handle=handle))
        assert torch.equal(out, sums) and made == 1
        again(probs=dense["probs"], **call)  # carries weights: the combine of probs sends the routing again
        call = {"hidden": rows, "probs": probs, "handle": handle}
        if device.type == "cpu":  # on a GPU rank 1 would wait for its deadline
            for _ in range(2):
                calls.refused(handle.ep, combine, {"probs": [1]}, "probs is a list", **call)
        (out, back), made = calls.num_dispatches(handle.ep, lambda: combine(**call))
        assert torch.equal(out, sums) and torch.equal(back, dense["probs"]) and made == 1

        packed_rows, recv_probs, _, packed = buffer.dispatch(x, **dense)
        call = {"hidden": x, "probs": dense["probs"], "handle": packed}
        calls.refused(packed.ep, buffer.dispatch, {"probs": probs}, "probs has shape", **call)
        per_rank = torch.stack([(ids // EXPERTS_PER_RANK == r).masked_fill(ids < 0, False).any(1) for r in (0, 1)])
        (out, back), made = calls.num_dispatches(packed.ep, lambda: buffer.combine(packed_rows, recv_probs, packed))
        assert torch.equal(out, x * per_rank.sum(0)[:, None]) and torch.equal(back, dense["probs"]) and made == 1
        call = {"hidden": packed_rows, "handle": packed}
        calls.refused(packed.ep, buffer.combine, {"hidden": None}, "hidden is a NoneType on rank 0", **call)
        got, got_probs, _, _ = buffer.dispatch(2 * x, probs=3 * dense["probs"], handle=packed)
        assert torch.equal(got, 2 * packed_rows) and torch.equal(got_probs, 3 * recv_probs)
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("explicitly_destroy", [False, True])
def test_what_is_left_of_a_buffer_that_was_dropped(explicitly_destroy):
    """Regression: its memory stayed on a GPU, as of `_buffer = Buffer(...)` in place of one that is too small."""

    def program(group):
        buffer, device = buffer_of_v1(group, explicitly_destroy=explicitly_destroy), default_device()
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank])
        rows, recv_ids, recv_weights, _, handle, _ = dispatched(buffer, x, ids, weights)
        y = experts(buffer.rank, rows, recv_ids, recv_weights)
        assert torch.equal(buffer.combine(y, handle)[0], combined(x, ids, weights))
        exchange = buffer._exchange
        made = [exchange.comm, exchange.collectives, exchange.host_collectives, *(ep for _, ep in exchange._made)]
        del buffer
        assert [client.is_closed for client in made] == [not explicitly_destroy] * len(made)
        group.all_gather(None)
        exchange.close()

    on_device.run(2, program)
