"""The whole flow of an MoE layer on one screen."""

from __future__ import annotations

import torch

from moe_a2a.expert_parallel import ExpertParallel
from moe_a2a.experts import swiglu_experts


class MoELayer:
    """dispatch -> SwiGLU experts -> combine, for a rank's own experts and tokens.

    Args:
        ep: the ranks and their memory.
        w_gate_up: [E_local, 2 * I, H], the gate's rows before the up projection's: this rank's experts.
        w_down: [E_local, H, I].
    """

    def __init__(self, ep: ExpertParallel, w_gate_up: torch.Tensor, w_down: torch.Tensor):
        experts, double_intermediate, hidden = w_gate_up.shape
        if (experts, hidden) != (ep.num_local_experts, ep.hidden):
            raise ValueError(
                f"w_gate_up has shape {list(w_gate_up.shape)}, expected [num_local_experts={ep.num_local_experts}, "
                f"2 * intermediate, hidden={ep.hidden}] on rank {ep.rank}; pass this rank's experts"
            )
        if list(w_down.shape) != [experts, hidden, double_intermediate // 2] or double_intermediate % 2:
            raise ValueError(
                f"w_down has shape {list(w_down.shape)}, expected [{experts}, {hidden}, {double_intermediate // 2}] on rank "
                f"{ep.rank}; pass [num_local_experts, hidden, intermediate] to w_gate_up's [.., 2 * intermediate, ..]"
            )
        self.ep, self.w_gate_up, self.w_down = ep, w_gate_up, w_down

    @torch.no_grad()
    def __call__(
        self, hidden_states: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """hidden_states [num_tokens, H], topk_idx [num_tokens, K], topk_weights [num_tokens, K] -> [num_tokens, H]."""
        handle = self.ep.dispatch(hidden_states, topk_idx, topk_weights)
        y = swiglu_experts(handle, self.w_gate_up, self.w_down)
        return self.ep.combine(y.to(self.ep.dtype), handle)
