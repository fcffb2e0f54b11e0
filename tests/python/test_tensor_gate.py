"""Tensors without plain memory of their own are refused by name before anything is launched.

Unchecked, a FakeTensor, a DTensor or a tensor whose storage was freed causes a segmentation fault (torch.export.export of a
module that dispatches kills the process), or, as topk_weights, counts as weights of one. A negative view enters with the
wrong sign.
"""

import on_device
import pytest
import ranks
import torch
from fuzz_calls import freed
from small_calls import expected_output, experts, good_call, make_inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import moe_a2a
from moe_a2a.experts import simulated_layer

pytestmark = on_device.TESTS

CONFIG = {
    "num_experts": 12, "num_topk": 2, "hidden": 256, "num_max_tokens_per_rank": 6,
    "dtype": torch.float32, "timeout": 5,
}  # fmt: skip


class Wrapper(torch.Tensor):
    """Claims to have elements, but has no memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called on a tensor that should have been refused")


class Plain(torch.Tensor):
    """Has memory like any tensor."""


def shortened(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)
    return tensor


def fake(tensor):
    return FakeTensorMode().from_tensor(tensor)


def jagged(tensor):
    return torch.nested.nested_tensor(list(tensor), layout=torch.jagged)


def zero_tensor(tensor):
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)


# Derived from a good tensor, the exception, and words of its text.
HOSTILE = {
    "fake": (fake, TypeError, "FakeTensor"),
    "wrapper": (Wrapper, TypeError, "Wrapper"),
    "functional": (torch._to_functional_tensor, TypeError, "wraps memory"),
    "freed": (freed, ValueError, "storage of 0 bytes.*freed"),
    "shortened": (shortened, ValueError, "sizes that reach"),
    "sparse": (torch.Tensor.to_sparse, TypeError, "Sparse"),
    "sparse rows": (torch.Tensor.to_sparse_csr, TypeError, "SparseCsr"),
    "nested": (lambda tensor: torch.nested.nested_tensor(list(tensor)), TypeError, "nested"),
    "jagged": (jagged, TypeError, "NestedTensor"),
    "meta": (lambda tensor: tensor.to("meta"), ValueError, "is on meta"),
    "negative view": (torch._neg_view, ValueError, "negative view"),
    "zero tensor": (zero_tensor, (TypeError, ValueError), "zero tensor|without storage"),
}
LAZY = {"negative view", "zero tensor"}  # only meaningful for floating point
PLACES = ("x", "topk_idx", "topk_weights", "x_scales", "y", "out")


def good_arguments(ep):
    """For every parameter that takes a tensor."""
    x, topk_idx, topk_weights = make_inputs(ep)
    scales = torch.ones(len(x), 2, device=ep.device)
    return {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "x_scales": scales}


def dispatch_with(ep, place, make):
    arguments = good_arguments(ep)
    if place == "x_scales":
        arguments["x"] = arguments["x"].to(torch.float8_e4m3fn)
    else:
        arguments.pop("x_scales")
    return ep.dispatch(**{**arguments, place: make(arguments[place])})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", HOSTILE)
def test_is_refused_and_the_peer_is_told(name, place):
    make, exception, words = HOSTILE[name]
    if name in LAZY and place == "topk_idx":
        pytest.skip("of integers there is no such view")

    def program(group):
        make(torch.ones(4, 4))  # the first nested tensor imports modules for seconds, in which the peer would time out
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            of_dispatch = place not in ("y", "out")
            handle = None if of_dispatch else ep.dispatch(*make_inputs(ep, 3))
            tensors = {} if of_dispatch else {"y": experts(handle), "out": torch.empty(5, ep.hidden, device=ep.device)}
            if ep.rank == 1:
                with pytest.raises(exception, match=rf"(?s){place} .*({words}).* on rank 1; pass "):
                    if of_dispatch:
                        dispatch_with(ep, place, make)
                    else:
                        ep.combine(handle=handle, **{**tensors, place: make(tensors[place])})
            else:
                with pytest.raises(moe_a2a.PeerRefusedError, match=rf"(?s)rank 1 refused its call: {place} "):
                    if of_dispatch:
                        on_device.dispatch(ep, *make_inputs(ep))
                    else:
                        on_device.combine(ep, tensors["y"], handle)
            group.all_gather(None)
            if handle is not None:
                assert torch.equal(ep.combine(tensors["y"], handle), expected_output(ep, 3))
            good_call(ep)

    on_device.run(2, program)


@pytest.mark.parametrize("width", [8, 9])  # those that are viewed, and those that are copied
@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in LAZY])
def test_scales_that_are_bytes(name, width):
    """They are viewed or copied for the extension: of freed ones that was a segmentation fault."""
    make, exception, words = HOSTILE[name]

    def program(group):
        with moe_a2a.ExpertParallel(group, **{**CONFIG, "hidden": 32 * width}) as ep:
            x, topk_idx, _ = make_inputs(ep)
            scales = make(torch.ones(len(x), width, dtype=torch.uint8, device=ep.device))
            with pytest.raises(exception, match=rf"(?s)x_scales .*({words}).* on rank 0; pass "):
                ep.dispatch(x.to(torch.float8_e4m3fn), topk_idx, x_scales=scales)
            good_call(ep)

    on_device.run(1, program)


def test_torch_jit_trace_is_refused_and_the_peer_is_told():
    """It records no call of ours: the traced layer returned what was in memory that nobody had written."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:

            def layer(x, topk_idx, weights):
                handle = on_device.dispatch(ep, x, topk_idx, weights)
                return ep.combine(experts(handle), handle)

            if ep.rank == 1:
                with pytest.raises(
                    ValueError, match=r"x is traced by torch\.jit\.trace.* on rank 1; use torch\.compile"
                ):
                    torch.jit.trace(layer, make_inputs(ep))
            else:
                with pytest.raises(
                    moe_a2a.PeerRefusedError, match=r"rank 1 refused its call: x is traced by torch\.jit\.trace"
                ):
                    layer(*make_inputs(ep))
            good_call(ep)

    on_device.run(2, program)


MADE_PLAIN = {
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "subclass": lambda x: x.as_subclass(Plain),
    "resolved": lambda x: torch._neg_view(-x).resolve_neg(),
    "rows of a wider tensor": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "with an offset": lambda x: torch.cat([x, x])[len(x) :],
    "inference tensor": torch.Tensor.clone,
}


@pytest.mark.parametrize("name", MADE_PLAIN)
def test_tensors_with_memory_of_their_own_enter(name):
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep, torch.inference_mode(name == "inference tensor"):
            x, topk_idx, weights = make_inputs(ep, 4)
            handle = ep.dispatch(MADE_PLAIN[name](x), topk_idx, weights)
            assert torch.equal(ep.combine(experts(handle), handle), expected_output(ep, 4))

    on_device.run(2, program)


def test_one_row_for_all_tokens_and_no_tokens_at_all():
    """Rows of stride 0, and tensors without a byte of storage."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            x, topk_idx, weights = make_inputs(ep, 5)
            same = ep.dispatch(x[:1].expand(5, -1), topk_idx, weights)
            copied = ep.dispatch(x[:1].repeat(5, 1), topk_idx, weights)
            assert torch.equal(ep.combine(experts(same), same), ep.combine(experts(copied), copied))
            none = ep.dispatch(x[:0].clone(), topk_idx[:0].clone(), weights[:0].clone())
            assert none.num_routes == 0
            assert ep.combine(experts(none), none).shape == (0, ep.hidden)

    on_device.run(2, program)


def test_out_is_memory_of_the_callers_own():
    """Not y, which is being read; not a view of the handle, into which peers write after the combine."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            handle = ep.dispatch(*make_inputs(ep, 6))
            y = experts(handle)
            for bad, words in ((y[:5], "out overlaps y"), (y[3:8], "out overlaps y"), (handle.recv_x[:5], "handle")):
                with pytest.raises(ValueError, match=rf"{words}.* on rank 0; pass "):
                    ep.combine(y, handle, out=bad)
            out = torch.empty(5, ep.hidden, device=ep.device)
            version = out._version
            assert ep.combine(y, handle, out=out) is out
            assert torch.equal(out, expected_output(ep, 6))
            assert out._version > version  # autograd sees the write

    on_device.run(1, program)


def test_out_that_requires_grad():
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            handle = ep.dispatch(*make_inputs(ep, 7))
            out = torch.empty(5, ep.hidden, device=ep.device, requires_grad=True)
            with pytest.raises(ValueError, match=r"out requires grad.* on rank 0; .*detach"):
                ep.combine(experts(handle), handle, out=out)
            with torch.no_grad():
                ep.combine(experts(handle), handle, out=out)
            assert torch.equal(out, expected_output(ep, 7))

    on_device.run(1, program)


def test_tangents():
    """Of forward-mode AD; they were lost without a word."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep, moe_a2a.Collectives(group) as coll, forward_ad.dual_level():

            def with_tangent(x):
                return forward_ad.make_dual(x, torch.ones_like(x))

            x, topk_idx, topk_weights = make_inputs(ep, 7)
            handle = ep.dispatch(x, topk_idx, topk_weights)
            y, out, ones = experts(handle), torch.empty(5, ep.hidden, device=ep.device), torch.ones(3, device=ep.device)
            for name, call in {
                "x": lambda: coll.all_reduce(with_tangent(ones)),
                "out": lambda: coll.all_reduce(ones, out=with_tangent(ones)),
                "topk_weights": lambda: ep.dispatch(x, topk_idx, with_tangent(topk_weights)),
                "y": lambda: ep.combine(with_tangent(y), handle),
            }.items():
                with pytest.raises(ValueError, match=f"{name} has a tangent .* on rank 0; pass .*unpack_dual"):
                    call()
            assert torch.equal(ep.combine(y, handle, out=out), expected_output(ep, 7))
            primal = forward_ad.unpack_dual(with_tangent(ones)).primal
            assert torch.equal(coll.all_reduce(primal), ones)

    on_device.run(1, program)


# ---- tracing


class Layer(torch.nn.Module):
    def __init__(self, ep):
        super().__init__()
        self.ep = ep

    def forward(self, x, topk_idx):
        handle = self.ep.dispatch(x, topk_idx)
        y = 2 * handle.recv_x[handle.expert_row_index.clamp(min=0).long()]
        return self.ep.combine(y, handle)


def test_export_raises_instead_of_ending_the_process():
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            x, topk_idx, _ = make_inputs(ep)
            with pytest.raises(Exception, match="(?s)x is a F.*Tensor, which wraps memory.*outside of torch.compile"):
                torch.export.export(Layer(ep), (x, topk_idx), strict=False)
            good_call(ep)

    on_device.run(1, program)


def test_a_transform_of_functorch_is_refused():
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            x, topk_idx, _ = make_inputs(ep)
            for transform, argument in ((torch.func.vmap, torch.stack([x, x])), (torch.func.grad, x)):
                with pytest.raises(TypeError, match="x is a .*, which wraps memory.*torch.func"):
                    transform(lambda x: ep.dispatch(x, topk_idx))(argument)
            good_call(ep)

    on_device.run(1, program)


def test_results_that_a_mode_would_fake():
    """Under FakeTensorMode PyTorch allocates tensors without memory, even for a call whose arguments are real."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            x, topk_idx, weights = make_inputs(ep, 8)
            handle = ep.dispatch(x, topk_idx, weights, layout="masked")
            y = 2 * handle.expert_x
            again = ep.dispatch(x, topk_idx, weights, layout="masked")
            with FakeTensorMode():
                with pytest.raises(TypeError, match="FakeTensor.* on rank 0"):
                    ep.combine(y, handle)
                with pytest.raises(TypeError, match="FakeTensor.* on rank 0"):
                    again.expert_x  # noqa: B018
                again.release()
                # Regression: a segmentation fault, since this result is allocated without the GIL.
                with pytest.raises(TypeError, match="FakeTensor.* on rank 0"):
                    simulated_layer(ep, x, topk_idx, weights, 1.0)
            assert torch.equal(ep.combine(y, handle), expected_output(ep, 8))

    on_device.run(1, program)


def dtensors(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
        mesh = init_device_mesh(ep.device.type, (ep.num_ranks,))
        x, topk_idx, weights = make_inputs(ep)
        for place in range(3):
            arguments = [x, topk_idx, weights]
            arguments[place] = DTensor.from_local(arguments[place], mesh, [Replicate()], run_check=False)
            with pytest.raises(TypeError, match=rf"is a DTensor.* on rank {ep.rank}; pass .*to_local\(\)"):
                ep.dispatch(*arguments)
        good_call(ep)


def test_dtensors():
    run = on_device.run if on_device.RANKS_ARE_PROCESSES else ranks.run_processes
    run(2, dtensors)
