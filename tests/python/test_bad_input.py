"""Every argument that can be wrong: the exception states value, limit, rank and what to change.

Nothing is launched, so the object stays usable: a good call follows every bad one. If only one
rank's call is bad, the others do not wait for it: they raise PeerRefusedError with its text.
For GPUs, test_bad_routing_on_device.py covers errors that only the CPU target sees before a launch.
"""

import time

import on_device
import pytest
import torch
from small_calls import expected_output, experts, good_call, make_inputs

import moe_a2a

pytestmark = on_device.TESTS

CONFIG = {
    "num_experts": 12, "num_topk": 2, "hidden": 200, "num_max_tokens_per_rank": 6,
    "dtype": torch.float32, "timeout": 30,
}  # fmt: skip
E4M3 = torch.float8_e4m3fn


def some(shape, dtype=torch.float32):
    return torch.zeros(shape).to(dtype)


def strided(shape):
    """The values of a contiguous tensor of this shape, with other strides."""
    return torch.zeros(*reversed(shape)).t()


def ids(*values, dtype=torch.int64):
    return torch.tensor([list(values)] * 5, dtype=dtype)


# Replacements in a good dispatch of 5 tokens: x [5, 200], topk_idx [5, 2], topk_weights [5, 2]. Each entry:
# the replaced arguments, the exception, and words that its text must contain besides the rank.
BAD_DISPATCH = {
    "x is a list": ({"x": [1.0]}, TypeError, ["x"]),
    "x float64": ({"x": some((5, 200), torch.float64)}, TypeError, ["x", "float32"]),
    "x bfloat16": ({"x": some((5, 200), torch.bfloat16)}, TypeError, ["x", "ep.dtype"]),
    "x int32": ({"x": some((5, 200), torch.int32)}, TypeError, ["x"]),
    "x other hidden": ({"x": some((5, 199))}, ValueError, ["x", "[5, 199]", "hidden=200"]),
    "x 1-dimensional": ({"x": some((200,))}, ValueError, ["x", "[200]", "hidden=200"]),
    "x 3-dimensional": ({"x": some((1, 5, 200))}, ValueError, ["x", "[1, 5, 200]"]),
    "x columns strided": ({"x": strided((5, 200))}, ValueError, ["x", "stride 5", "contiguous"]),
    "x needs grad": ({"x": some((5, 200)).requires_grad_()}, ValueError, ["x", "detach"]),
    "x on meta": ({"x": some((5, 200)).to("meta")}, ValueError, ["x", "meta", on_device.NAME]),
    "too many tokens": (
        {"x": some((7, 200)), "topk_idx": ids(0, 1)[[0] * 7], "topk_weights": some((7, 2))},
        ValueError,
        ["num_tokens=7", "num_max_tokens_per_rank=6", "num_max_tokens_per_rank=7"],
    ),
    "topk_idx missing": ({"topk_idx": None, "topk_weights": None}, ValueError, ["topk_idx"]),
    "topk_idx float": ({"topk_idx": some((5, 2))}, TypeError, ["topk_idx", "torch.float32", "int32"]),
    "topk_idx int16": ({"topk_idx": ids(0, 1, dtype=torch.int16)}, TypeError, ["topk_idx", "torch.int16"]),
    "topk_idx too few rows": ({"topk_idx": ids(0, 1)[:4]}, ValueError, ["topk_idx", "[4, 2]", "[5, 2]"]),
    "topk_idx other top-k": ({"topk_idx": ids(0, 1, 2)}, ValueError, ["topk_idx", "[5, 3]", "[5, 2]"]),
    "topk_idx strided": ({"topk_idx": strided((5, 2)).long()}, ValueError, ["topk_idx", "contiguous"]),
    "topk_idx too large": ({"topk_idx": ids(0, 12)}, ValueError, ["topk_idx[0, 1]=12", "num_experts=12"]),
    "topk_idx -2": ({"topk_idx": ids(-1, -2)}, ValueError, ["topk_idx[0, 1]=-2", "num_experts=12"]),
    "topk_idx 2**32": ({"topk_idx": ids(2**32, 0)}, ValueError, ["topk_idx[0, 0]=4294967296"]),
    "topk_weights float64": ({"topk_weights": some((5, 2), torch.float64)}, TypeError, ["topk_weights", "torch.float64"]),
    "topk_weights shape": ({"topk_weights": some((5, 1))}, ValueError, ["topk_weights", "[5, 1]", "[5, 2]"]),
    "topk_weights strided": ({"topk_weights": strided((5, 2))}, ValueError, ["topk_weights", "contiguous"]),
    "topk_weights on meta": ({"topk_weights": some((5, 2)).to("meta")}, ValueError, ["topk_weights", "meta"]),
    "quantize unknown": ({"quantize": "int4"}, ValueError, ["quantize='int4'", "fp8"]),
    "quantize of fp8": (
        {"x": some((5, 200), E4M3), "x_scales": some((5, 2)), "quantize": "fp8"},
        ValueError,
        ["quantize", "float8"],
    ),
    "scales missing": ({"x": some((5, 200), E4M3)}, ValueError, ["x_scales", "None"]),
    "scales of plain rows": ({"x_scales": some((5, 2))}, ValueError, ["x_scales", "float8"]),
    "scales shape": (
        {"x": some((5, 200), E4M3), "x_scales": some((5, 1))},
        ValueError,
        ["x_scales", "[5, 1]", "[5, 2]"],
    ),
    "scales float64": (
        {"x": some((5, 200), E4M3), "x_scales": some((5, 2), torch.float64)},
        TypeError,
        ["x_scales", "torch.float64", "float32"],
    ),
    "layout unknown": ({"layout": "sorted"}, ValueError, ["layout", "sorted", "expert_major"]),
    "alignment 0": (
        {"layout": "expert_major", "expert_alignment": 0},
        ValueError,
        ["expert_alignment=0", "256"],
    ),
    "alignment 257": (
        {"layout": "expert_major", "expert_alignment": 257},
        ValueError,
        ["expert_alignment=257", "256"],
    ),
    "alignment of rows": ({"expert_alignment": 8}, ValueError, ["expert_alignment=8", "rows"]),
}  # fmt: skip

SEEN_BY_THE_KERNELS = {"topk_idx too large", "topk_idx -2", "topk_idx 2**32", "y too few rows"}
if on_device.IS_GPU:
    BAD_DISPATCH = {name: bad for name, bad in BAD_DISPATCH.items() if name not in SEEN_BY_THE_KERNELS}

# The same for combine; good: y [capacity, 200] in the layout "rows".
BAD_COMBINE = {
    "y is None": (lambda y: None, {}, TypeError, ["y"]),
    "y bfloat16": (lambda y: y.bfloat16(), {}, TypeError, ["y", "ep.dtype"]),
    "y float64": (lambda y: y.double(), {}, TypeError, ["y"]),
    "y other hidden": (lambda y: y[:, :199], {}, ValueError, ["y", "199]", "hidden=200"]),
    "y 1-dimensional": (lambda y: y[0], {}, ValueError, ["y", "[200]"]),
    "y columns strided": (lambda y: y.t().contiguous().t(), {}, ValueError, ["y", "stride"]),
    "y needs grad": (lambda y: y.clone().requires_grad_(), {}, ValueError, ["y", "detach"]),
    "y on meta": (lambda y: y.to("meta"), {}, ValueError, ["y", "meta", on_device.NAME]),
    "y too few rows": (lambda y: y[:1], {}, ValueError, ["y", "1 rows", "expert_offsets[-1]="]),
    "y presummed, rows": (lambda y: y[:2], {"presummed": True}, ValueError, ["y", "[2, 200]"]),
    "out shape": (lambda y: y, {"out": some((4, 200))}, ValueError, ["out", "[4, 200]", "[5, 200]"]),
    "out dtype": (lambda y: y, {"out": some((5, 200), torch.float16)}, TypeError, ["out", "torch.float16"]),
    "out strided": (lambda y: y, {"out": strided((5, 200))}, ValueError, ["out", "contiguous"]),
    "out on meta": (lambda y: y, {"out": some((5, 200)).to("meta")}, ValueError, ["out", "meta"]),
}  # fmt: skip


if on_device.IS_GPU:
    BAD_COMBINE = {name: bad for name, bad in BAD_COMBINE.items() if name not in SEEN_BY_THE_KERNELS}


def on(device, arguments):
    """Moves the tensors to the device, unless they are meant to be elsewhere."""
    moves = {name: value for name, value in arguments.items() if getattr(value, "is_cpu", False)}
    return {**arguments, **{name: value.to(device) for name, value in moves.items()}}


def bad_dispatch(ep, replaced):
    x, topk_idx, topk_weights = make_inputs(ep)
    arguments = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, **replaced}
    return ep.dispatch(**on(ep.device, arguments))


def check_words(raised, rank, words):
    text = str(raised.value)
    for word in [*words, f"rank {rank}"]:
        assert word in text, f"{word!r} is not in {text!r}"


@pytest.mark.parametrize("name", BAD_DISPATCH)
def test_dispatch_of_a_single_rank(name):
    replaced, exception, words = BAD_DISPATCH[name]

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            for _ in range(3):  # more often than there are buffers
                with pytest.raises(exception) as raised:
                    bad_dispatch(ep, replaced)
                check_words(raised, 0, words)
            good_call(ep)

    on_device.run(1, program)


@pytest.mark.parametrize("name", BAD_DISPATCH)
def test_dispatch_refused_by_one_of_three(name):
    replaced, exception, words = BAD_DISPATCH[name]

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            for _ in range(3):
                start = time.monotonic()
                if ep.rank == 1:
                    with pytest.raises(exception) as raised:
                        bad_dispatch(ep, replaced)
                    check_words(raised, 1, words)
                else:
                    with pytest.raises(moe_a2a.PeerRefusedError) as raised:
                        on_device.dispatch(ep, *make_inputs(ep))
                    assert raised.value.peer == 1
                    check_words(raised, 1, words)
                assert time.monotonic() - start < CONFIG["timeout"] / 2  # nobody waited until a deadline
            good_call(ep)

    on_device.run(3, program)


@pytest.mark.parametrize("name", BAD_COMBINE)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_combine_refused_by_the_last_rank(name, num_ranks):
    """After a refused combine all ranks, whose handles stay open, retry with good arguments."""
    make_bad, options, exception, words = BAD_COMBINE[name]
    refuser = num_ranks - 1

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            handle = ep.dispatch(*make_inputs(ep))
            y = experts(handle)
            start = time.monotonic()
            if ep.rank == refuser:
                with pytest.raises(exception) as raised:
                    ep.combine(make_bad(y), handle, **on(ep.device, options))
                check_words(raised, refuser, words)
            elif on_device.IS_GPU or not name.startswith("out"):
                with pytest.raises(moe_a2a.PeerRefusedError) as raised:
                    on_device.combine(ep, y, handle)
                assert raised.value.peer == refuser
                check_words(raised, refuser, words)
            assert time.monotonic() - start < CONFIG["timeout"] / 2  # nobody waited until a deadline
            # If a refusing rank retries at once, its sums may arrive in time and its peers raise nothing.
            group.all_gather(None)
            assert handle.is_open
            assert torch.equal(combined_after_refusal(ep, y, handle), expected_output(ep))
            good_call(ep)

    def combined_after_refusal(ep, y, handle):
        """For peers of a rank with a bad `out`: this is their first attempt, which may still end with its refusal."""
        try:
            return ep.combine(y, handle)
        except moe_a2a.PeerRefusedError as error:
            assert name.startswith("out") and ep.rank != refuser and error.peer == refuser
            return ep.combine(y, handle)

    on_device.run(num_ranks, program)


def test_masked_y_must_have_the_shape_of_expert_x():
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            x, topk_idx, weights = make_inputs(ep)
            handle = ep.dispatch(x, topk_idx, weights, layout="masked")
            for bad in (some((72, 200)), some((12, 5, 200)), some((6, 12, 200)).transpose(0, 1)):
                with pytest.raises(ValueError, match=r"y .*rank 0"):
                    ep.combine(bad.to(ep.device), handle)
            ep.combine(handle.expert_x.clone(), handle)
            good_call(ep)

    on_device.run(1, program)


def test_masked_without_room_for_repeated_experts():
    """Every token names expert 0 twice: 12 routes, 6 positions."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            x, topk_idx = some((6, 200)).to(ep.device), some((6, 2), torch.int32).to(ep.device)
            with pytest.raises(ValueError, match=r"6 routes.*masked.*rank 0.*rows"):
                on_device.dispatch(ep, x, topk_idx, layout="masked").release()
            good_call(ep)

    on_device.run(1, program)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_routing_that_was_changed_in_place(changed):
    """Unchecked, dispatch(handle=) sends the rows along the changed one, without an error."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            x, *routing = make_inputs(ep)
            handle = ep.dispatch(x, *routing)
            ep.combine(experts(handle), handle)
            handle = ep.dispatch(x, handle=handle)
            ep.combine(experts(handle), handle)
            name = ("topk_idx", "topk_weights")[changed]
            if ep.rank == 0:
                routing[changed].add_(0)
                with pytest.raises(
                    ValueError, match=f"{name} of handle has been changed .* rank 0; pass {name}.clone.. to"
                ):
                    ep.dispatch(x, handle=handle)
            else:
                with pytest.raises(moe_a2a.PeerRefusedError, match=f"{name} of handle has been changed"):
                    ep.dispatch(x, handle=handle).release()
                    ep.check()
            group.all_gather(None)
            good_call(ep)

    on_device.run(2, program)


def test_handle_and_routing_together():
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            x, topk_idx, weights = make_inputs(ep)
            handle = ep.dispatch(x, topk_idx, weights)
            with pytest.raises(ValueError, match="handle=.*topk_idx.*rank 0"):
                ep.dispatch(x, topk_idx, weights, handle=handle)
            with pytest.raises(
                ValueError, match="x has 4 rows on rank 0, but the dispatch of handle had 5; pass that many"
            ):
                ep.dispatch(x[:4], handle=handle)  # it named topk_idx, which was not passed
            ep.combine(experts(handle), handle)
            good_call(ep)

    on_device.run(1, program)


BAD_CONSTRUCTION = {
    "num_experts": (5, ValueError, ["num_experts=5", "num_ranks=2", "num_experts=6"]),
    "num_experts 0": (0, ValueError, ["num_experts=0"]),
    "num_topk": (0, ValueError, ["num_topk=0"]),
    "hidden": (0, ValueError, ["hidden=0"]),
    "hidden negative": (-8, ValueError, ["hidden=-8"]),
    "num_max_tokens_per_rank": (0, ValueError, ["num_max_tokens_per_rank=0"]),
    "num_max_tokens_per_rank large": (1 << 21, ValueError, ["num_max_tokens_per_rank=2097152"]),
    "num_buffers": (0, ValueError, ["num_buffers=0"]),
    "num_max_ll_tokens negative": (-1, ValueError, ["num_max_ll_tokens=-1"]),
    "num_max_ll_tokens large": (1 << 20, ValueError, ["num_max_ll_tokens=1048576", "or less"]),
    "timeout": (0.0, ValueError, ["timeout=0"]),
    "timeout negative": (-1.0, ValueError, ["timeout=-1"]),
    "timeout nan": (float("nan"), ValueError, ["timeout=nan"]),
    "dtype": (torch.float64, TypeError, ["dtype", "float32"]),
    "dtype fp8": (E4M3, TypeError, ["dtype", "float8"]),
    "dtype str": ("bfloat16", TypeError, ["dtype"]),
    "device": ("meta", ValueError, ["device", "meta"]),
}


@pytest.mark.parametrize("name", BAD_CONSTRUCTION)
def test_bad_arguments_of_the_constructor(name):
    value, exception, words = BAD_CONSTRUCTION[name]

    def program(group):
        with pytest.raises(exception) as raised:
            moe_a2a.ExpertParallel(group, **{**CONFIG, name.split()[0]: value})
        check_words(raised, group.rank, words)
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            good_call(ep)

    on_device.run(2, program)


@pytest.mark.parametrize("group", [3, "gloo", object()])
def test_something_that_is_no_group(group):
    with pytest.raises((TypeError, ValueError), match="group"):
        moe_a2a.ExpertParallel(group, **CONFIG)


@pytest.mark.parametrize(
    ("num_ranks", "error"), [(0, ValueError), ("2", TypeError), (2.0, TypeError), (True, TypeError)]
)
def test_thread_group_of_nobody(num_ranks, error):
    with pytest.raises(error, match=f"^num_ranks={num_ranks!r} is .*; pass "):
        moe_a2a.thread_group(num_ranks)
    if error is TypeError:
        with pytest.raises(error, match=f"^num_ranks={num_ranks!r} is .*; pass "):
            moe_a2a.HandleExchange(0, num_ranks)


@pytest.mark.parametrize(("rank", "num_ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_handle_exchange_of_no_such_rank(rank, num_ranks):
    with pytest.raises(ValueError, match=r"^(rank|num_ranks)=-?\d is not in \[\d, \d+\]; pass "):
        moe_a2a.HandleExchange(rank, num_ranks)


def test_moe_layer_weights():
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            up, down = some((12, 64, 200)).to(ep.device), some((12, 200, 32)).to(ep.device)
            for bad_up, bad_down, words in (
                (up[:11], down, ["w_gate_up", "[11, 64, 200]", "num_local_experts=12"]),
                (up[:, :, :199], down, ["w_gate_up", "hidden=200"]),
                (up[:, :63], down, ["w_gate_up", "[12, 63, 200]"]),
                (up, down[:, :, :31], ["w_down", "[12, 200, 31]"]),
                (up, down[:11], ["w_down", "[11, 200, 32]"]),
            ):
                with pytest.raises(ValueError) as raised:
                    moe_a2a.MoELayer(ep, bad_up, bad_down)
                check_words(raised, 0, words)

    on_device.run(1, program)


@pytest.mark.parametrize("ep", [None, "communicator"])
def test_moe_layer_of_something_else(ep):
    """Regression: 'NoneType' object has no attribute 'rank'."""

    def program(group):
        with moe_a2a.Communicator(group) as communicator:
            given = communicator if ep == "communicator" else None
            with pytest.raises(TypeError, match=f"ep is a {type(given).__name__}; pass an ExpertParallel"):
                moe_a2a.MoELayer(given, torch.zeros(1, 2, 1), torch.zeros(1, 1, 1))

    on_device.run(1, program)
