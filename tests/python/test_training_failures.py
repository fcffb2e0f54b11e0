"""Calls of a MoELayer and a TokenDispatcher in grad mode that fail on one rank, and what both refuse."""

import contextlib

import on_device
import pytest
import ranks
import torch
from gradients import assert_close, grads_of, leaves_of, make_batch, make_ep, make_layer
from torch.autograd import forward_ad

import moe_a2a
from moe_a2a.token_dispatcher import _Exchange

pytestmark = on_device.TESTS

REFUSER = 1


@contextlib.contextmanager
def fails_for(ep, error, match):
    """`error` on the rank that fails; the others learn of it."""
    expected = (error, match) if ep.rank == REFUSER else (moe_a2a.PeerRefusedError, rf"rank {REFUSER}.*{match}")
    with pytest.raises(expected[0], match=expected[1]):
        yield
        on_device.settle(ep)


def bad_y(ep, layer, x, topk_idx, topk_weights):
    dispatcher = moe_a2a.TokenDispatcher(ep)
    rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
    with fails_for(ep, ValueError, "y has shape"):
        dispatcher.combine(torch.cat([rows, rows, rows[:1]]) if ep.rank == REFUSER else rows, routes)


def bad_routes(ep, layer, x, topk_idx, topk_weights):
    dispatcher = moe_a2a.TokenDispatcher(ep)
    for number, match in ((2, "routes is a Tensor"), (1, "missing 1 required positional argument: 'routes'")):
        rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
        with fails_for(ep, TypeError, match):
            dispatcher.combine(*((routes, rows)[:number] if ep.rank == REFUSER else (rows, routes)))


def changed_weights(ep, layer, x, topk_idx, topk_weights):
    """The sums kept the weights of dispatch(), but the gradients had the change."""
    dispatcher = moe_a2a.TokenDispatcher(ep)
    rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
    with pytest.raises(AttributeError, match="weights"):
        routes.weights = 2 * routes.weights
    with fails_for(ep, ValueError, "routes.weights has been changed in place"):
        if ep.rank == REFUSER:
            routes.weights.mul_(2)
        dispatcher.combine(rows, routes)


def changed_routing(ep, layer, x, topk_idx, topk_weights):
    """The backward pass of combine() took the change for its routes: wrong gradients, unless that of dispatch() raised too."""
    dispatcher, topk_idx = moe_a2a.TokenDispatcher(ep), topk_idx.clone()
    rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
    with fails_for(ep, ValueError, "topk_idx has been changed in place"):
        if ep.rank == REFUSER:
            topk_idx.copy_(topk_idx.flip(0))
        dispatcher.combine(rows, routes)
    with torch.no_grad():  # no backward pass needs it
        rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
        topk_idx.copy_(topk_idx.flip(0))
        dispatcher.combine(rows, routes)


def experts_fail(ep, layer, x, topk_idx, topk_weights):
    dispatcher = moe_a2a.TokenDispatcher(ep)
    rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
    with fails_for(ep, MemoryError, "no memory"):
        with routes.refused_if_failed():
            if ep.rank == REFUSER:
                raise MemoryError("no memory")
        dispatcher.combine(rows, routes)


def bad_bound(ep, layer, x, topk_idx, topk_weights):
    with fails_for(ep, TypeError, "num_max_routes"):
        num_max_routes = 1.5 if ep.rank == REFUSER else None
        _, routes = moe_a2a.TokenDispatcher(ep).dispatch(x, topk_idx, topk_weights, num_max_routes=num_max_routes)
        routes.release()


def no_room(ep, layer, x, topk_idx, topk_weights):
    dispatcher = moe_a2a.TokenDispatcher(ep)
    with fails_for(ep, ValueError, r"expert_offsets\[-1\]=.*> num_max_routes=1"):
        num_max_routes = 1 if ep.rank == REFUSER else None
        rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights, num_max_routes=num_max_routes)
        dispatcher.combine(rows, routes)


def no_room_in_the_layer(ep, layer, x, topk_idx, topk_weights):
    layer.num_max_routes = 1 if ep.rank == REFUSER else None
    with fails_for(ep, ValueError, r"expert_offsets\[-1\]=.*> num_max_routes=1"):
        layer(x, topk_idx, topk_weights)
    layer.num_max_routes = None


def by_kernels(ep, layer, x, topk_idx, topk_weights):
    layer.fused = ep.rank == REFUSER or None
    with fails_for(ep, RuntimeError, "with fused=True it has no backward"):
        layer(x, topk_idx, topk_weights)
    layer.fused = None


def transformed(error, match, call):
    """`call` fails within autograd, or before any of this project's code runs; call(run, x) makes a call on this rank."""

    def fails(ep, layer, x, topk_idx, topk_weights):
        dispatcher = moe_a2a.TokenDispatcher(ep)

        def dispatch(x, **options):
            return dispatcher.combine(*dispatcher.dispatch(x, topk_idx, topk_weights, **options))

        for run in (dispatch, lambda x, **options: layer(x, topk_idx, topk_weights, **options)):
            with fails_for(ep, error, match):
                call(run, x) if ep.rank == REFUSER else run(x)
            ep._group.all_gather(None)

    return fails


def in_forward_mode(run, x):
    with forward_ad.dual_level():
        run(forward_ad.make_dual(x.detach(), torch.ones_like(x)))


def patched(method, owner):
    def fails(ep, layer, x, topk_idx, topk_weights):
        out = layer(x, topk_idx, topk_weights)

        def no_memory(self, *_):
            if getattr(self, "ep", ep).rank == REFUSER:
                raise MemoryError("no memory")
            return kept(self, *_)

        kept = getattr(owner, method)
        with fails_for(ep, MemoryError, "no memory"):
            ep._group.all_gather(None)
            setattr(owner, method, no_memory)
            try:
                out.sum().backward()
            finally:
                ep._group.all_gather(None)
                setattr(owner, method, kept)

    return fails


def in_backward(spoil, match):
    """spoil(out, y): before or in the backward pass of this rank, whose combine has kept y."""

    def fails(ep, layer, x, topk_idx, topk_weights):
        dispatcher = moe_a2a.TokenDispatcher(ep)
        rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
        y = rows * 2
        out = dispatcher.combine(y, routes).sum()
        with fails_for(ep, RuntimeError, match):
            if ep.rank == REFUSER:
                spoil(out, y)
            out.backward()

    return fails


FUNC = r"within a transform of torch\.func .* on rank \d; call backward\(\)"


def grad_of_weights(ep, layer, *tokens):
    """The error was that of the weights, "w_gate_up is a Tensor, which wraps memory"."""

    def loss(weights):
        return torch.func.functional_call(layer, weights, tokens).sum()

    with fails_for(ep, RuntimeError, FUNC):
        run = torch.func.grad(loss) if ep.rank == REFUSER else loss
        run(dict(layer.named_parameters()))


FAILURES = {
    "y": bad_y,
    "routes": bad_routes,
    "weights": changed_weights,
    "routing": changed_routing,
    "experts": experts_fail,
    "num_max_routes": bad_bound,
    "more than num_max_routes": no_room,
    "more than the layer's num_max_routes": no_room_in_the_layer,
    "kernels": by_kernels,
    "unknown argument": transformed(TypeError, "unexpected keyword argument 'axis'", lambda run, x: run(x, axis=1)),
    "vmap": transformed(RuntimeError, FUNC, lambda run, x: torch.func.vmap(run)(x.detach()[None])),
    "grad": transformed(RuntimeError, FUNC, lambda run, x: torch.func.grad(lambda x: run(x).sum())(x.detach())),
    "grad of weights": grad_of_weights,
    "forward mode": transformed(RuntimeError, "jvp", in_forward_mode),
    "y changed in place": in_backward(lambda out, y: y.zero_(), "modified by an inplace operation"),
    "second derivative": in_backward(
        lambda out, y: torch.autograd.grad(out, y, create_graph=True), "no second derivative"
    ),
    "backward of combine": patched("_weighted_grads", _Exchange),
    "backward of dispatch": patched("_by_choice", _Exchange),
}


def run_failure(group, name, seed):
    with make_ep(group) as ep:
        layer, weights = make_layer(ep, seed)
        batches = [make_batch(ep, rank, seed, "full") for rank in range(ep.num_ranks)]
        for _ in range(3):
            FAILURES[name](ep, layer, *leaves_of(ep, batches[ep.rank]))
        x, topk_idx, topk_weights = leaves_of(ep, batches[ep.rank])
        layer.zero_grad()
        layer(x, topk_idx, topk_weights).backward(batches[ep.rank].grad_out)
        assert_close(ep, grads_of(layer, x, topk_weights), batches, weights)


@on_device.cpu_only
@pytest.mark.parametrize("name", FAILURES)
def test_every_rank_learns_of_a_failure_and_the_next_call_is_right(name, session_seed):
    ranks.run_threads(2, run_failure, name, session_seed)


def run_compiled(group, seed):
    """Recording breaks the graph, of which forward() is a part."""
    with make_ep(group, timeout=60) as ep:
        layer, weights = make_layer(ep, seed)
        batches = [make_batch(ep, rank, seed, "full") for rank in range(ep.num_ranks)]
        compiled = torch.compile(layer, backend="eager")
        compiled(*leaves_of(ep, batches[ep.rank])).sum().backward()
        by_kernels(ep, compiled, *leaves_of(ep, batches[ep.rank]))
        layer.zero_grad()
        x, topk_idx, topk_weights = leaves_of(ep, batches[ep.rank])
        compiled(x, topk_idx, topk_weights).backward(batches[ep.rank].grad_out)
        assert_close(ep, grads_of(layer, x, topk_weights), batches, weights)


@on_device.cpu_only
def test_every_rank_learns_of_a_failure_in_a_compiled_layer(session_seed):
    ranks.run_processes(2, run_compiled, session_seed, timeout=120)


def run_compiled_dispatcher(group, seed):
    with make_ep(group, timeout=60) as ep:
        dispatcher = moe_a2a.TokenDispatcher(ep)
        tokens = leaves_of(ep, make_batch(ep, ep.rank, seed, "full"))

        @torch.compile(backend="eager")
        def exchange(num_max_routes=None, swaps=False, **unknown):
            rows, routes = dispatcher.dispatch(*tokens, num_max_routes=num_max_routes, **unknown)
            return dispatcher.combine(routes, rows) if swaps else dispatcher.combine(rows, routes)

        exchange()
        for wrong, match in (
            ({"num_max_routes": 1.5}, "num_max_routes"),
            ({"axis": 1}, "unexpected keyword argument 'axis'"),
            ({"swaps": True}, "routes is a Tensor"),
        ):
            with fails_for(ep, TypeError, match):
                exchange(**wrong if ep.rank == REFUSER else {})
            ep._group.all_gather(None)
        exchange().sum().backward()


@on_device.cpu_only
def test_every_rank_learns_of_a_failure_in_a_compiled_exchange(session_seed):
    """Dynamo traced the Python code of the calls and left out what tells the peers, which waited until their deadline."""
    ranks.run_processes(2, run_compiled_dispatcher, session_seed, timeout=120)


def run_misuse(group, seed):
    with make_ep(group) as ep:
        layer, _ = make_layer(ep, seed)
        x, topk_idx, topk_weights = leaves_of(ep, make_batch(ep, ep.rank, seed, "full"))
        dispatcher = moe_a2a.TokenDispatcher(ep)
        rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
        out = dispatcher.combine(rows, routes)
        with pytest.raises(RuntimeError, match="a handle serves one combine"):
            dispatcher.combine(rows, routes)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(out.sum(), x, create_graph=True)
        with pytest.raises(ValueError, match="x requires grad.*TokenDispatcher"):
            ep.dispatch(x, topk_idx, topk_weights)
        out = layer(x, topk_idx, topk_weights)
        out.sum().backward()
        assert dispatcher._training.collectives is moe_a2a.TokenDispatcher(ep)._training.collectives
    assert dispatcher._training.collectives.is_closed


def test_misuse_raises(session_seed):
    on_device.run(1, run_misuse, session_seed)


@on_device.cpu_only
def test_carried_handles_need_collectives_of_their_own(session_seed):
    group = moe_a2a.HandleExchange(0, 1)
    comm = moe_a2a.Communicator(group, device="cpu")
    with make_ep(comm, num_experts=4) as ep, moe_a2a.Collectives(comm, 1 << 16) as coll:
        for client in (comm, ep, coll):
            client.set_comm_handles([client.get_comm_handle()])
        with pytest.raises(ValueError, match="HandleExchange.*pass collectives="):
            moe_a2a.TokenDispatcher(ep)
        dispatcher = moe_a2a.TokenDispatcher(ep, collectives=coll)
        x, topk_idx, topk_weights = leaves_of(ep, make_batch(ep, 0, session_seed, "full"))
        rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
        dispatcher.combine(rows, routes).sum().backward()
        torch.testing.assert_close(topk_weights.grad, x.detach().sum(1, keepdim=True) * (topk_idx >= 0))


def run_foreign_collectives(group):
    """Regression: Collectives over other ranks gave wrong gradients of topk_weights, and anything else failed in the backward pass."""
    rank = group.rank
    how = {"device": "cpu", "timeout": 20}
    other, closed = moe_a2a.Collectives(moe_a2a.thread_group(1)[0], **how), moe_a2a.Collectives(group, **how)
    closed.close()
    backwards = moe_a2a.Collectives(Reversed(group), **how)
    with make_ep(group) as ep, other, backwards:
        for collectives, kind, text in (
            ("x", TypeError, "collectives is a str; pass a moe_a2a.Collectives"),
            (closed, ValueError, f"collectives is closed on rank {rank}; pass an open one"),
            (other, ValueError, f"collectives has num_ranks 1, but ep has num_ranks 2 on rank {rank}; pass one over the same ranks"),
            (backwards, ValueError, f"collectives has rank {1 - rank}, but ep has rank {rank} on rank {rank}; pass one over"),
        ):  # fmt: skip
            with pytest.raises(kind, match=text):
                moe_a2a.TokenDispatcher(ep, collectives=collectives)


class Reversed:
    """The ranks of a group in the opposite order."""

    def __init__(self, group):
        self._group, self.num_ranks = group, group.num_ranks
        self.rank = group.num_ranks - 1 - group.rank

    def all_gather(self, value):
        return self._group.all_gather(value)[::-1]


@on_device.cpu_only
def test_collectives_of_other_ranks_are_refused():
    ranks.run_threads(2, run_foreign_collectives)


def run_apart(group, seed):
    """Rank 0 runs under no_grad(), so nobody answers the other's backward pass."""
    with make_ep(group, timeout=2) as ep:
        layer, _ = make_layer(ep, seed)
        tokens = leaves_of(ep, make_batch(ep, ep.rank, seed, "full"))
        layer(*tokens)
        with torch.set_grad_enabled(ep.rank == REFUSER):
            out = layer(*tokens)
        assert out.requires_grad == (ep.rank == REFUSER)
        if ep.rank == REFUSER:
            with pytest.raises(moe_a2a.PeerTimeoutError, match="rank 0"):
                out.sum().backward()
        group.all_gather(None)


@on_device.cpu_only
def test_a_rank_that_does_not_record_is_named(session_seed):
    ranks.run_threads(2, run_apart, session_seed)
