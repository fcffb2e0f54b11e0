"""The weights of a rank's SwiGLU experts: of the dtype of the rows, or float8 with a scale per 128 x 128."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_a2a import _core, arguments
from moe_a2a.devices import float8_dtype
from moe_a2a.handle import AnyExpertParallel

BLOCK = 128  # rows and columns of float8 weights that share a scale
GRANULARITY = 16  # of hidden and intermediate, for the kernels
KERNEL_DTYPES = (torch.bfloat16, torch.float16)

Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # or (float8 values, their scales)


class ExpertWeights(NamedTuple):
    gate_up: torch.Tensor  # [E_local, 2 * I, H], the gate's rows before the up projection's
    down: torch.Tensor  # [E_local, H, I]
    gate_up_scales: torch.Tensor | None = None  # [E_local, 2 * ceil(I / 128), ceil(H / 128)], those of the gate first
    down_scales: torch.Tensor | None = None  # [E_local, ceil(H / 128), ceil(I / 128)]

    @staticmethod
    def checked(ep: AnyExpertParallel, w_gate_up: Any, w_down: Any) -> ExpertWeights:
        """Raises ValueError or TypeError if the weights do not fit `ep`."""
        gate_up, gate_up_scales = _split(ep, "w_gate_up", w_gate_up)
        down, down_scales = _split(ep, "w_down", w_down)
        weights = ExpertWeights(gate_up, down, gate_up_scales, down_scales)
        fits = ep.rank, ep.num_local_experts, ep.hidden, ep.device, ep.dtype, float8_dtype(ep.device)
        _core.check_expert_weights(*fits, *weights)
        return weights

    def check_no_grad(self, ep: AnyExpertParallel) -> None:
        """Raises if a weight requires grad: for a call that autograd would not record."""
        if not torch.is_grad_enabled():
            return
        for name, weight in (("w_gate_up", self.gate_up), ("w_down", self.down)):
            if weight.requires_grad:
                raise ValueError(
                    f"{name} requires grad on rank {ep.rank}, which this call would not record; train with "
                    f"moe_a2a.MoELayer, call under torch.no_grad(), or pass {name}.detach()"
                )

    @property
    def is_float8(self) -> bool:
        return self.gate_up_scales is not None

    @property
    def intermediate(self) -> int:
        return self.down.shape[2]

    def of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[2 * I, H] and [H, I]; float8 weights as fp32 values."""
        gate_up, down = self.gate_up[expert], self.down[expert]
        if self.gate_up_scales is None or self.down_scales is None:
            return gate_up, down
        halves = zip(gate_up.chunk(2), self.gate_up_scales[expert].chunk(2), strict=True)
        return torch.cat([dequantize(*half) for half in halves]), dequantize(down, self.down_scales[expert])

    def kernels_refuse(self, ep: AnyExpertParallel, row_dtype: torch.dtype) -> str | None:
        """Why the kernels cannot take these weights and rows; None if they can."""
        if self.is_float8 and row_dtype != self.gate_up.dtype:
            return f'rows are {row_dtype} and weights {self.gate_up.dtype} (dispatch with quantize="fp8")'
        if self.is_float8 and ep.dtype not in KERNEL_DTYPES:
            return f"results are {ep.dtype}, and from float8 the kernels compute bfloat16 or float16"
        if not self.is_float8 and row_dtype not in KERNEL_DTYPES:
            return f"rows are {row_dtype}, and the kernels take bfloat16 and float16, or float8 with float8 weights"
        for name, size in (("hidden", ep.hidden), ("intermediate", self.intermediate)):
            if size % GRANULARITY != 0:
                return f"{name}={size} is not a multiple of {GRANULARITY}"
        names = "w_gate_up", "w_down", "w_gate_up's scales", "w_down's scales"
        for name, w in zip(names, self, strict=True):
            if w is not None and not w.is_contiguous():
                return f"not contiguous: {name} (strides {list(w.stride())})"
        for name, w in (("w_gate_up", self.gate_up), ("w_down", self.down)):
            if w.data_ptr() % 16 != 0:
                return f"{name} does not begin at a multiple of 16 bytes"
        return None


def _split(ep: AnyExpertParallel, name: str, weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    values, scales = weight if isinstance(weight, (tuple, list)) and len(weight) == 2 else (weight, None)
    arguments.check_tensor(ep.rank, name, values)
    arguments.check_optional_tensor(ep.rank, f"{name}'s scales", scales)
    return values, scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, rows_per_scale: int = BLOCK) -> torch.Tensor:
    """[rows, columns] of float8 with a scale per rows_per_scale x 128 -> fp32."""
    rows, columns = values.shape
    every = scales.repeat_interleave(rows_per_scale, dim=0)[:rows].repeat_interleave(BLOCK, dim=1)[:, :columns]
    return values.float() * every
