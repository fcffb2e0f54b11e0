"""moe_a2a.integrations.deep_ep.HybridEPBuffer, against what one process with the tokens of all ranks computes.

Rows by route, expert by expert and by source rank and token. Values are small integers: sums of them are exact.
"""

import on_device
import pytest
import ranks
import torch
from deep_ep_cases import EXPERTS_PER_RANK, HIDDEN, SEED, TOPK, batches, by_route, combined, factor, on, received

import moe_a2a
from moe_a2a.devices import default_device
from moe_a2a.integrations import deep_ep
from moe_a2a.integrations.deep_ep.hybrid_ep_buffer import indices_to_map

pytestmark = on_device.TESTS

MOST = 40


def buffer_of(group, **options):
    options = {"max_num_of_tokens_per_rank": MOST, "timeout": ranks.slack(10), **options}
    return deep_ep.HybridEPBuffer(group, HIDDEN, num_local_experts=EXPERTS_PER_RANK, **options)


def maps(buffer, ids, weights):
    routing_map, probs = indices_to_map(ids, weights, len(ids), buffer.group_size * EXPERTS_PER_RANK)
    return {"routing_map": routing_map, "probs": probs}


def padded(counts, multiple):
    return [-(-count // multiple) * multiple for count in counts]


def test_maps_and_indices():
    ids, weights = torch.tensor([[2, 0], [-1, 3], [-1, -1]]), torch.tensor([[2.0, 1.0], [5.0, 4.0], [6.0, 7.0]])
    routing_map, probs = indices_to_map(ids, weights, 3, 4)
    assert routing_map.tolist() == [[True, False, True, False], [False, False, False, True], [False] * 4]
    assert probs.tolist() == [[1, 0, 2, 0], [0, 0, 0, 4], [0] * 4] and probs.dtype == torch.float32
    assert indices_to_map(ids, None, 3, 4)[1] is None


@pytest.mark.parametrize("by", ["map", "indices"])
@pytest.mark.parametrize("multiple", [None, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_rows_by_route_and_their_sums(num_ranks, multiple, by):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        num_experts = num_ranks * EXPERTS_PER_RANK
        for call, most in enumerate((40, 30, 40, 300)):  # 300: more than the constructor says
            everything = batches(num_ranks, call, most)
            x, ids, weights = on(device, *everything[buffer.rank])
            want_rows, want_weights, counts = by_route(everything, buffer.rank, multiple or 1)
            dense = maps(buffer, ids, weights)
            routing = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": num_experts}
            rows, probs, scales, tokens_per_expert, handle = buffer.dispatch_with_permute(
                hidden=x, pad_multiple=multiple, **(dense if by == "map" else routing)
            )
            assert torch.equal(rows.cpu(), want_rows) and torch.equal(probs.cpu(), want_weights) and scales is None
            assert tokens_per_expert.tolist() == padded(counts, multiple or 1)
            assert tokens_per_expert.dtype == torch.int64 and tokens_per_expert.device.type == "cpu"
            assert handle[-1].tolist() == [0]
            factors = factor(torch.arange(num_experts))[buffer.rank * EXPERTS_PER_RANK :][:EXPERTS_PER_RANK]
            y = rows * (probs * factors.repeat_interleave(tokens_per_expert).to(device))[:, None]
            for scale in (1, 2):  # the second opens another dispatch
                out, none = buffer.combine_with_unpermute(hidden=scale * y, handle=handle, pad_multiple=multiple)
                assert torch.equal(out, scale * combined(x, ids, weights)) and none is None
            # the order of a backward pass
            again, none, _, nothing, same = buffer.dispatch_with_permute(
                hidden=2 * x, handle=handle, pad_multiple=multiple, num_permuted_tokens=tokens_per_expert.sum()
            )
            assert torch.equal(again, 2 * rows) and none is None and nothing is None and same is handle
            out, back = buffer.combine_with_unpermute(hidden=again, probs=3 * probs, handle=handle)
            assert torch.equal(out, 2 * x * (ids >= 0).sum(1, keepdim=True))
            assert torch.equal(back, 3 * dense["probs"])
            _, probs_again, *_ = buffer.dispatch_with_permute(hidden=x, handle=handle, probs=2 * dense["probs"])
            assert torch.equal(probs_again, 2 * probs)
            assert torch.equal(buffer.combine_with_unpermute(hidden=y, probs=probs, handle=handle)[1], dense["probs"])
        assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank == 300
        buffer.destroy()

    on_device.run(num_ranks, program)


def kept_routes(everything, rank, multiple, num_rows):
    """(the rows, the tokens per expert, the routes left out [T, K] of `rank`'s tokens) with room for num_rows on each rank."""
    kept, lost = None, torch.zeros_like(everything[rank][1], dtype=torch.bool)
    for dst in range(len(everything)):
        position, per_expert = 0, []
        for expert in range(dst * EXPERTS_PER_RANK, (dst + 1) * EXPERTS_PER_RANK):
            begin = position
            for src, (_, ids, _) in enumerate(everything):
                for token, k in (ids == expert).nonzero().tolist():
                    if src == rank:
                        lost[token, k] = position >= num_rows
                    position += 1
            per_expert.append(max(0, min(position, num_rows) - begin))
            position = -(-position // multiple) * multiple
        if dst == rank:
            kept = padded(per_expert, multiple), position > num_rows
    return *kept, lost


@pytest.mark.parametrize("num_rows", [0, 16, 48, 4096])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_routes_without_room_are_left_out(num_ranks, num_rows):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        options = {"pad_multiple": 8, "num_permuted_tokens": num_rows, "non_blocking": True}
        for call in range(3):
            everything = batches(num_ranks, call)
            x, ids, weights = on(device, *everything[buffer.rank])
            all_rows, all_weights, _ = by_route(everything, buffer.rank, 8)
            tokens, overflows, lost = kept_routes(everything, buffer.rank, 8, num_rows)
            routing = maps(buffer, ids, weights)
            if call == 1:  # ids in any order
                routing = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": num_ranks * EXPERTS_PER_RANK}
            rows, probs, _, tokens_per_expert, handle = buffer.dispatch_with_permute(hidden=x, **routing, **options)
            n = min(num_rows, len(all_rows))
            assert len(rows) == len(probs) == num_rows
            assert torch.equal(rows[:n].cpu(), all_rows[:n]) and torch.equal(probs[:n].cpu(), all_weights[:n])
            assert not rows[n:].any() and not probs[n:].any()
            assert tokens_per_expert.tolist() == tokens and tokens_per_expert.device.type == device.type
            assert handle.overflow_flag.tolist() == handle[-1].tolist() == [int(overflows)]
            stays = (ids >= 0) & ~lost.to(device)
            y = rows.clone()
            y[n:] = torch.nan  # rows that hold nothing
            for given in (None, 2 * probs):  # the second opens another dispatch
                out, back = buffer.combine_with_unpermute(hidden=y, probs=given, handle=handle)
                assert torch.equal(out, x * stays.sum(1, keepdim=True))
            want_back = maps(buffer, ids, (2 * weights).masked_fill(~stays, 0))["probs"]
            assert torch.equal(back, want_back)
            again, *_ = buffer.dispatch_with_permute(hidden=3 * x, handle=handle, num_permuted_tokens=num_rows)
            assert torch.equal(again, 3 * rows)
            out, _ = buffer.combine_with_unpermute(hidden=again, handle=handle)
            assert torch.equal(out, 3 * x * stays.sum(1, keepdim=True))
        buffer.destroy()

    on_device.run(num_ranks, program)


def test_a_token_with_more_experts_than_before_is_flagged_without_the_host():
    def program(group):
        buffer, device = buffer_of(group, num_topk=1), default_device()
        x = torch.ones(3, HIDDEN, device=device)
        routing_map = torch.zeros(3, 2 * EXPERTS_PER_RANK, dtype=torch.bool, device=device)
        routing_map[:, 1] = True
        routing_map[0, 5] = buffer.rank == 0  # its second
        options = {"num_permuted_tokens": 8, "non_blocking": True}
        *_, handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map, **options)
        assert handle[-1].tolist() == [int(buffer.rank == 0)]
        rows, *_, handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map)  # the host looks
        out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        assert torch.equal(out, x * routing_map.sum(1, keepdim=True))
        *_, handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map, **options)
        assert handle[-1].tolist() == [0]
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_float8_rows_bring_their_scales(as_bytes):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group, use_fp8=True), default_device()
        everything = batches(2, 0)
        x, ids, weights = on(device, *everything[buffer.rank])
        want_rows, *_ = by_route(everything, buffer.rank, 8)
        rows8, scales = x.to(moe_a2a.devices.float8_dtype(device)), x[:, ::128].contiguous()
        sent = rows8.view(torch.uint8) if as_bytes else rows8
        options = {**maps(buffer, ids, weights), "pad_multiple": 8}
        rows, _, row_scales, _, handle = buffer.dispatch_with_permute(hidden=sent, scaling_factor=scales, **options)
        assert rows.dtype == sent.dtype and torch.equal(rows.view(rows8.dtype).float().cpu(), want_rows)
        assert torch.equal(row_scales.cpu(), want_rows[:, ::128])
        out, _ = buffer.combine_with_unpermute(hidden=rows.view(rows8.dtype).to(torch.bfloat16), handle=handle)
        assert torch.equal(out.float(), x * (ids >= 0).sum(1, keepdim=True))
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("permutes", [False, True])
def test_topk_weights_along_a_handle(permutes):
    """Regression: after a layer with more choices the call raised, and dispatch() ignored topk_weights: there were no probs."""

    def program(group):
        buffer, device = buffer_of(group, num_topk=TOPK + 1), default_device()
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank])
        dispatch = buffer.dispatch_with_permute if permutes else buffer.dispatch
        routing = {"topk_idx": ids, "num_of_experts": 2 * EXPERTS_PER_RANK}
        rows, probs, *_, handle = dispatch(hidden=x, topk_weights=weights, **routing)
        for dtype in (torch.float32, torch.bfloat16):
            again, probs_again, *_ = dispatch(hidden=2 * x, topk_weights=2 * weights.to(dtype), handle=handle)
            assert torch.equal(again, 2 * rows) and torch.equal(probs_again, 2 * probs)
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rows_without_permutation(num_ranks):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        for call, most in enumerate((40, 30, 40, 300)):
            everything = batches(num_ranks, call, most)
            x, ids, weights = on(device, *everything[buffer.rank])
            want_rows, want_ids, want_weights = received(everything, buffer.rank)
            want_map, want_probs = indices_to_map(want_ids, want_weights, len(want_ids), EXPERTS_PER_RANK)
            dense = maps(buffer, ids, weights)
            rows, probs, scales, handle = buffer.dispatch(x, **dense)
            mine = slice(buffer.rank * EXPERTS_PER_RANK, (buffer.rank + 1) * EXPERTS_PER_RANK)
            assert (
                torch.equal(rows.cpu(), want_rows)
                and scales is None
                and probs.shape == (len(rows), dense["probs"].shape[1])
            )
            assert torch.equal(probs[:, mine].cpu(), want_probs) and probs.sum() == want_probs.sum()
            *_, num_rows, local_map, num_tokens, _ = handle
            assert num_rows.tolist() == [len(rows)] and torch.equal(local_map.cpu(), want_map) and num_tokens == len(x)
            y = rows * local_map.sum(1, keepdim=True)
            others = probs.clone()
            others[:, : mine.start] = others[:, mine.stop :] = torch.nan  # other ranks return theirs
            for given in (None, others):
                out, back = buffer.combine(y, given, handle)
                assert torch.equal(out, x * (ids >= 0).sum(1, keepdim=True))
            assert torch.equal(back, dense["probs"])
            again, probs_again, _, same = buffer.dispatch(2 * x, probs=3 * dense["probs"], handle=handle)
            assert torch.equal(again, 2 * rows) and torch.equal(probs_again, 3 * probs) and same is handle
            assert buffer.dispatch(x, handle=handle)[1] is None
            by_ids = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_of_experts=dense["probs"].shape[1])
            assert torch.equal(by_ids[0], rows) and torch.equal(by_ids[1], probs)
        buffer.destroy()

    on_device.run(num_ranks, program)


class Dispatch(torch.autograd.Function):
    """As training frameworks wrap the two calls: the backward of each is the other, along the same handle."""

    @staticmethod
    def forward(ctx, buffer, x, routing_map, probs, options):
        rows, probs, _, tokens, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing_map, probs=probs, **options
        )
        ctx.buffer, ctx.handle = buffer, handle
        return rows, probs, tokens, handle

    @staticmethod
    def backward(ctx, grad_rows, grad_probs, *_):
        grad_x, grad_probs = ctx.buffer.combine_with_unpermute(hidden=grad_rows, probs=grad_probs, handle=ctx.handle)
        return None, grad_x, None, grad_probs, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, y, handle):
        ctx.buffer, ctx.handle, ctx.num_rows = buffer, handle, len(y)
        return buffer.combine_with_unpermute(hidden=y, handle=handle)[0]

    @staticmethod
    def backward(ctx, grad):
        rows, *_ = ctx.buffer.dispatch_with_permute(hidden=grad, handle=ctx.handle, num_permuted_tokens=ctx.num_rows)
        return None, rows, None


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_through_two_layers(num_ranks, non_blocking):
    print(f"seed {SEED}")

    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, weights = on(device, *batches(num_ranks, 1)[buffer.rank])
        num_rows = num_ranks * MOST * TOPK + 8 * EXPERTS_PER_RANK
        options = {"pad_multiple": 8, "non_blocking": non_blocking}
        options["num_permuted_tokens"] = num_rows if non_blocking else None
        experts = buffer.rank * EXPERTS_PER_RANK + torch.arange(EXPERTS_PER_RANK, device=device)
        dense = maps(buffer, ids, weights / 4)
        rows, probs = leaves = [t.clone().requires_grad_() for t in (x / 8, dense["probs"])]
        for _ in range(2):
            got, got_probs, tokens, handle = Dispatch.apply(buffer, rows, dense["routing_map"], probs, options)
            factors = torch.ones(len(got), device=device)
            of_experts = factor(experts).repeat_interleave(tokens.to(device))
            factors[: len(of_experts)] = of_experts
            rows = Combine.apply(buffer, got * (got_probs * factors)[:, None], handle)
        rows.square().sum().backward()
        wanted, wanted_weights = (t.clone().requires_grad_() for t in (x / 8, weights / 4))
        out = combined(combined(wanted, ids, wanted_weights), ids, wanted_weights)
        out.square().sum().backward()
        torch.testing.assert_close(leaves[0].grad, wanted.grad)
        torch.testing.assert_close(leaves[1].grad, maps(buffer, ids, wanted_weights.grad)["probs"])
        buffer.destroy()

    on_device.run(num_ranks, program)


def test_a_call_that_fails_on_one_rank_is_told_to_the_others():
    def program(group):
        buffer, device = buffer_of(group), default_device()
        x, ids, weights = on(device, *batches(2, 0)[buffer.rank])
        fails, dense = buffer.rank == 0, maps(buffer, ids, weights)
        refused = on_device.refusals(group, fails)

        def fails_at_dispatch(error, text, **wrong):
            with refused(error, text):
                *_, opened = buffer.dispatch_with_permute(**{"hidden": x, **dense, **(wrong if fails else {})})
                opened.ep.check()

        fails_at_dispatch(ValueError, "probs has shape", probs=weights)
        fails_at_dispatch(TypeError, "routing_map has dtype", routing_map=dense["routing_map"].int())
        fails_at_dispatch(ValueError, "got neither a handle nor a routing", routing_map=None)
        wrong = {"routing_map": None, "topk_idx": ids, "num_of_experts": 3}
        fails_at_dispatch(ValueError, "num_of_experts=3 on rank 0; with topk_idx pass 8", **wrong)
        rows, probs, *_, handle = buffer.dispatch_with_permute(hidden=x, **dense)
        dense |= {"num_permuted_tokens": 512, "non_blocking": True}
        fails_at_dispatch(ValueError, "num_permuted_tokens=None on rank 0", num_permuted_tokens=None)
        longer = {"hidden": x.new_ones(41, HIDDEN), "probs": None}
        longer["routing_map"] = dense["routing_map"].new_ones(41, 2 * EXPERTS_PER_RANK)
        fails_at_dispatch(ValueError, "hidden has 41 rows > max_num_of_tokens_per_rank=40 on rank 0", **longer)
        fails_at_dispatch(ValueError, "without scaling_factor", hidden=torch.ones_like(x, dtype=torch.uint8))
        with refused(ValueError, r"num_permuted_tokens=1 on rank 0, but the handle's dispatch returned \d+ rows"):
            buffer.dispatch_with_permute(hidden=x, handle=handle, **({"num_permuted_tokens": 1} if fails else {}))
            handle.ep.check()
        with refused(ValueError, "hidden has shape"):
            buffer.combine_with_unpermute(hidden=rows[:-1] if fails else rows, handle=handle)
            handle.ep.check()
        buffer.dispatch_with_permute(hidden=x, handle=handle)  # the combine that failed has ended the one before
        with refused(TypeError, "handle is a NoneType on rank 0"):
            buffer.combine_with_unpermute(hidden=rows, handle=None if fails else handle)
            handle.ep.check()
        with refused(ValueError, "probs has shape"):
            buffer.dispatch(x, routing_map=dense["routing_map"], probs=weights if fails else None)
            handle.ep.check()
        packed_rows, _, _, packed = buffer.dispatch(x, routing_map=dense["routing_map"])
        with refused(ValueError, "hidden has shape"):
            buffer.combine(packed_rows[:-1] if fails else packed_rows, handle=packed)
            packed.ep.check()
        with refused(TypeError, "handle is a HybridEPHandle on rank 0"):
            buffer.dispatch(x, handle=handle if fails else packed)
            packed.ep.check()
        out, back = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        assert torch.equal(out, x * (ids >= 0).sum(1, keepdim=True)) and torch.equal(back, dense["probs"])
        with refused(ValueError, r"num_permuted_tokens=1 < \d+ rows on rank 0"):
            *_, handle = buffer.dispatch_with_permute(
                hidden=x, routing_map=dense["routing_map"], num_permuted_tokens=1 if fails else None
            )
            buffer.combine_with_unpermute(hidden=x.new_ones(handle.routing.num_rows, HIDDEN), handle=handle)
            handle.ep.check()
        buffer.destroy()
        with pytest.raises(RuntimeError, match=f"the HybridEPBuffer of rank {buffer.rank} has been destroyed"):
            buffer.dispatch_with_permute(hidden=x, handle=handle)

    on_device.run(2, program)


@on_device.cpu_only
def test_a_combine_of_probs_after_a_dispatch_that_had_too_few_rows_on_one_rank():
    """Regression: the others first sent the routing again, to find the place of each prob, and waited there for the rank that
    had raised until their deadline; the buffer was lost."""

    def program(group):
        buffer = buffer_of(group)
        x, ids, weights = batches(2, 0)[buffer.rank]
        fails, dense = buffer.rank == 0, maps(buffer, ids, weights)

        def step(**options):
            rows, probs, *_, handle = buffer.dispatch_with_permute(hidden=x, **dense, **options)
            return buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)

        for _ in range(3):
            error = ValueError if fails else moe_a2a.PeerRefusedError
            with pytest.raises(error, match=r"num_permuted_tokens=1 < \d+ rows on rank 0"):
                step(num_permuted_tokens=1 if fails else None)
            group.all_gather(None)
        out, back = step()
        assert torch.equal(out, x * (ids >= 0).sum(1, keepdim=True)) and torch.equal(back, dense["probs"])
        buffer.destroy()

    on_device.run(2, program)
