"""What this rank received in a dispatch over several nodes, and the key to its combine."""

from __future__ import annotations

from typing import Any

import torch

from moe_a2a.handle import DispatchHandle
from moe_a2a.two_level.passage import Passage


class TwoLevelHandle(DispatchHandle):
    """A DispatchHandle of this node's ExpertParallel, with what combine() needs to return the sums to the other nodes.

    Its rows, lists and counts are those of DispatchHandle, with the node's ranks as R and num_nodes * num_max_tokens_per_rank
    as T: a source rank is the rank of this node that a row passed through, and a token's index is the row's index there.
    """

    __slots__ = ("_two_level", "_passage")

    def __init__(
        self,
        two_level: Any,
        local: DispatchHandle,
        passage: Passage,
        routed_by: tuple[Any, Any],
        scales_dtype: torch.dtype | None,
    ):
        super().__init__(local.ep, local._handle, local.row_dtype, routed_by, scales_dtype, local._num_blocks)
        self._two_level, self._passage = two_level, passage
