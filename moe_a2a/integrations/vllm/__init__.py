"""vLLM's expert parallelism over moe_a2a: a plugin, switched on by MOE_A2A_VLLM=1::

    MOE_A2A_VLLM=1 vllm serve <model> --data-parallel-size 2 --enable-expert-parallel

It takes the place of the default all2all backend (allgather_reducescatter) wherever experts are spread over ranks. See
docs/vllm.md. Interface: vLLM 0.25, 0.32 and 0.33, `model_executor/layers/fused_moe`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from moe_a2a import environment

log = logging.getLogger("moe_a2a")


def register() -> None:
    """vLLM's entry point `vllm.general_plugins`, called in each of its processes. Does nothing unless switched on."""
    if not environment.is_on("MOE_A2A_VLLM"):
        return
    from vllm.model_executor.layers.fused_moe import all2all_utils

    make = all2all_utils.make_moe_prepare_and_finalize_naive_dp_ep
    if not isinstance(make, functools.partial):  # vLLM may call this more than once
        all2all_utils.make_moe_prepare_and_finalize_naive_dp_ep = functools.partial(_make, make)


def _make(
    default: Callable[..., Any], use_monolithic: bool, is_sequence_parallel: bool = False, num_dispatchers: int = 1
) -> Any:
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    if why := _why_not(config, use_monolithic):
        log.warning("MOE_A2A_VLLM: %s, so vLLM's own all2all is used", why)
        return default(
            use_monolithic=use_monolithic, is_sequence_parallel=is_sequence_parallel, num_dispatchers=num_dispatchers
        )
    from moe_a2a.integrations.vllm import prepare_finalize

    _say_that_it_is_used()
    most, is_eager = config.scheduler_config.max_num_batched_tokens, config.model_config.enforce_eager
    return prepare_finalize.make(num_dispatchers, most, _ranks_differ(config.parallel_config), is_eager)


@functools.cache
def _say_that_it_is_used() -> None:
    logging.getLogger("vllm.moe_a2a").info(
        "MOE_A2A_VLLM: MoE layers dispatch and combine through moe_a2a"
    )  # vLLM shows its own


def _ranks_differ(parallel: Any) -> bool:
    """Whether ranks may have different numbers of tokens. Those of a tensor-parallel group have the same tokens, or equal parts."""
    return parallel.data_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1


def _why_not(config: Any, use_monolithic: bool) -> str | None:
    parallel = config.parallel_config
    if not parallel.enable_expert_parallel:
        return "without --enable-expert-parallel every rank has a part of every expert"
    if use_monolithic:
        return "these experts route by themselves"
    if getattr(parallel, "expert_placement_strategy", "linear") != "linear":
        return f'expert_placement_strategy="{parallel.expert_placement_strategy}" is not "linear"'
    if getattr(parallel, "use_ubatching", False):
        return "with dual-batch overlap a layer has two batches open at once"
    if getattr(config, "lora_config", None) is not None:
        return "the adapter of each token does not travel with its row (--enable-lora)"
    return None
