"""Errors of moe_a2a.integrations.deep_ep name the arguments of the call that was made.

They came from the calls below, and said num_max_tokens_per_rank, y, x_scales, num_blocks, expert_alignment or "call the halves in
order".
"""

import on_device
import pytest
import ranks
import torch
from test_deep_ep_arguments import refused_call

import moe_a2a
from moe_a2a.integrations import deep_ep

pytestmark = [on_device.TESTS, on_device.cpu_only]

HIDDEN, NUM_EXPERTS, MOST = 256, 8, 16
ELSEWHERE = torch.ones(8, HIDDEN, dtype=torch.bfloat16, device="meta")
SMS = deep_ep.Config(num_sms=-1)


def batch(num_tokens=4):
    ids = torch.tensor([[0, 4]]).expand(num_tokens, 2).contiguous()
    return torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16), ids, torch.ones(num_tokens, 2)


def check(group, step, cases):
    """Each case: (text, the step's arguments that are wrong on rank 0)."""
    step()
    for text, wrong in cases.items():
        refused_call(group, group.rank == 0, text, step, **(wrong if group.rank == 0 else {}))
    step()


def test_low_latency_calls():
    def program(group):
        buffer = deep_ep.Buffer(group)
        x, ids, weights = batch()

        def step(x=x, ids=ids, most=MOST, num_experts=NUM_EXPERTS, y=None, calls_hook=True):
            rows, _, handle, _, hook = buffer.low_latency_dispatch(
                x, ids, most, num_experts, use_fp8=False, return_recv_hook=True
            )
            if calls_hook:
                hook()
            buffer.low_latency_combine(torch.ones_like(rows) if y is None else y, ids, weights, handle)

        longer, longer_ids, _ = batch(20)
        cases = {
            "x has 20 rows > num_max_dispatch_tokens_per_rank=16 on rank 0": {"x": longer, "ids": longer_ids},
            r"num_max_dispatch_tokens_per_rank=0 is not in \[1, ": {"most": 0},
            "num_experts=7 on rank 0 is not divisible by the 2 ranks": {"num_experts": 7},
            "x has dtype torch.float64 on rank 0; pass torch.bfloat16": {"x": x.double()},
            r"x has shape \[4, 256\] on rank 0; pass \[4, 32, 256\], rows where recv_x has theirs": {"y": x},
            "x has dtype torch.float32 on rank 0; pass torch.bfloat16": {"y": torch.ones(4, 32, HIDDEN)},
            "x is on meta on rank 0, this buffer on cpu": {"y": ELSEWHERE.new_empty(4, 32, HIDDEN)},
            "before its rows were received; call the hook of low_latency_dispatch first": {"calls_hook": False},
        }
        check(group, step, cases)
        buffer.destroy()

    on_device.run(2, program)


# A rank whose call is of a known size waits in it (with hooks: in its hook), else in an exchange.
@pytest.mark.parametrize("is_known, hooks", [(False, False), (True, True)])
def test_low_latency_dispatches_of_different_sizes(is_known, hooks):
    """Before, each error only said that the other rank was dead, late, or made different calls."""

    def program(group):
        def dispatch(most):
            rows, *_, hook = buffer.low_latency_dispatch(
                x, ids, most, NUM_EXPERTS, use_fp8=False, return_recv_hook=hooks
            )
            if hooks:
                hook()
            return rows.shape[1]

        buffer = deep_ep.Buffer(group, timeout=ranks.slack(2))
        x, ids, _ = batch()
        for most in (8, MOST) if is_known else (MOST,):
            assert dispatch(most) == 2 * most
        most = (8, MOST)[group.rank]
        text = rf"if all are alive, pass the same num_max_dispatch_tokens_per_rank \({most} on rank {group.rank}\), "
        with pytest.raises(moe_a2a.PeerTimeoutError, match=text):
            dispatch(most)
        buffer.destroy()
        buffer = deep_ep.Buffer(group)
        assert dispatch(8) == 16
        buffer.destroy()

    on_device.run(2, program)


def test_a_low_latency_combine_before_the_hook_of_another():
    """Before, it returned the sums of the first, whose hook then raised."""

    def program(group):
        buffer = deep_ep.Buffer(group)
        x, ids, weights = batch()
        rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, MOST, NUM_EXPERTS, use_fp8=False)
        y = torch.zeros_like(rows)
        combined, _, hook = buffer.low_latency_combine(rows.clone(), ids, weights, handle, return_recv_hook=True)
        with pytest.raises(
            RuntimeError,
            match=f"low_latency_combine on rank {group.rank} got a handle whose combine is already under way",
        ):
            buffer.low_latency_combine(y, ids, weights, handle)
        hook()
        assert torch.equal(combined, 2 * x)
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("calls_hook", [True, False])
def test_a_lost_low_latency_handle_leaves_the_others(calls_hook):
    """Before, the error of a lost handle was told to the peers, who got it in the combine of another handle."""

    def program(group):
        buffer = deep_ep.Buffer(group)
        x, ids, weights = batch()

        def dispatch():
            return buffer.low_latency_dispatch(x, ids, MOST, NUM_EXPERTS, use_fp8=False, return_recv_hook=calls_hook)

        for _ in range(10):
            lost, kept, newest = dispatch(), dispatch(), dispatch()
            with pytest.raises(
                RuntimeError, match=f"low_latency_dispatch of rank {group.rank} was lost, since num_buffers=2"
            ):
                lost[4]() if calls_hook else buffer.low_latency_combine(lost[0], ids, weights, lost[2])
            for received in (kept, newest):
                if calls_hook:
                    received[4]()
                combined = buffer.low_latency_combine(received[0].clone(), ids, weights, received[2])[0]
                assert torch.equal(combined, 2 * x)
        buffer.destroy()

    on_device.run(2, program)


def test_packed_rows():
    def program(group):
        buffer = deep_ep.Buffer(group)
        x, ids, weights = batch()

        def step(x=x, num_experts=NUM_EXPERTS, config=None, y=None, combine_config=None, sums=None):
            counts = torch.zeros(num_experts)
            rows, *_, handle, _ = buffer.dispatch(
                x, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=counts, config=config
            )
            sums = torch.ones(8, 2) if sums is None else sums
            buffer.combine(torch.ones_like(rows) if y is None else y, handle, sums, config=combine_config)

        cases = {
            r"num_tokens_per_expert.numel\(\)=7 on rank 0 is not divisible by the 2 ranks": {"num_experts": 7},
            r"config.num_sms=-1 is not in \[0, ": {"config": SMS},
            r"config.num_sms=-1 .* on rank 0": {"combine_config": SMS},
            "x has dtype torch.float8_e4m3fn on rank 0; pass .* or scales to float8": {"x": x.to(torch.float8_e4m3fn)},
            "x has dtype torch.float32 on rank 0; pass torch.bfloat16": {"y": torch.ones(8, HIDDEN)},
            "x is on meta on rank 0, this buffer on cpu": {"y": ELSEWHERE},
            "topk_weights has dtype torch.int64 on rank 0; pass torch.float32": {"sums": torch.ones(8, 2).long()},
        }
        check(group, step, cases)
        with pytest.raises(ValueError, match=r"new_num_sms=0 is not in \[1, "):
            deep_ep.Buffer.set_num_sms(0)
        buffer.destroy()

    on_device.run(2, program)


def test_expanded_rows():
    def program(group):
        buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MOST)
        x, ids, weights = batch()
        scaled = (x.to(torch.float8_e4m3fn), torch.ones(4, 2))

        def step(x=scaled, num_experts=NUM_EXPERTS, most=MOST, y=None):
            how = {"num_experts": num_experts, "num_max_tokens_per_rank": most, "do_expand": True}
            (rows, _), *_, handle, _ = buffer.dispatch(x, ids, weights, **how)
            buffer.combine(torch.ones_like(rows, dtype=torch.bfloat16) if y is None else y, handle)

        cases = {
            "num_experts='8' is a str on rank 0": {"num_experts": "8"},
            "num_max_tokens_per_rank='8' is a str on rank 0": {"most": "8"},
            "x has dtype torch.float8_e4m3fn on rank 0": {"x": scaled[0]},
            "x is a tuple of 3 on rank 0": {"x": (*scaled, None)},
            "x has dtype torch.float32 on rank 0; pass torch.bfloat16": {"y": torch.ones(8, HIDDEN)},
            "x is on meta on rank 0, this buffer on cpu": {"y": ELSEWHERE},
        }
        check(group, step, cases)
        buffer.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("api", ["packed", "expanded"])
def test_scales_of_float8_rows(api):
    """They are the second of a tuple. Columns in memory order, as DeepGEMM's, were refused."""

    def program(group):
        packed, expanded = deep_ep.Buffer(group), deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MOST)
        x, ids, weights = batch()
        x = x.to(torch.float8_e4m3fn)
        scales = torch.arange(8.0).view(4, 2)

        def first(rows):
            if api == "packed":
                return packed.dispatch(rows, topk_idx=ids, topk_weights=weights, num_tokens_per_expert=torch.zeros(8))
            how = {"num_experts": NUM_EXPERTS, "num_max_tokens_per_rank": MOST, "do_expand": True}
            return expanded.dispatch(rows, ids, weights, **how)

        def again(rows):
            if api == "packed":
                return packed.dispatch(rows, handle=handle)
            return expanded.dispatch(rows, handle=handle, do_expand=True)

        (_, expected), *_, handle, _ = first((x, scales))
        cases = {
            r"x\[1\] has shape \[4, 3\] on rank 0; pass \[4, 2\], a scale per 128 values": (x, torch.ones(4, 3)),
            r"x\[1\] has shape \[4, 2\] on rank 0; pass \[4, 8\], a scale per 32 values": (x, scales.byte()),
            r"x\[1\] has dtype torch.float64 on rank 0; pass torch.float32": (x, scales.double()),
            r"x\[1\] is a list on rank 0": (x, [1.0]),
            r"x\[1\] is on meta, x\[0\] on cpu on rank 0": (x, scales.to("meta")),
            r"x\[0\] has dtype torch.bfloat16 on rank 0, but x\[1\] holds scales": (x.bfloat16(), scales),
            "x has dtype torch.float8_e4m3fn on rank 0; pass .* or scales to float8": (x, None),
        }
        for call in first, again:
            for text, wrong in cases.items():
                refused_call(group, group.rank == 0, text, call, wrong if group.rank == 0 else (x, scales))
            assert torch.equal(call((x, scales.t().contiguous().t()))[0][1], expected)
        packed.destroy()
        expanded.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("permutes", [True, False])
def test_hybrid_ep_buffer(permutes):
    def program(group):
        buffer = deep_ep.HybridEPBuffer(group, HIDDEN, MOST, NUM_EXPERTS // 2)
        x, ids, weights = batch()
        routing_map, probs = deep_ep.hybrid_ep_buffer.indices_to_map(ids, weights, len(x), NUM_EXPERTS)
        dispatch = buffer.dispatch_with_permute if permutes else buffer.dispatch
        combine = buffer.combine_with_unpermute if permutes else buffer.combine

        def step(hidden=x, again=x, y=None, received_probs=None, **sizes):
            sent = {"scaling_factor": torch.ones(4, 7)} if hidden is not x else {}
            rows, got_probs, *_, handle = dispatch(hidden=hidden, routing_map=routing_map, probs=probs, **sent, **sizes)
            dispatch(hidden=again, handle=handle)
            probs_back = got_probs if received_probs is None else received_probs
            combine(hidden=torch.ones_like(rows) if y is None else y, probs=probs_back, handle=handle)

        float8, wide = x.to(torch.float8_e4m3fn), torch.ones(8, HIDDEN)
        cases = {
            r"scaling_factor has shape \[4, 7\] on rank 0; pass \[4, 2\], a scale per 128": {"hidden": float8},
            "hidden has dtype torch.float64 on rank 0": {"hidden": x.double()},
            r"hidden has shape \[3, 256\] on rank 0; pass \[4, 256\], one row per token": {"again": x[:3]},
            r"hidden has shape \[7, 256\] on rank 0; pass \[8, 256\]": {"y": wide[1:].bfloat16()},
            "hidden has dtype torch.float32 on rank 0; pass torch.bfloat16": {"y": wide},
            "hidden is on meta on rank 0, this buffer on cpu": {"y": ELSEWHERE},
            r"probs has shape \[7\] on rank 0; pass \[8": {"received_probs": torch.ones(7)},
        }
        if permutes:
            cases[r"pad_multiple=300 is not in \[1, 256\] on rank 0"] = {"pad_multiple": 300}
        check(group, step, cases)
        buffer.destroy()

    on_device.run(2, program)
