"""Collectives.capabilities() is accurate: everything it lists works, and everything else is refused."""

import inspect

import on_device
import pytest
import torch
from on_device import run

import moe_a2a
from moe_a2a import capabilities

pytestmark = on_device.TESTS


def listed_program(group) -> None:
    with moe_a2a.Collectives(group, symmetric_nbytes=8192, timeout=20) as coll:
        can = coll.capabilities()
        assert (can.device, can.num_ranks) == (str(coll.device), coll.num_ranks)
        for name, arguments in can.collectives.items():
            assert set(arguments) <= set(inspect.signature(getattr(coll, name)).parameters)
        for name in can.dtypes:
            x = torch.ones(64 * coll.num_ranks, dtype=getattr(torch, name), device=coll.device)
            direct = coll.empty(x.shape, dtype=x.dtype)
            for op in can.operators:
                expected = coll.num_ranks if op == "sum" else 1
                for algorithm in can.algorithms:
                    one, out = (direct.copy_(x), direct) if algorithm == "direct" else (x, None)
                    assert (coll.all_reduce(one, op, algorithm, out=out) == expected).all()
                assert (coll.reduce_scatter(x, op) == expected).all()
            for codec, bound in can.max_errors.items():
                total = coll.all_reduce(x, codec=codec)
                assert ((total - coll.num_ranks).abs() <= bound * coll.num_ranks).all()
            assert len(coll.all_gather(x)) == coll.num_ranks * len(x)
        others = {torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
        for dtype in others:
            with pytest.raises(TypeError, match=f"x has dtype {dtype} on rank"):
                coll.all_reduce(torch.ones(8, device=coll.device).to(dtype))
        for in_network in (can.multicast, can.sharp):
            assert not in_network.used and in_network.reason and "one_shot and two_shot" in in_network.fallback
        assert not can.sharp.supported and (coll.device.type == "cuda" or not can.multicast.supported)
    with pytest.raises(RuntimeError, match="closed"):
        coll.capabilities()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_listed_works_and_the_rest_is_refused(num_ranks):
    run(num_ranks, listed_program)


@on_device.cpu_only
@pytest.mark.parametrize(
    ("answer", "supported", "reason"),
    [
        (None, False, "the CUDA driver could not be queried"),
        (False, False, "this GPU has no multicast objects"),
        (True, True, "no kernel here uses it"),
    ],
)
def test_each_answer_of_the_driver(monkeypatch, answer, supported, reason):
    monkeypatch.setattr(capabilities, "_driver_says", lambda index: answer)
    monkeypatch.setattr(torch.version, "hip", None)
    said = capabilities.multicast(torch.device("cuda", 0))
    assert said.supported == supported and not said.used and reason in said.reason
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "AMD GPUs have no switch" in capabilities.multicast(torch.device("cuda", 0)).reason


@on_device.gpu_only
def test_the_driver_answers():
    assert capabilities._driver_says(0) in (True, False)
