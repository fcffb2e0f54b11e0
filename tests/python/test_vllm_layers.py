"""prepare() and finalize() of the vLLM plugin, without vLLM: what they import of it is replaced. test_vllm.py runs vLLM itself."""

import importlib
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import ranks
import torch

import moe_a2a

pytestmark = pytest.mark.cpu

LAYERS = "vllm.model_executor.layers.fused_moe"
OURS = "moe_a2a.integrations.vllm.prepare_finalize"
EXPERTS, TOPK, HIDDEN, MOST = 6, 2, 32, 8


@pytest.fixture
def layers(monkeypatch):
    """The module of the plugin."""
    reductions = ("TopKWeightAndReduceContiguous", "TopKWeightAndReduceDelegate")
    kernel = {"FusedMoEPrepareAndFinalizeModular": object, "ExpertTokensMetadata": SimpleNamespace}
    found = {
        LAYERS: {},
        f"{LAYERS}.modular_kernel": kernel,
        f"{LAYERS}.topk_weight_and_reduce": {name: type(name, (), {}) for name in reductions},
        f"{LAYERS}.utils": {"moe_kernel_quantize_input": None},
        "vllm.distributed": {"get_ep_group": None},
        "vllm.forward_context": {"get_forward_context": None, "is_forward_context_available": lambda: False},
        "vllm.platforms": {"current_platform": None},
    }
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", *found):
        module = ModuleType(name)
        vars(module).update(found.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    yield importlib.import_module(OURS)
    del sys.modules[OURS]


def run_experts(rows, ids, weights, mine):
    """Expert e multiplies by 1 + e. Weights count, and experts of other ranks do not."""
    factors = torch.where((ids >= mine.start) & (ids < mine.stop), (1.0 + ids) * weights, 0)
    return torch.where(factors.any(1, keepdim=True), rows * factors.sum(1, keepdim=True), 0)


def test_the_cpu_needs_eager_mode(layers, monkeypatch):
    """Regression: torch.compile stopped within the plugin, with an error about a ProcessGroup."""
    monkeypatch.setattr(layers, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    for is_eager in (True, False):
        assert type(layers.make(2, MOST, True, is_eager)) is layers.PrepareRows
    monkeypatch.setattr(layers, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    assert type(layers.make(2, MOST, True, True)) is layers.PrepareRoutes
    with pytest.raises(ValueError, match="pass --enforce-eager"):
        layers.make(2, MOST, True, False)


@pytest.mark.parametrize("kind", ["PrepareRows", "PrepareRoutes"])
def test_groups_in_turn(layers, monkeypatch, kind):
    """Regression: a group got the memory of an earlier one with layers of the same shape."""
    generator = torch.Generator().manual_seed(20261124)
    x = torch.randint(-4, 5, (5, HIDDEN), generator=generator).float()
    ids = torch.rand(5, EXPERTS, generator=generator).topk(TOPK).indices.to(torch.int32)
    weights = torch.randint(1, 5, (5, TOPK), generator=generator) / 4
    unquantized = SimpleNamespace(quant_dtype=None)
    apart = SimpleNamespace(apply=lambda fused_expert_output, **_: fused_expert_output)
    here = threading.local()
    monkeypatch.setattr(layers, "get_ep_group", lambda: SimpleNamespace(cpu_group=here.group))

    def program(group):
        here.group = group
        layer = getattr(layers, kind)(group.num_ranks, MOST, False)
        rows, _, _, to, by = layer.prepare(x, weights, ids, EXPERTS, None, False, unquantized)
        num_local = EXPERTS // group.num_ranks
        first = group.rank * num_local
        if kind == "PrepareRoutes":
            to = to + first  # local ids
        out = torch.empty_like(x)
        layer.finalize(out, run_experts(rows, to, by, range(first, first + num_local)), by, to, False, apart)
        return out

    expected = x * ((1 + ids) * weights).sum(1, keepdim=True)
    for num_ranks in (1, 2):
        for result in ranks.run_threads(num_ranks, program):
            torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("kind", ["PrepareRows", "PrepareRoutes"])
def test_sums_are_whole(layers, kind):
    """Regression: finalize() said that its sums were parts. Tensor-parallel ranks send the same tokens, and vLLM added the sums of all
    of them: twice the result on two ranks."""
    assert getattr(layers, kind)(2, MOST, False).output_is_reduced()


@pytest.mark.parametrize("most", [8, 1000, 3000])
def test_small_batches_get_few_rows(layers, monkeypatch, most):
    """Regression: experts got R * max_num_batched_tokens rows for any batch, 65,536 of them when 8 ranks decode a token each."""
    seed = 20261127
    print(f"seed {seed}")
    here = threading.local()
    monkeypatch.setattr(layers, "get_ep_group", lambda: SimpleNamespace(cpu_group=here.group))
    monkeypatch.setattr(layers, "is_forward_context_available", lambda: hasattr(here, "context"))
    monkeypatch.setattr(layers, "get_forward_context", lambda: here.context)
    unquantized = SimpleNamespace(quant_dtype=None)
    apart = SimpleNamespace(apply=lambda fused_expert_output, **_: fused_expert_output)
    batches = [(most, most), (0, 1), (most // 2, 3), (64, 65), (7, most), (1, 0)]  # tokens of the two ranks

    def program(group):
        here.group = group
        layer = layers.PrepareRows(2, most, True)
        num_local = EXPERTS // 2
        for call, sizes in enumerate(tuple(min(size, most) for size in both) for both in batches):
            here.context = SimpleNamespace(
                dp_metadata=SimpleNamespace(local_sizes=None, num_tokens_across_dp_cpu=torch.tensor(sizes))
            )
            generator = torch.Generator().manual_seed(seed + 10 * call + group.rank)
            x = torch.randint(-4, 5, (sizes[group.rank], HIDDEN), generator=generator).float()
            ids = torch.rand(len(x), EXPERTS, generator=generator).topk(TOPK).indices
            weights = torch.randint(1, 5, (len(x), TOPK), generator=generator) / 4
            rows, _, _, to, by = layer.prepare(x, weights, ids, EXPERTS, None, False, unquantized)
            bound = min(most, max(64, 1 << (max(sizes) - 1).bit_length()))
            is_packed = max(sizes) >= 1024 and sum(sizes) <= 0.75 * 2 * bound
            assert is_packed == (most == 3000 and call in (2, 4))
            assert len(rows) == (sum(sizes) if is_packed else 2 * bound)
            out = torch.empty_like(x)
            mine = range(group.rank * num_local, (group.rank + 1) * num_local)
            layer.finalize(out, run_experts(rows, to, by, mine), by, to, False, apart)
            torch.testing.assert_close(out, x * ((1 + ids) * weights).sum(1, keepdim=True))
        del here.context
        rows, *_ = layer.prepare(x[:0], weights[:0], ids[:0], EXPERTS, None, False, unquantized)
        assert len(rows) == 2 * most  # nothing says how many tokens the other has
        layer.finalize(x[:0], torch.zeros_like(rows), None, None, False, apart)

    ranks.run_threads(2, program)


def quantized(rows, a_scale, *, quant_dtype, block_shape, scale_dtype=torch.float32, **how):
    """As vLLM's quantisation by blocks."""
    assert a_scale is None and how == {"per_act_token_quant": False, "is_scale_swizzled": True, "mx_alignment": 0}
    blocks = rows.float().unflatten(1, (-1, block_shape[1]))
    scales = blocks.abs().amax(2).clamp(min=1e-10) / 448
    return (blocks / scales[:, :, None]).flatten(1).to(quant_dtype), scales.to(scale_dtype)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("block", "scale_dtype"), [(128, torch.float32), (64, torch.float32), (128, torch.float16)])
def test_float8_rows_are_sent_as_quantised(layers, monkeypatch, block, scale_dtype, is_packed):
    """With scales that dispatch() takes; with others they are quantised on arrival. The experts get the same either way."""
    seed = 20261128
    print(f"seed {seed}")
    if is_packed:
        monkeypatch.setattr(layers, "LEAST_TOKENS_PACKED", 1)
    here = threading.local()
    monkeypatch.setattr(layers, "get_ep_group", lambda: SimpleNamespace(cpu_group=here.group))
    monkeypatch.setattr(
        layers,
        "moe_kernel_quantize_input",
        lambda rows, scale, **how: quantized(rows, scale, **how, scale_dtype=scale_dtype),
    )
    config = SimpleNamespace(
        quant_dtype=torch.float8_e4m3fn,
        use_nvfp4_w4a4=False,
        a1_scale=None,
        per_act_token_quant=False,
        block_shape=[128, block],
        is_scale_swizzled=True,
        mx_alignment=0,
    )
    apart = SimpleNamespace(apply=lambda fused_expert_output, **_: fused_expert_output)
    all_x = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
    ids = torch.tensor([[0, 5], [3, 4], [1, 2], [5, 0], [2, 1]], dtype=torch.int32)
    weights = torch.ones(5, TOPK)

    def program(group):
        here.group = group
        layer = layers.PrepareRows(2, MOST, False)
        rows, scales, _, to, by = layer.prepare(all_x[group.rank], weights, ids, EXPERTS, None, False, config)
        assert layer._handle.row_dtype == (
            torch.float8_e4m3fn if (block, scale_dtype) == (128, torch.float32) else torch.bfloat16
        )
        assert rows.is_contiguous() and scales.is_contiguous() and scales.dtype == scale_dtype
        assert len(rows) == (2 * 5 if is_packed else 2 * MOST)
        places = [MOST * rank + token for rank in range(2) for token in range(5)]
        first = group.rank * (EXPERTS // 2)
        if is_packed:  # every rank's tokens are the same: three of five chose an expert here
            arrived = ((ids >= first) & (ids < first + EXPERTS // 2)).any(dim=1).tolist() * 2
            places = [sum(arrived[:i]) if arrived[i] else -1 for i in range(10)]
        for rank in range(2):
            expected = layers.moe_kernel_quantize_input(
                all_x[rank],
                None,
                quant_dtype=torch.float8_e4m3fn,
                block_shape=[128, block],
                per_act_token_quant=False,
                is_scale_swizzled=True,
                mx_alignment=0,
            )
            for token in range(5):
                place = places[5 * rank + token]
                if place < 0 or not (by[place] > 0).any():
                    continue
                assert torch.equal(rows[place].float(), expected[0][token].float())
                assert torch.equal(scales[place], expected[1][token])
        out = torch.empty_like(all_x[group.rank])
        y = torch.where((by > 0).any(1, keepdim=True), by.sum(1, keepdim=True), 0).to(torch.bfloat16).expand(-1, 256)
        layer.finalize(out, y.contiguous(), by, to, False, apart)
        assert (out == TOPK).all()

    ranks.run_threads(2, program)


@pytest.mark.parametrize("kind", ["PrepareRows", "PrepareRoutes"])
@pytest.mark.parametrize("swizzled", [True, False])
def test_scales_are_laid_out_as_the_experts_take_them(layers, monkeypatch, kind, swizzled):
    """Regression: those of NVFP4 and MXFP8 rows were always swizzled. Kernels that read them as a plain matrix got wrong ones."""
    monkeypatch.setattr(layers, "get_ep_group", lambda: SimpleNamespace(cpu_group=moe_a2a.thread_group(1)[0]))
    wanted = []

    def quantise(rows, scale, *, is_scale_swizzled, **how):
        wanted.append(is_scale_swizzled)
        return rows, torch.ones(len(rows), HIDDEN // 32, dtype=torch.uint8)

    monkeypatch.setattr(layers, "moe_kernel_quantize_input", quantise)
    sizes = {"per_act_token_quant": False, "block_shape": [1, 32], "mx_alignment": 0, "is_scale_swizzled": swizzled}
    config = SimpleNamespace(quant_dtype="mxfp8", use_nvfp4_w4a4=False, a1_scale=None, **sizes)
    layer = getattr(layers, kind)(1, MOST, False)
    layer.prepare(torch.ones(2, HIDDEN), torch.ones(2, TOPK), torch.tensor([[0, 5]] * 2), EXPERTS, None, False, config)
    assert wanted == [swizzled]


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan", "1e10"])
def test_a_timeout_that_is_none_is_refused(layers, monkeypatch, value):
    """Regression: "could not convert string to float", which named no variable."""
    monkeypatch.setenv("MOE_A2A_VLLM_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"MOE_A2A_VLLM_TIMEOUT is '{value}'; set it to a number of seconds"):
        importlib.reload(layers)


@pytest.mark.parametrize("kind", ["PrepareRows", "PrepareRoutes"])
@pytest.mark.parametrize("point", ["before the dispatch", "after the dispatch", "before the combine", "in the combine"])
def test_what_fails_on_one_rank_is_refused_on_the_other(layers, monkeypatch, kind, point):
    """Regression: the other rank waited until the deadline."""
    own_error, words = torch.OutOfMemoryError, f"no memory left {point}"
    if point == "in the combine":
        own_error, words = ValueError, "y has shape"
    here = threading.local()
    monkeypatch.setattr(layers, "get_ep_group", lambda: SimpleNamespace(cpu_group=here.group))
    monkeypatch.setattr(layers, "TIMEOUT_SECONDS", ranks.slack(10))

    def fail_at(this_point):
        if here.fails and this_point == point:
            raise torch.OutOfMemoryError(f"no memory left {point}")

    def to_send(layer, x, quant_config):
        fail_at("before the dispatch")
        return x, None

    def quantise(rows, scale, **how):
        fail_at("after the dispatch")
        return rows, torch.ones(len(rows), 1)

    def apply(fused_expert_output, **_):
        fail_at("before the combine")
        return fused_expert_output[:, 1:] if here.fails else fused_expert_output

    monkeypatch.setattr(layers.PrepareAndFinalize, "_to_send", to_send)
    monkeypatch.setattr(layers.PrepareRows, "_to_send", to_send)
    monkeypatch.setattr(layers, "moe_kernel_quantize_input", quantise)
    per_token = SimpleNamespace(
        quant_dtype=torch.int8, use_nvfp4_w4a4=False, a1_scale=None, per_act_token_quant=True, block_shape=None
    )
    per_token.mx_alignment, per_token.is_scale_swizzled = 0, True
    x, ids, weights = torch.ones(5, HIDDEN), torch.tensor([[0, 5]] * 5), torch.ones(5, TOPK)

    def program(group):
        here.group, here.fails = group, False
        kept = []  # tracebacks, which hold on to the handles
        layer = getattr(layers, kind)(2, MOST, False)

        def call():
            rows, *_ = layer.prepare(x, weights, ids, EXPERTS, None, False, per_token)
            out = torch.empty_like(x)
            layer.finalize(out, torch.ones_like(rows), None, None, False, SimpleNamespace(apply=apply))
            return out

        for fails in (False, True, True, True):  # more often than there are buffers
            here.fails = fails and group.rank == 0
            if not fails:
                assert (call() == 2).all()
                continue
            with pytest.raises(own_error if group.rank == 0 else moe_a2a.PeerRefusedError, match=words) as raised:
                call()
            kept.append(raised)
        here.fails = False
        assert (call() == 2).all()

    ranks.run_threads(2, program)
