"""TokenDispatcher: the gradients of x, topk_weights and the experts' weights on N ranks, against one process in fp64."""

import random

import gradients
import on_device
import pytest
import torch
import torch.nn.functional as F
from gradients import MAX_TOKENS, assert_close, leaf, make_batch, make_ep, make_weights, own_part
from torch.utils.checkpoint import checkpoint

import moe_a2a

pytestmark = on_device.TESTS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run_experts(rows, expert_offsets, w_gate_up, w_down):
    """A loop that skips experts without rows, so that a rank without routes records nothing. NaN behind the last route."""
    offsets = expert_offsets.tolist()
    parts = [torch.full_like(rows[offsets[-1] :], torch.nan)]
    for expert, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        if begin == end:
            continue
        gate, up = F.linear(rows[begin:end], w_gate_up[expert]).chunk(2, dim=1)
        parts.insert(-1, F.linear(F.silu(gate) * up, w_down[expert]))
    return torch.cat(parts)


def multiply_grouped(rows, expert_offsets, w_gate_up, w_down):
    """The same by torch._grouped_mm, which reads the offsets on the device, and leaves rows behind the last as they were."""
    options = {"offs": expert_offsets[1:]}
    gate, up = torch._grouped_mm(rows, w_gate_up.transpose(1, 2), **options).chunk(2, dim=1)
    return torch._grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), **options)


class Rank:
    """One rank's dispatcher, batch and weights, as leaves that require grad unless `frozen` names them."""

    def __init__(self, ep, seed, routing="random", frozen=(), dispatcher=None, weights_seed=None):
        self.ep, self.dispatcher = ep, dispatcher or moe_a2a.TokenDispatcher(ep)
        self.batches = [make_batch(ep, rank, seed, routing) for rank in range(ep.num_ranks)]
        self.weights = make_weights(ep, seed if weights_seed is None else weights_seed)
        batch, (w_gate_up, w_down) = self.batches[ep.rank], own_part(ep, self.weights)
        tensors = {"x": batch.x, "topk_weights": batch.topk_weights, "w_gate_up": w_gate_up, "w_down": w_down}
        self.leaves = {name: leaf(tensor, ep, name not in frozen) for name, tensor in tensors.items()}
        self.topk_idx, self.grad_out = batch.topk_idx.to(ep.device), batch.grad_out.to(ep.device)
        self.frozen = frozen

    def forward(self, x=None, weighted=True, experts=run_experts, **options):
        x = self.leaves["x"] if x is None else x
        rows, routes = self.dispatcher.dispatch(x, self.topk_idx, self.leaves["topk_weights"], **options)
        y = experts(rows, routes.expert_offsets, self.leaves["w_gate_up"], self.leaves["w_down"])
        if not weighted:
            y = (y * routes.weights[:, None]).to(y.dtype)
        self.out = self.dispatcher.combine(y, routes, weighted=weighted)
        return self.out

    def grads(self):
        return {name: None if tensor is None else tensor.grad for name, tensor in self.leaves.items()}

    def check(self, times=1):
        self.ep.check()
        got = {name: grad if grad is None else grad / times for name, grad in self.grads().items()}
        for name, tensor in self.leaves.items():
            if got[name] is None and tensor is not None and tensor.requires_grad:  # a rank without routes
                got[name] = torch.zeros_like(tensor)
        for name in self.frozen:
            assert got[name] is None
        names = [name for name in gradients.NAMES if name not in self.frozen]
        assert_close(self.ep, got, self.batches, self.weights, names)
        assert_close(self.ep, {"out": self.out.detach()}, self.batches, self.weights, ["out"])


# ---- one layer


def run_summed(group, seed):
    """The gradient of a sum is expanded, of strides 0. On a rank without tokens it was refused: contiguous() changes the
    strides of no empty tensor."""
    with make_ep(group) as ep:
        rank = Rank(ep, seed, "zero_tokens")
        for batch in rank.batches:
            batch.grad_out.fill_(1)
        rank.forward().sum().backward()
        rank.check()


def test_the_gradient_of_a_sum(session_seed):
    on_device.run(2, run_summed, session_seed)


def run_once(group, dtype, routing, config, options, seed):
    with make_ep(group, dtype, **config) as ep:
        for call in range(3):
            rank = Rank(ep, seed + call, routing)
            rank.forward(**options).backward(rank.grad_out)
            rank.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_equal_those_of_one_process(num_ranks, dtype, session_seed):
    on_device.run(num_ranks, run_once, dtype, "random", {}, {}, session_seed)


@pytest.mark.parametrize("routing", ["zero_tokens", "zero_routes", "nothing", "no_weights"])
def test_any_routing(routing, session_seed):
    on_device.run(3, run_once, torch.float32, routing, {}, {}, session_seed)


CONFIGS = {"top_1": {"num_topk": 1}, "one_buffer": {"num_buffers": 1}, "no_ll": {"num_max_ll_tokens": 0}}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_any_configuration(config, session_seed):
    on_device.run(2, run_once, torch.float32, "random", config, {}, session_seed)


OPTIONS = {
    "weights applied by the experts": {"weighted": False},
    "aligned": {"expert_alignment": 8},
    "bounded": {"num_max_routes": 72},  # every choice of every token, as some random routings send them
    "grouped_mm": {"experts": multiply_grouped, "expert_alignment": 8},
    "grouped_mm, bounded": {"experts": multiply_grouped, "expert_alignment": 8, "num_max_routes": 90},
    "more than capacity": {"num_max_routes": 10**6},
    "aligned, bounded, weights applied by the experts": {
        "expert_alignment": 4,
        "num_max_routes": 90,
        "weighted": False,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.usefixtures("fresh_memory_is_poisoned")
def test_any_option(options, dtype, session_seed):
    if on_device.IS_GPU and "experts" in options and dtype != torch.bfloat16:
        pytest.skip("torch._grouped_mm takes bfloat16 on GPUs")
    on_device.run(2, run_once, dtype, "random", {}, options, session_seed)


def run_without_the_host(group, seed):
    with make_ep(group, torch.bfloat16) as ep:
        options = {"experts": multiply_grouped, "expert_alignment": 8, "num_max_routes": 90}
        ranks = [Rank(ep, seed + i) for i in range(3)]
        ranks[0].forward(**options).backward(ranks[0].grad_out)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for rank in ranks[1:]:
                rank.forward(**options).backward(rank.grad_out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for rank in ranks:
            rank.check()


@on_device.gpu_only
def test_with_a_bound_the_host_reads_nothing(session_seed):
    on_device.run(on_device.most_ranks(), run_without_the_host, session_seed)


def run_gaps(group, seed):
    with make_ep(group) as ep, torch.no_grad():
        for call in range(2 * ep.num_buffers):  # fills the lists of one rank, then those of the other
            topk_idx = torch.full(
                (MAX_TOKENS, ep.num_topk), call // ep.num_buffers * ep.num_local_experts, device=ep.device
            )
            x = torch.ones(MAX_TOKENS, gradients.HIDDEN, device=ep.device)
            ep.dispatch(x, topk_idx, torch.ones(topk_idx.shape, device=ep.device)).release()
        rank = Rank(ep, seed)
        rows, routes = rank.dispatcher.dispatch(
            rank.leaves["x"], rank.topk_idx, rank.leaves["topk_weights"], expert_alignment=8, num_max_routes=90
        )
        handle = ep.dispatch(rank.leaves["x"], rank.topk_idx, layout="expert_major", expert_alignment=8)
        end = handle.num_routes
        has_route = torch.zeros(len(rows), dtype=torch.bool, device=ep.device)
        has_route[:end] = handle.expert_row_index[:end] >= 0
        handle.release()
        assert rows.shape == (90, gradients.HIDDEN) and routes.split_sizes is None
        assert not rows[~has_route].any() and not routes.weights[~has_route].any()
        assert rows[has_route].any(1).all() and not rows.requires_grad
        routes.release()
        rows, routes = rank.dispatcher.dispatch(rank.leaves["x"], rank.topk_idx)
        assert sum(routes.split_sizes) == len(rows) == int(routes.expert_offsets[-1]) == int(has_route.sum())
        kept = rows.clone(), routes.expert_offsets.clone()
        routes.release()
        for _ in range(ep.num_buffers):
            ep.dispatch(torch.zeros_like(rank.leaves["x"]), torch.full_like(rank.topk_idx, -1)).release()
        assert torch.equal(rows, kept[0]) and torch.equal(routes.expert_offsets, kept[1])  # memory of their own


def test_rows_without_a_route_are_zeros(session_seed):
    on_device.run(2, run_gaps, session_seed)


# ---- what requires grad, here or on another rank


def run_frozen(group, frozen, only_rank, seed):
    with make_ep(group) as ep:
        for call in range(2):
            rank = Rank(ep, seed + call, frozen=frozen if only_rank in (None, ep.rank) else ())
            rank.forward().backward(rank.grad_out)
            rank.check()


@pytest.mark.parametrize("only_rank", [None, 0], ids=["on every rank", "on one rank"])
@pytest.mark.parametrize(
    "frozen", [("x",), ("topk_weights",), ("w_gate_up", "w_down"), ("x", "topk_weights"), gradients.NAMES], ids=str
)
def test_whatever_is_frozen(frozen, only_rank, session_seed):
    on_device.run(2, run_frozen, frozen, only_rank, session_seed)


# ---- in any order


def run_layers(group, seed):
    """Two layers, the second of which takes the first's result, against autograd over both in one process."""
    with make_ep(group) as ep:
        first = Rank(ep, seed)
        second = Rank(ep, seed, dispatcher=first.dispatcher, weights_seed=seed + 1)
        second.forward(x=first.forward() + first.leaves["x"]).backward(first.grad_out)

        batches = first.batches
        weights = [[w.double().requires_grad_() for w in rank.weights] for rank in (first, second)]
        for number, batch in enumerate(batches):
            x, topk_weights = batch.x.double().requires_grad_(), batch.topk_weights.double()
            inner = x + moe_a2a.reference.moe_layer(x, batch.topk_idx, topk_weights, *weights[0])
            out = moe_a2a.reference.moe_layer(inner, batch.topk_idx, topk_weights, *weights[1])
            out.backward(batch.grad_out.double())
            if number == ep.rank:
                torch.testing.assert_close(first.leaves["x"].grad.cpu().double(), x.grad, rtol=1e-4, atol=1e-4)
        for rank, of_all in zip((first, second), weights, strict=True):
            for name, grad in zip(("w_gate_up", "w_down"), own_part(ep, [w.grad for w in of_all]), strict=True):
                torch.testing.assert_close(rank.leaves[name].grad.double(), grad, rtol=1e-4, atol=1e-4)


def test_two_layers(session_seed):
    on_device.run(2, run_layers, session_seed)


def run_micro_batches(group, order, seed):
    """forward: "f0"; backward: "b0". Branches that one backward joins: "b01"."""
    with make_ep(group) as ep:
        dispatcher = moe_a2a.TokenDispatcher(ep)
        ranks = [Rank(ep, seed + i, dispatcher=dispatcher) for i in range(4)]
        outs = {}
        for step in order.split():
            which = [int(digit) for digit in step[1:]]
            if step[0] == "f":
                outs[which[0]] = ranks[which[0]].forward()
            else:
                sum((outs[i] * ranks[i].grad_out).sum() for i in which).backward()
        for rank in ranks:
            rank.check()
        assert ep.dispatch(ranks[0].leaves["x"].detach(), ranks[0].topk_idx).release() is None


@pytest.mark.parametrize("order", ["f0 f1 f2 f3 b3 b2 b1 b0", "f0 f1 b0 f2 b1 f3 b2 b3", "f0 f1 f2 f3 b0213"])
def test_micro_batches_in_any_order(order, session_seed):
    on_device.run(2, run_micro_batches, order, session_seed)


def run_interleaved(group, seed):
    """Both dispatches before both combines, in one graph: no backward finds the handle of its combine's."""
    with make_ep(group, num_buffers=3) as ep:
        dispatcher = moe_a2a.TokenDispatcher(ep)
        ranks = [Rank(ep, seed + i, dispatcher=dispatcher) for i in range(2)]
        sent = [dispatcher.dispatch(r.leaves["x"], r.topk_idx, r.leaves["topk_weights"]) for r in ranks]
        for rank, (rows, routes) in zip(ranks, sent, strict=True):
            y = run_experts(rows, routes.expert_offsets, rank.leaves["w_gate_up"], rank.leaves["w_down"])
            rank.out = dispatcher.combine(y, routes)
        sum((rank.out * rank.grad_out).sum() for rank in ranks).backward()
        for rank in ranks:
            rank.check()


def test_interleaved_layers(session_seed):
    on_device.run(2, run_interleaved, session_seed)


def run_again(group, num_buffers, seed):
    with make_ep(group, num_buffers=num_buffers) as ep:
        rank = Rank(ep, seed)
        out = rank.forward()
        out.backward(rank.grad_out, retain_graph=True)
        first = {name: grad.clone() for name, grad in rank.grads().items()}
        # Only the experts' gradients: combine's backward runs, and nothing takes the handle that it leaves open.
        weights = rank.leaves["w_gate_up"], rank.leaves["w_down"]
        torch.autograd.grad(out, weights, rank.grad_out, retain_graph=True, allow_unused=True)
        rank.forward().backward(rank.grad_out)
        out.backward(rank.grad_out)
        rank.check(times=3)
        for name, grad in rank.grads().items():
            torch.testing.assert_close(grad, 3 * first[name])


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_backward_again_and_gradients_accumulate(num_buffers, session_seed):
    on_device.run(2, run_again, num_buffers, session_seed)


def run_only_dispatch(group, seed):
    """A loss of the rows alone: the backward of dispatch finds no handle, and a gradient that is expanded."""
    with make_ep(group) as ep:
        rank = Rank(ep, seed)
        rows, routes = rank.dispatcher.dispatch(rank.leaves["x"], rank.topk_idx, rank.leaves["topk_weights"])
        rank.dispatcher.combine(rows.detach(), routes)
        rows.sum().backward()
        num_routes = (rank.topk_idx >= 0).sum(1, keepdim=True)
        assert torch.equal(rank.leaves["x"].grad, num_routes.expand(rank.leaves["x"].shape).to(ep.dtype))
        assert not rank.leaves["topk_weights"].grad.any()


def test_dispatch_s_backward_alone(session_seed):
    on_device.run(2, run_only_dispatch, session_seed)


def run_checkpoint(group, use_reentrant, routing, seed):
    with make_ep(group) as ep:
        rank = Rank(ep, seed, routing)
        for _ in range(2):
            out = checkpoint(rank.forward, rank.leaves["x"], use_reentrant=use_reentrant)
            out = checkpoint(lambda out: out.sin().exp(), out, use_reentrant=use_reentrant)
            got = rank.forward().sin().exp()
            torch.testing.assert_close(out, got)
            out.backward(rank.grad_out)
        twice = {name: grad for name, grad in rank.grads().items() if grad is not None}
        plain = Rank(ep, seed, routing, dispatcher=rank.dispatcher)
        plain.forward().sin().exp().backward(plain.grad_out)
        assert twice.keys() == {n for n, g in plain.grads().items() if g is not None}
        for name, grad in twice.items():
            torch.testing.assert_close(grad, 2 * plain.grads()[name])


@pytest.mark.parametrize("routing", ["random", "zero_tokens", "zero_routes"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant, routing, session_seed):
    on_device.run(2, run_checkpoint, use_reentrant, routing, session_seed)


def run_half_a_checkpoint(group, seed):
    """The recomputed dispatch gets no combine: its buffer is reclaimed."""
    with make_ep(group) as ep:
        rank = Rank(ep, seed)

        def first_half(x):
            rows, routes = rank.dispatcher.dispatch(x, rank.topk_idx, rank.leaves["topk_weights"])
            return run_experts(rows, routes.expert_offsets, rank.leaves["w_gate_up"], rank.leaves["w_down"]), routes

        for _ in range(5):
            y, routes = checkpoint(first_half, rank.leaves["x"], use_reentrant=False)
            rank.out = rank.dispatcher.combine(y, routes)
            rank.out.backward(rank.grad_out)
        rank.check(times=5)


def test_a_checkpoint_that_ends_before_combine(session_seed):
    on_device.run(2, run_half_a_checkpoint, session_seed)


# ---- all of it


def run_random_program(group, seed):
    draw = random.Random(seed)  # the same on every rank
    with make_ep(group, draw.choice(DTYPES), num_buffers=draw.randint(1, 3)) as ep:
        dispatcher, waiting = moe_a2a.TokenDispatcher(ep), []
        for call in range(10):
            frozen = draw.choice([(), ("x",), ("topk_weights",), ("w_gate_up", "w_down"), gradients.NAMES])
            frozen = frozen if ep.rank == draw.randrange(ep.num_ranks) else ()
            routing = draw.choice(["random", "full", "zero_tokens", "zero_routes", "nothing", "no_weights"])
            rank = Rank(ep, seed + call, routing, frozen, dispatcher)
            options = draw.choice([{}, *(given for given in OPTIONS.values() if "experts" not in given)])
            again = draw.random() < 0.4
            out = checkpoint(rank.forward, use_reentrant=False, **options) if again else rank.forward(**options)
            waiting.append((rank, out))
            while waiting and (call == 9 or draw.random() < 0.5):
                chosen = [
                    waiting.pop(draw.randrange(len(waiting))) for _ in range(min(len(waiting), draw.randint(1, 2)))
                ]
                sum((out * rank.grad_out).sum() for rank, out in chosen).backward()
                for rank, _ in chosen:
                    rank.check()


@pytest.mark.parametrize("offset", range(4))
def test_random_programs(offset, session_seed):
    on_device.run(2, run_random_program, session_seed + 100 * offset)
