"""The top-level package deep_ep of compat/, as its callers find it: installed, and under Megatron-Core's MoE.

CI has no Megatron-Core. To run these tests: pip install --no-deps megatron-core (0.19 imports Triton).
"""

import subprocess
import sys
from pathlib import Path

import on_device
import pytest
import ranks
import torch

pytestmark = on_device.TESTS

SOURCE = Path(__file__).parents[2] / "compat" / "deep_ep"
SEED = 20261123
NO_MEGATRON = "megatron-core is not a test dependency: pip install megatron-core"


@on_device.cpu_only
def test_it_is_found_by_its_name(tmp_path):
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed: make setup")
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--no-compile"]
    subprocess.run([*install, "--target", str(tmp_path), str(SOURCE)], check=True, timeout=120)
    found = [
        "import sys, importlib.util; sys.path.insert(0, sys.argv[1])",
        "assert importlib.util.find_spec('deep_ep').origin.startswith(sys.argv[1])",
        "import deep_ep, deep_ep.utils, moe_a2a.integrations.deep_ep as ours",
        "assert {getattr(deep_ep, name) is getattr(ours, name) for name in ours.__all__} == {True}",
        "assert deep_ep.__all__ == ours.__all__ and deep_ep.utils.EventOverlap is deep_ep.EventOverlap",
        "from deep_ep.hybrid_ep_buffer import HybridEPBuffer, indices_to_map",
        "assert HybridEPBuffer is deep_ep.HybridEPBuffer",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(found), str(tmp_path)], check=True, timeout=120)


def a_batch(rank, num_experts):
    """x, ids, probs, and the factor of each expert."""
    generator = torch.Generator().manual_seed(SEED + rank)
    num_tokens = 20 + 5 * rank
    idx = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(num_tokens)])
    x, probs = torch.randn(num_tokens, 64, generator=generator), torch.rand(num_tokens, 2, generator=generator)
    factors = 1 + torch.arange(num_experts) / num_experts
    x, idx, probs, factors = (tensor.to(on_device.NAME) for tensor in (x, idx, probs, factors))
    return x.requires_grad_(), idx, probs.requires_grad_(), factors


def check_two_layers(rows, x, idx, probs, scales):
    """Outputs and gradients are those of two layers with all experts here."""
    rows.square().sum().backward()
    want_x, want_probs = x.detach().clone().requires_grad_(), probs.detach().clone().requires_grad_()
    want = want_x
    for _ in range(2):
        want = want * (want_probs * scales[idx]).sum(1, keepdim=True)
    want.square().sum().backward()
    for got, wanted in ((rows, want), (x.grad, want_x.grad), (probs.grad, want_probs.grad)):
        torch.testing.assert_close(got, wanted)


def megatron(group):
    """Two layers of Megatron's FusedDispatch and FusedCombine."""
    sys.path.insert(0, str(SOURCE))
    from megatron.core.transformer.moe import fused_a2a

    assert fused_a2a.HAVE_DEEP_EP
    num_local, num_experts = 4, 4 * group.size()
    x, idx, probs, scales = a_batch(group.rank(), num_experts)
    rows = x
    for _ in range(2):
        recv, recv_idx, recv_probs, counts, handle = fused_a2a.fused_dispatch(
            rows, idx, probs, num_experts, group, async_finish=True
        )
        assert counts.tolist() == [int((recv_idx == e).sum()) for e in range(num_local)]
        factors = (recv_probs * scales[recv_idx + group.rank() * num_local]).masked_fill(recv_idx < 0, 0)
        rows, _ = fused_a2a.fused_combine(recv * factors.sum(1, keepdim=True), group, handle, async_finish=True)
    check_two_layers(rows, x, idx, probs, scales)
    fused_a2a._buffer.destroy()


def megatron_hybrid(group, pad_multiple, num_permuted_tokens):
    """Two layers of Megatron's HybridEPDispatch and HybridEPCombine."""
    sys.path.insert(0, str(SOURCE))
    from deep_ep.hybrid_ep_buffer import indices_to_map
    from megatron.core.transformer.moe import fused_a2a

    assert fused_a2a.HAVE_HYBRIDEP
    num_local, num_experts = 4, 4 * group.size()
    x, idx, probs, scales = a_batch(group.rank(), num_experts)
    routing_map, _ = indices_to_map(idx, None, len(idx), num_experts)
    rows, local_scales = x, scales[group.rank() * num_local :][:num_local]
    sizes = {"num_permuted_tokens": num_permuted_tokens, "pad_multiple": pad_multiple}
    for _ in range(2):
        dense = probs.new_zeros(len(idx), num_experts).scatter(1, idx, probs)
        recv, recv_probs, _, tokens, handle = fused_a2a.hybrid_ep_dispatch(
            rows, routing_map, dense, group, num_local, **sizes
        )
        factors = local_scales.new_zeros(len(recv))
        factors[: int(tokens.sum())] = local_scales.repeat_interleave(tokens.to(factors.device))
        assert handle[-1].tolist() == [0]
        sizes_back = {**sizes, "num_permuted_tokens": num_permuted_tokens or tokens.sum()}
        rows = fused_a2a.hybrid_ep_combine(recv * (recv_probs * factors)[:, None], handle, **sizes_back)
    check_two_layers(rows, x, idx, probs, scales)
    fused_a2a._hybrid_ep_buffer.destroy()


def test_megatron_core():
    pytest.importorskip("megatron.core", reason=NO_MEGATRON)
    print(f"seed {SEED}")
    ranks.run_processes(2, megatron)


@pytest.mark.parametrize(("pad_multiple", "num_permuted_tokens"), [(None, None), (16, None), (16, 256)])
def test_megatron_core_hybrid_ep(pad_multiple, num_permuted_tokens):
    pytest.importorskip("megatron.core", reason=NO_MEGATRON)
    print(f"seed {SEED}")
    ranks.run_processes(2, megatron_hybrid, pad_multiple, num_permuted_tokens)
