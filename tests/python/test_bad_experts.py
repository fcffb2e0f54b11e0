"""Bad arguments of MoELayer and experts(): an error with value, limit, rank and argument, which the peers learn of before
anything is launched; the object stays usable on all ranks."""

import on_device
import pytest
import torch
from gradients import own_part
from layer_cases import HIDDEN, INTERMEDIATE, assert_as_exact_as_torch, make_ep, make_tokens, make_weights, on

import moe_a2a
from moe_a2a.devices import float8_dtype

pytestmark = on_device.TESTS

REFUSED = moe_a2a.PeerRefusedError
REFUSER = 1

FLOAT8 = float8_dtype(torch.device(on_device.NAME))


def float8(up, down, shape=(4, 2, 1), dtype=torch.float32, device=None):
    up_scales = torch.ones(shape, dtype=dtype, device=device or up.device)
    return (up.to(FLOAT8), up_scales), (down.to(FLOAT8), torch.ones(4, 1, 1, device=up.device))


# (bad w_gate_up, bad w_down) made from good ones, the error, words of its message; 4 local experts
BAD_WEIGHTS = {
    "dtype": (lambda up, down: (up.float(), down), TypeError, ["w_gate_up", "float32", "bfloat16"]),
    "dtype of w_down": (lambda up, down: (up, down.half()), TypeError, ["w_down", "float16", "bfloat16"]),
    "float64": (lambda up, down: (up.double(), down.double()), TypeError, ["w_gate_up", "float64"]),
    "integers": (lambda up, down: (up, down.int()), TypeError, ["w_down", "int32"]),
    "device": (lambda up, down: (up.to("meta"), down), ValueError, ["w_gate_up", "meta"]),
    "no tensor": (lambda up, down: (up, [1.0]), TypeError, ["w_down", "list"]),
    "experts": (lambda up, down: (up[:3], down), ValueError, ["w_gate_up", f"[3, {2 * INTERMEDIATE}", "=4"]),
    "experts of w_down": (lambda up, down: (up, down[:3]), ValueError, ["w_down", f"[3, {HIDDEN}", "[4, "]),
    "hidden": (lambda up, down: (up[:, :, :-1], down), ValueError, ["w_gate_up", f"hidden={HIDDEN}"]),
    "intermediate": (lambda up, down: (up, down[:, :, 16:]), ValueError, ["w_down", str(INTERMEDIATE)]),
    # Regression: w_down was blamed, and expected to have the shape that it had.
    "odd": (lambda up, down: (up[:, 1:], down[:, :, 1:]), ValueError, ["w_gate_up", "2 * intermediate"]),
    "none": (lambda up, down: (up[:, :0], down[:, :, :0]), ValueError, ["w_gate_up", f"[4, 0, {HIDDEN}]"]),
    "float8 without scales": (lambda up, down: (up.to(FLOAT8), down), TypeError, ["w_gate_up", "(w_gate_up, scales)"]),
    "scales of bfloat16": (lambda up, down: ((up, torch.ones(4, 2, 1, device=up.device)), down), TypeError, ["bfloat16"]),
    "only one float8": (lambda up, down: (up, (down.to(FLOAT8), torch.ones(4, 1, 1, device=up.device))), TypeError, ["both"]),
    "shape of scales": (lambda up, down: float8(up, down, (4, 1, 1)), ValueError, ["w_gate_up's scales", "[4, 2, 1]"]),
    "dtype of scales": (lambda up, down: float8(up, down, dtype=torch.float64), TypeError, ["scales", "float64"]),
    "device of scales": (lambda up, down: float8(up, down, device="meta"), ValueError, ["scales", "meta"]),
    "rank": (lambda up, down: (up[0], down), ValueError, ["w_gate_up", f"[{2 * INTERMEDIATE}, {HIDDEN}]"]),
    "rank of w_down": (lambda up, down: (up, down[0]), ValueError, ["w_down"]),
}  # fmt: skip


def check_words(raised, words):
    for word in [*words, f"rank {REFUSER}"]:
        assert word in str(raised.value), f"{word!r} is not in {raised.value}"


def good_calls(ep, weights, seed):
    calls = [make_tokens(ep, "random", seed + 8 * i + ep.rank) for i in range(3)]
    layer = moe_a2a.MoELayer(ep, *own_part(ep, weights))
    assert_as_exact_as_torch([layer(*on(ep, tokens)).clone() for tokens in calls], calls, weights)


def run(program, seed, *args):
    on_device.run(2, with_layer, program, seed, *args)


def with_layer(group, program, seed, *args):
    with make_ep(group) as ep:
        weights = make_weights(ep.num_experts, ep.dtype, seed)
        program(ep, group, own_part(ep, weights), on(ep, make_tokens(ep, "random", seed + ep.rank)), *args)
        group.all_gather(None)
        ep.check()
        good_calls(ep, weights, seed)


def refused(call, ep):
    with pytest.raises(REFUSED, match=f"rank {REFUSER} refused its call"):
        call()
        on_device.settle(ep)


def of_a_new_layer(ep, group, weights, tokens, name):
    bad, error, words = BAD_WEIGHTS[name]
    if ep.rank == REFUSER:
        with pytest.raises(error) as raised:
            moe_a2a.MoELayer(ep, *bad(*weights))
        check_words(raised, words)


def of_a_layer(ep, group, weights, tokens, name):
    """Replaces the weights without the layer's knowledge."""
    bad, error, words = BAD_WEIGHTS[name]
    layer = moe_a2a.MoELayer(ep, *weights)
    if ep.rank != REFUSER:
        return refused(lambda: layer(*tokens), ep)
    layer.w_gate_up = layer.w_down = None
    vars(layer)["w_gate_up"], vars(layer)["w_down"] = bad(*weights)  # hide the parameters
    with pytest.raises(error) as raised:
        layer(*tokens)
    check_words(raised, words)


def of_experts(ep, group, weights, tokens, name):
    bad, error, words = BAD_WEIGHTS[name]
    handle = ep.dispatch(*tokens)
    if ep.rank == REFUSER:
        with pytest.raises(error) as raised:
            ep.experts(handle, *bad(*weights))
        check_words(raised, words)
    else:
        refused(lambda: ep.experts(handle, *weights), ep)
    group.all_gather(None)
    assert handle.is_open  # all may retry
    ep.experts(handle, *weights)


def that_require_grad(ep, group, weights, tokens):
    """experts() would not record its call, so weights that nobody detached would never learn."""
    handle = ep.dispatch(*tokens)
    if ep.rank == REFUSER:
        with pytest.raises(ValueError, match=f"w_down requires grad on rank {REFUSER}.*pass w_down.detach"):
            ep.experts(handle, weights[0], torch.nn.Parameter(weights[1]))
    else:
        refused(lambda: ep.experts(handle, *weights), ep)
    group.all_gather(None)
    with torch.no_grad():
        ep.experts(handle, *map(torch.nn.Parameter, weights))


def test_weights_that_require_grad(session_seed):
    run(that_require_grad, session_seed)


@pytest.mark.parametrize("call", [of_a_new_layer, of_a_layer, of_experts])
@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_bad_weights(name, call, session_seed):
    run(call, session_seed, name)


def with_bad_choices(ep, group, weights, tokens):
    for options, error, words in (
        ({"fused": 1}, TypeError, ["fused=1"]),
        ({"num_max_routes": 0}, ValueError, ["num_max_routes=0"]),
        ({"num_max_routes": 2.5}, TypeError, ["num_max_routes=2.5"]),
    ):
        handle = ep.dispatch(*tokens)
        if ep.rank == REFUSER:
            with pytest.raises(error) as raised:
                moe_a2a.MoELayer(ep, *weights, **options)
            check_words(raised, words)
            with pytest.raises(error) as raised:
                ep.experts(handle, *weights, **options)
            check_words(raised, words)
        else:
            refused(lambda handle=handle: ep.experts(handle, *weights), ep)
        group.all_gather(None)
        handle.release()


def test_bad_choices(session_seed):
    run(with_bad_choices, session_seed)


def with_wrong_handles(ep, group, weights, tokens):
    with make_ep(group) as other:
        foreign = other.dispatch(*tokens)
        closed = ep.dispatch(*tokens)
        ep.experts(closed, *weights)
        for wrong, words in ((foreign, "handle of another"), (closed, "closed"), (5, "handle is a int")):
            handle = ep.dispatch(*tokens)
            if ep.rank == REFUSER:
                with pytest.raises((TypeError, RuntimeError), match=words):
                    ep.experts(wrong, *weights)
            else:
                refused(lambda handle=handle: ep.experts(handle, *weights), ep)
            group.all_gather(None)
            ep.experts(handle, *weights)
        foreign.release()
        group.all_gather(None)


def test_wrong_handles(session_seed):
    run(with_wrong_handles, session_seed)


@pytest.mark.parametrize(
    ("dtype", "intermediate", "words"),
    [(torch.float32, 80, "float32"), (torch.bfloat16, 40, "intermediate=40 is not a multiple of 16")],
)
def test_fused_where_the_kernels_cannot(dtype, intermediate, words, session_seed):
    on_device.run(1, run_fused_in_vain, dtype, intermediate, words, session_seed)


def run_fused_in_vain(group, dtype, intermediate, words, seed):
    with make_ep(group, dtype) as ep:
        weights = own_part(ep, make_weights(ep.num_experts, dtype, seed, intermediate))
        with pytest.raises(ValueError, match=rf"fused=True, but .*{words}.* rank 0"):
            moe_a2a.MoELayer(ep, *weights, fused=True)
        handle = ep.dispatch(*on(ep, make_tokens(ep, "random", seed)))
        with pytest.raises(ValueError, match=rf"fused=True, but .*{words}.* rank 0"):
            ep.experts(handle, *weights, fused=True)
        ep.experts(handle, *weights)


def run_float8_in_vain(group, seed):
    with make_ep(group) as ep:
        given = float8(*own_part(ep, make_weights(ep.num_experts, ep.dtype, seed)))
        handle = ep.dispatch(*on(ep, make_tokens(ep, "random", seed)))
        with pytest.raises(ValueError, match=r'fused=True, but rows are torch.bfloat16 .*quantize="fp8".* rank 0'):
            ep.experts(handle, *given, fused=True)
        ep.experts(handle, *given)


def test_float8_weights_and_other_rows(session_seed):
    on_device.run(1, run_float8_in_vain, session_seed)


FAILURES = [MemoryError("no memory"), KeyboardInterrupt(), RuntimeError("CUDA out of memory")]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_experts_that_fail_between_dispatch_and_combine(error, monkeypatch, session_seed):
    if on_device.RANKS_ARE_PROCESSES:
        pytest.skip("patches the ranks' own package")
    run_and_combine = moe_a2a.experts.run_and_combine

    def failing(handle, *args, **options):
        if handle.ep.rank == REFUSER and handle.ep.fails:
            raise error
        return run_and_combine(handle, *args, **options)

    monkeypatch.setattr(moe_a2a.experts, "run_and_combine", failing)

    def program(ep, group, weights, tokens):
        layer = moe_a2a.MoELayer(ep, *weights)
        for _ in range(4):  # more often than there are buffers
            ep.fails = True
            if ep.rank == REFUSER:
                with pytest.raises(type(error)):
                    layer(*tokens)
            else:
                refused(lambda: layer(*tokens), ep)
            ep.fails = False

    run(program, session_seed)
