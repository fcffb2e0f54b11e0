"""A whole MoE layer: dispatch, SwiGLU experts with their own weights, combine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_a2a.leaderboard.cases import Case
from moe_a2a.leaderboard.problems.all2all import (
    SIZES,
    MoEConfig,
    RankData,
    check_topk,
    config_of,
    draw_tokens,
    there_and_back,
)
from moe_a2a.leaderboard.problems.base import CloseTo, Tensors


@dataclass
class LayerData(RankData):
    """As in all2all, with x in bf16; w_gate_up [E_local, 2 * I, H] and w_down [E_local, H, I] bf16 are this rank's experts,
    with the gate's rows before the up projection's."""

    w_gate_up: Tensor | None = None
    w_down: Tensor | None = None


class MoELayer(CloseTo):
    """Sums in fp32; the inner activation, the expert's output and the result are rounded to bf16."""

    rtol, atol = 2e-2, 3e-2
    sizes, shared = {**SIZES, "intermediate_dim": 1}, ("num_experts",)

    def check_case(self, case: Case) -> None:
        super().check_case(case)
        check_topk(case)

    def make_weights(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        num_local, hidden, inner = (
            case["num_experts"] // case["world_size"],
            case["hidden_dim"],
            case["intermediate_dim"],
        )
        w_gate_up = torch.randn(num_local, 2 * inner, hidden, generator=generator) / hidden**0.5
        w_down = torch.randn(num_local, hidden, inner, generator=generator) / inner**0.5
        return {"w_gate_up": w_gate_up.bfloat16(), "w_down": w_down.bfloat16()}

    def make_inputs(self, case: Case, rank: int, generator: torch.Generator) -> Tensors:
        return draw_tokens(case, generator, torch.bfloat16)

    def as_data(self, case: Case, tensors: Tensors, rank: int) -> tuple[MoEConfig, LayerData, int, int]:
        rank_data = LayerData(num_tokens=tensors["x"].shape[0], **tensors)
        return config_of(case, torch.bfloat16), rank_data, rank, case["world_size"]

    def bytes_to_move(self, case: Case, tensors: list[Tensors]) -> float:
        return there_and_back(case, tensors)

    def expected(self, case: Case, tensors: list[Tensors]) -> list[Tensor]:
        totals = [torch.zeros_like(of_rank["x"], dtype=torch.float32) for of_rank in tensors]
        num_local = case["num_experts"] // case["world_size"]
        for expert in range(case["num_experts"]):
            owner = tensors[expert // num_local]
            w_gate_up = owner["w_gate_up"][expert % num_local].float()
            w_down = owner["w_down"][expert % num_local].float()
            for of_rank, total in zip(tensors, totals, strict=True):
                token, choice = (of_rank["indices"] == expert).nonzero(as_tuple=True)
                if len(token) == 0:
                    continue
                gate, up = (of_rank["x"][token].float() @ w_gate_up.T).chunk(2, dim=-1)
                y = (F.silu(gate) * up).bfloat16().float() @ w_down.T
                total.index_add_(0, token, y.bfloat16().float() * of_rank["weights"][token, choice, None])
        return [total.bfloat16() for total in totals]
