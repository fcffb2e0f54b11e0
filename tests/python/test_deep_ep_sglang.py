"""SGLang's own DeepEPDispatcher over the package deep_ep of compat/: its two kinds of dispatch and combine, against one process.

CI has no sglang. To run this: pip install sglang==0.5.23, or with --no-deps and then what `import
sglang.srt.layers.moe.token_dispatcher.deepep` asks for. Without a GPU and a server the test answers what SGLang asks of them: the
server's arguments, the number of multiprocessors, the version of CUDA, and whether there are a fabric and DeepGEMM. SGLang quantises the
rows of a prefill in a GPU kernel, so here they are bfloat16.
"""

import sys
from types import SimpleNamespace
from unittest import mock

import deep_ep_cases as cases
import pytest
import ranks
import torch
from test_deep_ep_package import SOURCE

pytestmark = pytest.mark.cpu

CALLS = 5


def dispatcher_of(group, decode_dtype, return_recv_hook):
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.utils import DeepEPMode

    assert deepep.use_deepep and deepep.Buffer.__module__.startswith("moe_a2a.")
    made = deepep.DeepEPDispatcher(
        group=group,
        router_topk=cases.TOPK,
        permute_fusion=True,
        num_experts=cases.EXPERTS_PER_RANK * group.size(),
        num_local_experts=cases.EXPERTS_PER_RANK,
        hidden_size=cases.HIDDEN,
        params_dtype=torch.bfloat16,
        deepep_mode=DeepEPMode.AUTO,
        async_finish=not return_recv_hook,
        return_recv_hook=return_recv_hook,
    )
    made.set_quant_config(
        {"normal_dispatcher_output_dtype": "bf16", "low_latency_dispatcher_output_dtype": decode_dtype}
    )
    return made


def prefill(output, rank):
    """What a runner does with packed rows: weights and sums a row's experts."""
    counts = [-(-int((output.topk_ids == e).sum()) // 128) * 128 for e in range(cases.EXPERTS_PER_RANK)]
    assert list(output.num_recv_tokens_per_expert) == counts
    return cases.experts(rank, output.hidden_states, output.topk_ids, output.topk_weights)


def decode(output, rank):
    """What a runner does with masked rows: each expert multiplies its own by its factor, the others become NaN."""
    rows = output.hidden_states.float()
    if output.hidden_states_scale is not None:
        rows = rows * output.hidden_states_scale.repeat_interleave(128, dim=2)
    factors = cases.factor(torch.arange(cases.EXPERTS_PER_RANK) + rank * cases.EXPERTS_PER_RANK)
    is_row = torch.arange(rows.shape[1])[None, :] < output.masked_m[:, None]
    return torch.where(is_row[:, :, None], rows * factors[:, None, None], torch.nan).bfloat16()


def program(group, decode_dtype, return_recv_hook):
    sys.path.insert(0, str(SOURCE))
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.token_dispatcher import deepep

    rank, num_ranks = group.rank(), group.size()
    properties = SimpleNamespace(multi_processor_count=132)
    with (
        mock.patch.object(utils, "get_server_args", lambda: None),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(deepep, "_is_mnnvl_fabric_supported", lambda: False),
        mock.patch.object(deepep, "get_cuda_version", lambda: (13, 0)),
        mock.patch.object(deepep.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True),
        mock.patch.object(deepep.deep_gemm_wrapper, "DEEPGEMM_BLACKWELL", False, create=True),
    ):
        dispatcher = dispatcher_of(group, decode_dtype, return_recv_hook)
        for call in range(2 * CALLS):
            x, ids, weights = cases.batches(num_ranks, call, dtype=torch.bfloat16)[rank]
            is_extend = call % 2 == 0
            set_is_extend_in_batch(is_extend)
            output = dispatcher.dispatch(x, SimpleNamespace(topk_weights=weights, topk_ids=ids.int()))
            assert type(output).__name__ == ("DeepEPNormal" if is_extend else "DeepEPLL") + "DispatchOutput"
            kind = deepep.DeepEPNormalCombineInput if is_extend else deepep.DeepEPLLCombineInput
            y = prefill(output, rank) if is_extend else decode(output, rank)
            out = dispatcher.combine(kind(y, output.topk_ids, output.topk_weights))
            rtol = 0.07 if decode_dtype == "fp8" and not is_extend else 0.02  # terms of a sum have one sign
            torch.testing.assert_close(out.float(), cases.combined(x.float(), ids, weights), rtol=rtol, atol=0.01)


@pytest.mark.parametrize("return_recv_hook", [False, True])
@pytest.mark.parametrize("decode_dtype", ["bf16", "fp8"])
def test_sglangs_dispatcher(decode_dtype, return_recv_hook):
    pytest.importorskip(
        "sglang", reason="sglang is not a test dependency: it needs CUDA's packages; pip install sglang"
    )
    print(f"seed {cases.SEED}")
    ranks.run_processes(2, program, decode_dtype, return_recv_hook)
