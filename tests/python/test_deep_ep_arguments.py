"""Arguments of one rank that fail before the first exchange of a call of deep_ep.Buffer. The others waited until their
deadline, and the Buffer was lost."""

from functools import partial

import on_device
import pytest
import ranks
import torch
from deep_ep_cases import EXPERTS_PER_RANK, batches, combined, experts
from test_deep_ep import buffer_of

import moe_a2a
from moe_a2a.integrations import deep_ep

pytestmark = on_device.TESTS


def refused_call(group, fails, text, call, *args, error=Exception, **wrong):
    with on_device.refusals(group, fails)(error, text):
        call(*args, **wrong)


@on_device.cpu_only
def test_arguments_of_one_rank_that_fail_before_the_first_exchange():
    def program(group):
        buffer = buffer_of(group)
        x, ids, weights = batches(2, 0)[buffer.rank]
        fails = buffer.rank == 0
        refused = partial(refused_call, group, fails)
        routing = {"topk_idx": ids, "topk_weights": weights, "num_tokens_per_expert": torch.zeros(2 * EXPERTS_PER_RANK)}

        def dispatch(**wrong):
            return buffer.dispatch(**{"x": x, **routing, **(wrong if fails else {})})

        def low_latency(**wrong):
            return buffer.low_latency_dispatch(
                x, ids, 40, 2 * EXPERTS_PER_RANK, use_fp8=False, **(wrong if fails else {})
            )

        def combine(handle, wrong):
            return buffer.combine(y, handle, **(wrong if fails else {}))

        def low_latency_combine(handle, y, wrong):
            return buffer.low_latency_combine(y, ids, weights, handle, **(wrong if fails else {}))

        recv_x, recv_ids, recv_weights, _, handle, _ = dispatch()
        y = experts(buffer.rank, recv_x, recv_ids, recv_weights)
        for text, wrong in {
            "got neither a handle nor a routing": {"topk_idx": None},
            "num_tokens_per_expert is a list on rank 0": {"num_tokens_per_expert": [1, 2]},
            "num_sms": {"config": "24"},
            "current_stream_wait": {"previous_event": 1},
            r"expert_alignment=0 is not in \[1, ": {"expert_alignment": 0},
            "num_worst_tokens='5' is a str on rank 0": {"num_worst_tokens": "5"},
            "x is a tuple of 3 on rank 0": {"x": (x, x, x)},
        }.items():
            refused(text, dispatch, **wrong)
        for text, wrong in {
            "num_sms": {"config": "24"},
            "both handle= and topk_idx or topk_weights given on rank 0": {"topk_weights": weights},  # were not sent
        }.items():
            refused(text, lambda wrong=wrong: buffer.dispatch(x, handle=handle, **(wrong if fails else {})))
        refused(
            r"x has shape \[\d+, 256\] on rank 0; pass \[\d+, 256\], one row",
            lambda: buffer.dispatch(x[1:] if fails else x, handle=handle),
        )
        recv = low_latency()
        for text, wrong in {
            "no bias": {"bias": x},
            "num_sms": {"config": "24"},
            "current_stream": {"previous_event": 1},
        }.items():
            refused(text, combine, handle, wrong)
        assert torch.equal(combine(handle, {})[0], combined(x, ids, weights))
        refused("no bias", combine, handle, {"bias": x})  # the others dispatch again first
        assert torch.equal(combine(handle, {})[0], combined(x, ids, weights))
        refused("no round_scale", low_latency, round_scale=True)
        refused("no use_logfmt", low_latency_combine, recv[2], recv[0], {"use_logfmt": True})
        low_latency_combine(recv[2], recv[0], {})
        wrong = {"cumulative_local_expert_recv_stats": torch.zeros(7, dtype=torch.int32)}
        refused("size of tensor", lambda: low_latency_combine((recv := low_latency(**wrong))[2], recv[0], {}))
        recv = low_latency()
        got, *_ = low_latency_combine(recv[2], recv[0], {})
        assert torch.equal(got, x * weights.masked_fill(ids < 0, 0).sum(1, keepdim=True))
        buffer.destroy()

    on_device.run(2, program)


@on_device.cpu_only
def test_a_combine_of_no_handle_after_batches_of_two_sizes():
    """Regression: the rank refused in the memory of the larger batches, and the others waited in that of the smaller ones."""

    def program(group):
        buffer = buffer_of(group)

        def dispatched(call, most):
            x, ids, weights = batches(2, call, most)[buffer.rank]
            counts = buffer.get_dispatch_layout(ids, 2 * EXPERTS_PER_RANK)[2]
            recv_x, recv_ids, recv_weights, _, handle, _ = buffer.dispatch(
                x, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=counts
            )
            return experts(buffer.rank, recv_x, recv_ids, recv_weights), handle, combined(x, ids, weights)

        for call, most in enumerate((40, 300)):
            y, handle, expected = dispatched(call, most)
            assert torch.equal(buffer.combine(y, handle)[0], expected)
        y, handle, expected = dispatched(4, 40)
        text = "handle is a NoneType on rank 1"
        fails = buffer.rank == 1
        refused_call(group, fails, text, buffer.combine, y, None if fails else handle, error=TypeError)
        assert torch.equal(buffer.combine(y, handle)[0], expected)
        buffer.destroy()

    on_device.run(2, program)


@on_device.cpu_only
def test_arguments_of_the_layout():
    def program(group):
        buffer = buffer_of(group)
        x, ids, weights = batches(2, 0)[buffer.rank]
        for error, text, wrong, num_experts in (
            (TypeError, "topk_idx is torch.float32 on rank", ids.float(), 8),
            (ValueError, r"topk_idx has shape \[3\] on rank", torch.zeros(3, dtype=torch.int64), 8),
            (ValueError, "num_experts=0 on rank|num_experts=0 .* rank", ids, 0),
            (ValueError, "num_experts=7 on rank . is not divisible by the 2 ranks; pass", ids, 7),
        ):
            with pytest.raises(error, match=text):
                buffer.get_dispatch_layout(wrong, num_experts)
        if buffer.rank:
            ids = ids.clone()
            ids[0, 0] = 14
        counts = buffer.get_dispatch_layout(ids, 8)[2]
        assert counts.sum() == ((ids >= 0) & (ids < 8)).sum()
        routing = {"topk_idx": ids, "topk_weights": weights, "num_tokens_per_expert": counts}
        refused_call(group, buffer.rank == 1, r"topk_idx\[0, 0\]=14", buffer.dispatch, x, error=ValueError, **routing)
        buffer.destroy()

    on_device.run(2, program)


@on_device.cpu_only
def test_a_low_latency_dispatch_that_fails_after_packed_rows():
    """Regression: it was refused among the packed dispatches, and each low-latency call then met the peers' next one."""

    def program(group):
        buffer = buffer_of(group)
        x, ids, weights = torch.ones(4, 128, dtype=torch.bfloat16), torch.tensor([[0, 4]] * 4), torch.ones(4, 2)

        def step(number, **wrong):
            arguments = {"x": number * x, "topk_idx": ids, "use_fp8": False} | wrong
            recv, _, handle, _, _ = buffer.low_latency_dispatch(
                num_max_dispatch_tokens_per_rank=8, num_experts=8, **arguments
            )
            got = recv[0, :8, 0].unique().tolist()
            buffer.low_latency_combine(recv.clone(), ids, weights, handle)
            return got

        fails = buffer.rank == 1
        wrong = {"round_scale": True} if fails else {}  # the others are still to make their memory: nobody told them
        refused_call(group, fails, "no round_scale", step, 1, error=ValueError, **wrong)
        assert step(1) == [1]
        buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=torch.zeros(8))
        for text, wrong in {"no round_scale": {"round_scale": True}, r"x has shape \[128\]": {"x": x[0]}}.items():
            refused_call(group, fails, text, step, 2, error=ValueError, **(wrong if fails else {}))
            assert [step(3), step(4)] == [[3], [4]]
        buffer.destroy()

    on_device.run(2, program)


@on_device.cpu_only
def test_a_low_latency_combine_with_a_wrong_out():
    """Regression: with return_recv_hook=True the hook raised, after the sums had been sent. That rank's dispatch stayed open, and
    the next one met another buffer of the peers' until the deadline."""

    def program(group):
        buffer = buffer_of(group)
        x, ids, weights = torch.ones(4, 128, dtype=torch.bfloat16), torch.tensor([[0, 4]] * 4), torch.ones(4, 2)
        fails = buffer.rank == 1
        for text, error, wrong in (
            (r"out has shape \[3, 128\] on rank 1; pass \[4, 128\]", ValueError, torch.empty_like(x[1:])),
            ("out has dtype torch.float32 on rank 1; pass torch.bfloat16", TypeError, torch.empty_like(x.float())),
            ("out is not contiguous .* on rank 1", ValueError, torch.empty(128, 4, dtype=x.dtype).t()),
            ("out is on meta on rank 1", ValueError, torch.empty_like(x, device="meta")),
            ("out is a list on rank 1", TypeError, [0]),
        ):
            for hooks in (True, False):
                y, _, handle, *_ = buffer.low_latency_dispatch(x, ids, 8, 8, use_fp8=False)

                def combine(out, y=y, handle=handle, hooks=hooks):
                    got, _, hook = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=hooks, out=out)
                    hook() if hooks else None
                    return got

                refused_call(group, fails, text, combine, wrong if fails else None, error=error)
                assert torch.equal(combine(torch.empty_like(x)), 2 * x)
        buffer.destroy()

    on_device.run(2, program)


@on_device.cpu_only
@pytest.mark.parametrize("hidden", [128, 256])  # of a kind made before, or of a new one
def test_an_expanded_dispatch_that_fails_beside_another_kind(hidden):
    def program(group):
        buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=64, num_gpu_timeout_secs=20)
        ids = torch.tensor([[0, 4]] * 8)

        def step(number, hidden, weights):
            x = torch.full((8, hidden), float(number), dtype=torch.bfloat16)
            rows, _, _, handle, _ = buffer.dispatch(x, ids, weights, num_experts=8, do_expand=True)
            got = rows[:, 0].unique().tolist()
            buffer.combine(rows, handle)
            return got

        right = torch.ones(8, 2)
        for other in (128, 384):
            assert step(1, other, right) == [1]
        fails = buffer.rank_idx == 1
        text = r"topk_weights has shape \[7, 2\]"
        refused_call(group, fails, text, step, 2, hidden, right[1:] if fails else right, error=ValueError)
        assert [step(3, hidden, right), step(4, hidden, right)] == [[3], [4]]
        buffer.destroy()

    on_device.run(2, program)


@on_device.cpu_only
@pytest.mark.parametrize("api", ["packed", "low latency", "expanded", "hybrid"])
def test_ranks_that_disagree_on_a_first_dispatch(api):
    """The error was of the objects below and named their arguments, num_tokens_per_expert nowhere; weights and float8 rows on
    one rank only gave rows, scales and weights without meaning."""

    def program(group):
        def dispatch(
            hidden=256, topk=2, num_experts=8, dtype=torch.bfloat16, has_weights=True, is_float8=False, most=16
        ):
            x, ids = torch.ones(4, hidden, dtype=dtype), torch.arange(topk).expand(4, topk).contiguous()
            rows = (x.to(torch.float8_e4m3fn), torch.ones(4, 2)) if is_float8 else x
            weights = torch.ones(4, topk) if has_weights else None
            if api == "packed":
                counts = torch.zeros(num_experts)
                return buffer.dispatch(
                    rows, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=counts, num_worst_tokens=2 * most
                )
            if api == "low latency":
                return buffer.low_latency_dispatch(x, ids, most, num_experts, use_fp8=is_float8, topk_weights=weights)
            if api == "expanded":
                how = {"num_experts": num_experts, "num_max_tokens_per_rank": most, "do_expand": True}
                return elastic.dispatch(rows, ids, weights, **how)
            hidden, scales = rows if is_float8 else (rows, None)
            routing = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": 8}
            return hybrid.dispatch_with_permute(hidden=hidden, scaling_factor=scales, **routing)

        buffer, elastic = buffer_of(group), deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=16)
        hybrid = deep_ep.HybridEPBuffer(group, 256, 16, 4, timeout=ranks.slack(10))
        cases = {
            "the row length of x or hidden: 256 on rank 0, 128 on another": {"hidden": 128},
            "the dtype of x or hidden: torch.bfloat16 on rank 0, torch.float32 on another": {"dtype": torch.float32},
            r"whether rows are float8 \(x, hidden or use_fp8\): no on rank 0, yes on another": {"is_float8": True},
            "whether there are topk_weights or probs: yes on rank 0, no on another": {"has_weights": False},
        }
        if api != "hybrid":
            experts = r"the number of experts \(num_experts, or the length of num_tokens_per_expert\): 8 on rank 0, 16"
            cases |= {experts: {"num_experts": 16}, "the columns of topk_idx: 2 on rank 0, 3": {"topk": 3}}
            cases["the most tokens of a rank .*rounded up: .* on rank 0, 256 on another"] = {"most": 256}
        # Regression: of a HybridEPBuffer only the first dispatch was compared.
        for _ in range(2 if api == "hybrid" else 1):
            for text, other in cases.items():
                text = text if group.rank == 0 else text.split(":")[0]
                with pytest.raises(ValueError, match=f"ranks disagree on {text}"):
                    dispatch(**(other if group.rank == 1 else {}))
            dispatch()
        for each in (buffer, elastic, hybrid):
            each.destroy()

    on_device.run(2, program)


@on_device.cpu_only
@pytest.mark.parametrize("first", ["packed", "by route", r"by expert \(low latency\)"])
def test_ranks_that_begin_with_different_dispatches(first):
    """Before, both made the same memory, and then waited in different calls until their deadline."""
    x, ids, counts = torch.ones(4, 256), torch.arange(2).expand(4, 2).contiguous(), torch.zeros(8)

    def program(group):
        def packed():
            return buffer.dispatch(x, topk_idx=ids, num_tokens_per_expert=counts, num_worst_tokens=256)

        def by_expert():
            return buffer.low_latency_dispatch(x, ids, 128, 8, use_fp8=False)

        def elastic_dispatch(do_expand):
            return elastic.dispatch(x, ids, num_experts=8, do_expand=do_expand)

        buffer, elastic = buffer_of(group), deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=16)
        if first == "by route":
            calls, other = [lambda: elastic_dispatch(True), lambda: elastic_dispatch(False)], "packed"
        elif first == "packed":
            calls, other = [packed, by_expert], r"by expert \(low latency\)"
        else:
            calls, other = [by_expert, packed], "packed"
        mine, theirs = (first, other) if group.rank == 0 else (other, first)
        with pytest.raises(ValueError, match=f"rows of the call .*: {mine} on rank {group.rank}, {theirs} on another"):
            calls[group.rank]()
        for call in calls:
            call()
        buffer.destroy()
        elastic.destroy()

    on_device.run(2, program)


@on_device.cpu_only
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("hooks", [False, True])
def test_a_low_latency_combine_that_fails_where_a_peer_has_no_tokens(hooks, repeats):
    """Before, the peer ended its combine, and the dispatch stayed open on the rank that had failed: unless that one repeated the
    call, the second dispatch from then on waited until the deadline."""

    def program(group):
        buffer = buffer_of(group)
        fails, num_experts, num_tokens = buffer.rank == 1, 3 * EXPERTS_PER_RANK, 4 if buffer.rank else 0
        x, weights = torch.ones(num_tokens, 128), torch.ones(num_tokens, 2)
        ids = torch.tensor([[0, EXPERTS_PER_RANK]]).repeat(num_tokens, 1)

        def combine(received, y=None):
            y = received[0] if y is None else y
            out, _, hook = buffer.low_latency_combine(y, ids, weights, received[2], return_recv_hook=hooks)
            hook() if hooks else None
            return out

        for _ in range(4):
            received = buffer.low_latency_dispatch(x, ids, 40, num_experts, use_fp8=False)
            if buffer.rank == 0:
                combine(received)
            else:
                with pytest.raises(ValueError if fails else moe_a2a.PeerRefusedError, match="x has shape"):
                    combine(received, received[0][:, :1] if fails else None)
            group.all_gather(None)
            if repeats and buffer.rank > 0:
                combine(received)
            received = buffer.low_latency_dispatch(x, ids, 40, num_experts, use_fp8=False)
            assert torch.equal(combine(received), 2 * x)
        buffer.destroy()

    on_device.run(3, program)
