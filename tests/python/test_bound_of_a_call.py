"""dispatch(num_max_tokens_per_rank=): its errors, what experts make of such a handle, and captured graphs. The random calls of
test_dispatch_combine.py have bounds too."""

import exact
import on_device
import pytest
import torch
from small_calls import CONFIG, expected_output, experts, good_call, inputs_of_rank, make_inputs

import moe_a2a

pytestmark = on_device.TESTS

MOST = 40
SIZES = {"num_experts": 6, "num_topk": 4, "hidden": 64, "num_max_tokens_per_rank": MOST, "timeout": 20}


def run(program, num_ranks=2, **config):
    def with_ep(group):
        with moe_a2a.ExpertParallel(group, **{**CONFIG, "timeout": 20, **config}) as ep:
            program(ep)

    on_device.run(num_ranks, with_ep)


@pytest.mark.parametrize("halves", [False, True], ids=["one call", "halves"])
def test_wrong_bounds_are_refused_before_anything_is_sent(halves):
    """And each refusal reaches the other rank, so that the next call finds both in step."""
    words = {
        -4: r"num_max_tokens_per_rank=-4 is not in \[0, ",
        7: r"got num_max_tokens_per_rank=7, which is not in \[1, 6\] on rank .; pass at most",
        4: "num_tokens=5 > num_max_tokens_per_rank=4 on rank .; pass num_max_tokens_per_rank=5 or more to dispatch",
    }

    def program(ep):
        call = ep.dispatch_send if halves else ep.dispatch
        for bound, text in words.items():
            with pytest.raises(ValueError, match=text):
                call(*make_inputs(ep), num_max_tokens_per_rank=bound)
        for bound in (2.0, "4", True, torch.tensor([1, 2])):
            with pytest.raises(TypeError, match="num_max_tokens_per_rank.* on rank"):
                call(*make_inputs(ep), num_max_tokens_per_rank=bound)
        good_call(ep)
        handle = on_device.dispatch(ep, *make_inputs(ep, 5), num_max_tokens_per_rank=ep.num_max_tokens_per_rank)
        assert torch.equal(ep.combine(experts(handle), handle), expected_output(ep, 5))

    run(program)


@pytest.mark.parametrize("num_max_ll_tokens", [0, CONFIG["num_max_tokens_per_rank"]], ids=["signals", "ll_words"])
@pytest.mark.parametrize("queues_combine", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 0])
def test_ranks_that_disagree_raise(num_tokens, queues_combine, num_max_ll_tokens):
    def program(ep):
        bounds = [ep.num_max_tokens_per_rank, 4, 2]
        own = bounds[ep.rank]
        others = "|".join(f"rank {r} with num_max_tokens_per_rank={bounds[r]}" for r in range(3) if r != ep.rank)
        text = f"rank {ep.rank} dispatched with num_max_tokens_per_rank={own}, ({others}); pass the same"
        for salt in range(3):  # more often than there are buffers
            inputs = make_inputs(ep, salt, num_tokens)
            with pytest.raises(moe_a2a.CallMismatchError, match=text):
                handle = ep.dispatch(*inputs, num_max_tokens_per_rank=own)
                if queues_combine:  # only on a GPU: on the CPU dispatch() has raised
                    ep.combine(inputs[0].new_zeros(ep.num_ranks * own, ep.hidden), handle, presummed=True)
                on_device.settle(ep)
        for salt in range(4):
            good_call(ep, salt)

    run(program, 3, num_max_ll_tokens=num_max_ll_tokens)


@pytest.mark.parametrize("bound, rounded", [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)])
def test_bounds_are_rounded_up_to_a_power_of_two_or_that_of_the_object(bound, rounded):
    def program(ep):
        asked = min(bound + ep.rank, rounded)  # ranks may ask for different ones, if both mean the same
        handle = ep.dispatch(*make_inputs(ep, 0, bound), num_max_tokens_per_rank=asked)
        assert handle.num_max_tokens_per_rank == rounded and handle.recv_x.shape == (2 * rounded, ep.hidden)
        assert handle.capacity == 2 * rounded * ep.num_topk
        handle.release()

    run(program)


def test_a_dispatch_along_a_handle_keeps_its_bound():
    def program(ep):
        first = ep.dispatch(*make_inputs(ep, 0, 3), num_max_tokens_per_rank=4)
        assert first.num_max_tokens_per_rank == 4 and first.recv_x.shape == (2 * 4, ep.hidden)
        x = make_inputs(ep, 1, 3)[0]
        again = ep.dispatch(x, handle=first)
        assert again.num_max_tokens_per_rank == 4
        assert torch.equal(again.expert_row_index[: again.num_routes], first.expert_row_index[: first.num_routes])
        first.release()
        again.release()
        whole = ep.dispatch(x, handle=again, num_max_tokens_per_rank=6)
        assert whole.num_max_tokens_per_rank == ep.num_max_tokens_per_rank == 6
        assert whole.recv_x.shape == (2 * 6, ep.hidden)
        whole.release()

    run(program)


def results(ep, inputs, weights, bound, layout):
    """What each kind of experts makes of one batch."""
    how = {"num_max_tokens_per_rank": bound, "layout": layout}
    out = {}
    for fused in (False, True):
        out["experts", fused] = ep.experts(ep.dispatch(*inputs, **how), *weights, fused=fused)
    if layout != "masked" and not ep._core.returns_ll(len(inputs[0])):
        handle = ep.dispatch(*inputs, **how)
        out["fused combine"] = ep.experts(handle, *weights, fused=True, fused_combine=True)
    if layout == "rows":
        handle = ep.dispatch(*inputs, **how)
        ids, of_ids = handle.recv_topk()
        assert len(ids) == ep.num_ranks * handle.num_max_tokens_per_rank
        rows, _ = handle.contiguous_rows()
        scale = (of_ids * (ids + 1)).sum(dim=1, keepdim=True)
        y = torch.where((ids >= 0).any(dim=1, keepdim=True), rows.float() * scale, torch.nan).to(ep.dtype)
        out["presummed"] = ep.combine(y, handle, presummed=True)
    return out


@pytest.mark.parametrize("num_max_ll_tokens", [0, 16])
@pytest.mark.parametrize("layout", ["rows", "expert_major", "masked"])
def test_experts_give_the_same_bits_whatever_the_bound(layout, num_max_ll_tokens):
    def program(ep):
        generator = torch.Generator().manual_seed(ep.rank)
        weights = [
            (torch.randn(ep.num_local_experts, *shape, generator=generator) / 8).to(ep.dtype).to(ep.device)
            for shape in ((2 * 32, ep.hidden), (ep.hidden, 32))
        ]
        for num_tokens in (1, 7, 16, 30):
            x, _, topk_weights = inputs_of_rank(ep, ep.rank, num_tokens, num_tokens)
            chosen = torch.rand(num_tokens, ep.num_experts, generator=generator).topk(ep.num_topk).indices
            inputs = [part.to(ep.device) for part in (x.to(ep.dtype), chosen, topk_weights)]
            whole = results(ep, inputs, weights, None, layout)
            least = 1 << (num_tokens - 1).bit_length()
            for bound in (least, 32):
                for name, got in results(ep, inputs, weights, bound, layout).items():
                    assert torch.equal(got, whole[name]), (name, num_tokens, bound)

    run(program, **SIZES, dtype=torch.bfloat16, num_max_ll_tokens=num_max_ll_tokens)


@on_device.gpu_only
def test_captured_graphs_of_several_bounds(session_seed):
    """A model that decodes captures a graph per size of batch, on one object. Replays follow each other, and eager calls."""
    config = {"num_experts": 12, "num_topk": 4, "hidden": 520, "dtype": torch.bfloat16, "timeout": 10}

    def program(group):
        with moe_a2a.ExpertParallel(group, num_max_tokens_per_rank=96, **config) as ep:
            generator = torch.Generator(ep.device).manual_seed(1000 * session_seed + ep.rank)
            wrong = torch.zeros((), dtype=torch.int64, device=ep.device)
            positions, graphs = exact.positions_of(ep), []
            for bound in (1, 16, 64, None):
                tokens = exact.make_tokens(ep, bound or 96, generator)

                def step(tokens=tokens, bound=bound):
                    handle = ep.dispatch(tokens.x, tokens.topk_idx, num_max_tokens_per_rank=bound)
                    y = exact.run_experts(ep, handle, positions[: handle.capacity])
                    return ep.combine(y, handle)

                graphs.append((tokens, step, *on_device.capture(step)))
            order = torch.Generator().manual_seed(session_seed)  # the same on all ranks
            for turn in torch.randint(len(graphs), (400,), generator=order).tolist():
                tokens, step, graph, combined = graphs[turn]
                tokens.copy_(exact.make_tokens(ep, len(tokens.x), generator))
                combined.fill_(torch.nan)
                graph.replay()
                exact.count_wrong(wrong, combined, tokens)
                if turn == 1:
                    exact.count_wrong(wrong, step(), tokens)
            ep.check()
            assert wrong.item() == 0, f"rank {ep.rank}: {wrong.item()} wrong values"

    on_device.run(2, program)


def test_masked_y_of_one_row_per_expert_has_any_stride():
    """A contiguous tensor may: PyTorch ignores the strides of dimensions of size 1."""

    def program(ep):
        x = torch.ones(1, ep.hidden, dtype=ep.dtype, device=ep.device)
        topk_idx = torch.arange(ep.num_topk, device=ep.device)[None]
        handle = on_device.dispatch(ep, x, topk_idx, layout="masked", num_max_tokens_per_rank=1)
        outputs = torch.arange(1, ep.num_experts + 1, dtype=ep.dtype, device=ep.device)
        y = outputs[None, :, None].repeat(1, 1, ep.hidden).transpose(0, 1)
        assert y.is_contiguous() and y.stride(1) != ep.hidden
        assert (ep.combine(y, handle) == outputs[: ep.num_topk].sum()).all()

    run(program, num_ranks=1, **SIZES)
