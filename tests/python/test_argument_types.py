"""Scalars of wrong types and values: an error names argument, value and rank, and the peers learn of it.

Unchecked, they raise pybind's "incompatible function arguments", up to 12,580 characters without rank or argument, or are
silently accepted: negative, None or True num_blocks, num_blocks="x" in the constructor. timeout=1.85e10 overflows to 0.
device="cpu:0" is accepted and then every CPU tensor refused.
"""

import copy
import pickle

import on_device
import pytest
import torch
from small_calls import CONFIG, expected_output, experts, good_call, make_inputs

import moe_a2a
from moe_a2a import arguments, devices

pytestmark = on_device.TESTS

REFUSED = moe_a2a.PeerRefusedError
NOT_INTS = (None, True, 1.5, "8", [1], torch.tensor([1, 2]), torch.tensor(1))


def cases(name, types, ranges):
    return [(name, value, TypeError) for value in types] + [(name, value, ValueError) for value in ranges]


OF_DISPATCH = [
    *cases("num_blocks", NOT_INTS, (-1, -(2**31), 2**31, 2**70)),
    *cases("expert_alignment", (True, 1.5, "8", torch.tensor(1)), (0, -1, 257, 2**40)),
    *cases("layout", (3, True, torch.zeros(2), b"rows"), ("sorted", "")),
    *cases("quantize", (True, 8, torch.zeros(2)), ("int4", "")),
    *cases("x_scales", (3, [1.0], "fp8"), ()),
    *cases("topk_weights", (3, [1.0]), ()),
    *cases("topk_idx", (3, [[0, 1]]), ()),
]
OF_COMBINE = [
    *cases("num_blocks", NOT_INTS, (-1, 2**31)),
    *cases("presummed", (None, 1, "yes", torch.tensor(True)), ()),
    *cases("out", (3, [1.0], "out"), ()),
    *cases("y", (3, None), ()),
]


def show(value):
    return str(value).replace("\n", "")[:30]


@pytest.mark.parametrize(("name", "value", "exception"), OF_DISPATCH, ids=show)
def test_dispatch_arguments_of_a_wrong_type(name, value, exception):
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            x, topk_idx, weights = make_inputs(ep)
            good = {"topk_idx": topk_idx, "topk_weights": weights}
            if ep.rank == 1:
                with pytest.raises(exception, match=rf"^{name}.* on rank 1; pass ") as raised:
                    ep.dispatch(x, **{**good, name: value})
                assert len(str(raised.value)) < 400
            else:
                with pytest.raises(REFUSED, match=rf"rank 1 refused its call: {name}.* on rank 1; pass "):
                    on_device.dispatch(ep, x, **good)
            good_call(ep)

    on_device.run(2, program)


@pytest.mark.parametrize(("name", "value", "exception"), OF_COMBINE, ids=show)
def test_combine_arguments_of_a_wrong_type(name, value, exception):
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            handle = ep.dispatch(*make_inputs(ep, 3))
            y = experts(handle)
            if ep.rank == 1:
                with pytest.raises(exception, match=rf"^{name}.* on rank 1; pass ") as raised:
                    ep.combine(**{"y": y, "handle": handle, name: value})
                assert len(str(raised.value)) < 400
            else:
                with pytest.raises(REFUSED, match=rf"rank 1 refused its call: {name}.* on rank 1; pass "):
                    on_device.combine(ep, y, handle)
            group.all_gather(None)
            assert torch.equal(ep.combine(y, handle), expected_output(ep, 3))

    on_device.run(2, program)


@pytest.mark.parametrize("call", ["dispatch_recv", "combine_recv", "blocks_for"])
def test_the_other_calls(call):
    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            handle = ep.dispatch_send(*make_inputs(ep))
            if call == "combine_recv":
                ep.combine_send(experts(ep.dispatch_recv(handle)), handle)
            for value in (*NOT_INTS, -1):
                with pytest.raises((TypeError, ValueError), match=r"^num_(blocks|tokens)=.* on rank 0; pass "):
                    ep.blocks_for(value) if call == "blocks_for" else getattr(ep, call)(handle, num_blocks=value)
            handle.release()
            good_call(ep)

    on_device.run(1, program)


BAD_CONSTRUCTION = [
    *cases("num_experts", (64.0, "64", None, True), (2**40,)),
    *cases("num_topk", (2.0, True), (2**31,)),
    *cases("hidden", (64.0, "64", None, torch.tensor(64)), (2**33,)),
    *cases("num_max_tokens_per_rank", (6.0,), (2**40,)),
    *cases("num_buffers", ("2", None), (2**31,)),
    *cases("num_blocks", ("x", None, True, 1.5), (-1, 2**31)),
    *cases("num_max_ll_tokens", ("x", 1.5, True), (2**40,)),
    *cases("launch_table", (5, {}, b"table.json"), ()),
    *cases("timeout", (None, "30", True, [1]), (0, -1.0, float("nan"), float("inf"), 1.85e10, 1e300)),
    *cases("device", (5.5, [1]), ("nonsense", "meta", "cpu:x")),
]


@pytest.mark.parametrize(("name", "value", "exception"), BAD_CONSTRUCTION, ids=show)
def test_constructor_arguments_of_a_wrong_type(name, value, exception):
    def program(group):
        with pytest.raises(exception, match=rf"^{name}.* on rank {group.rank}; pass ") as raised:
            moe_a2a.ExpertParallel(group, **{**CONFIG, name: value})
        assert len(str(raised.value)) < 400

    on_device.run(2, program)


def test_the_longest_timeout_is_long():
    def program(group):
        with moe_a2a.ExpertParallel(group, **{**CONFIG, "timeout": arguments.MAX_TIMEOUT}) as ep:
            good_call(ep)

    on_device.run(2, program)


def test_integers_of_other_kinds():
    pytest.importorskip("numpy")

    def program(group):
        import numpy

        config = {**CONFIG, "num_experts": numpy.int64(12), "timeout": numpy.float32(10)}
        with moe_a2a.ExpertParallel(group, **config) as ep:
            handle = ep.dispatch(*make_inputs(ep), num_blocks=numpy.int32(2))
            assert torch.equal(ep.combine(experts(handle), handle, num_blocks=numpy.int64(1)), expected_output(ep))

    on_device.run(2, program)


@on_device.cpu_only
@pytest.mark.parametrize("name", ["cpu:0", "cpu"])
def test_there_is_one_cpu(name):
    def program(group):
        with moe_a2a.ExpertParallel(group, **{**CONFIG, "device": name}) as ep:
            assert ep.device == torch.device("cpu")
            good_call(ep)

    on_device.run(2, program)


def test_the_cpu_of_the_environment(monkeypatch):
    monkeypatch.setenv("MOE_A2A_DEVICE", "cpu:0")
    assert devices.default_device() == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:x", "0"])
def test_a_device_of_the_environment(monkeypatch, name):
    monkeypatch.setenv("MOE_A2A_DEVICE", name)
    for call in (devices.default_device, devices.default_device_type):
        with pytest.raises(ValueError, match=rf"MOE_A2A_DEVICE is '{name}'; set it to"):
            call()


# ---- copies


def test_objects_and_handles_are_not_copied():
    """Regression: copy.copy(ep).close() closed the original."""

    def program(group):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            handle = ep.dispatch(*make_inputs(ep))
            for original, words in (
                (ep, "ExpertParallel cannot be copied"),
                (handle, "DispatchHandle cannot be copied"),
            ):
                for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                    with pytest.raises(TypeError, match=words):
                        duplicate(original)
            assert torch.equal(ep.combine(experts(handle), handle), expected_output(ep))

    on_device.run(1, program)


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (
            r"x has strides \[48, 1\].*pass x.clone\(\)",
            {"x": torch.zeros(4 * 48 + 1, dtype=torch.bfloat16)[1:].view(4, 48)},
        ),
        ("activation=3 is a int; pass a name or None", {"activation": 3}),
        ("alpha='1' is a str; pass a number", {"alpha": "1"}),
    ],
)
def test_a_product_names_the_argument(words, changed):
    arguments = {
        "x": torch.zeros(4, 48, dtype=torch.bfloat16),
        "row_index": None,
        "expert_offsets": torch.tensor([0, 4], dtype=torch.int32),
        "w": torch.zeros(1, 16, 48, dtype=torch.bfloat16),
    }
    with pytest.raises((TypeError, ValueError), match=words):
        moe_a2a.grouped_gemm(**{**arguments, **changed})
