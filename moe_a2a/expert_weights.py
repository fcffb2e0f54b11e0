"""The weights of a rank's SwiGLU experts: of the dtype of the rows, or float8 with a scale per 128 x 128."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_a2a import arguments
from moe_a2a.devices import float8_dtype
from moe_a2a.handle import AnyExpertParallel

BLOCK = 128  # rows and columns of float8 weights that share a scale
GRANULARITY = 16  # of hidden and intermediate, for the kernels
KERNEL_DTYPES = (torch.bfloat16, torch.float16)

Weight = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # or (float8 values, their scales)


@dataclass(frozen=True)
class ExpertWeights:
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
        weights._check(ep)
        return weights

    def check_no_grad(self, ep: AnyExpertParallel) -> None:
        """For a call that autograd would not record."""
        for name, weight in (("w_gate_up", self.gate_up), ("w_down", self.down)):
            if torch.is_grad_enabled() and weight.requires_grad:
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
        scales = {"w_gate_up's scales": self.gate_up_scales, "w_down's scales": self.down_scales}
        for name, w in {"w_gate_up": self.gate_up, "w_down": self.down, **scales}.items():
            if w is not None and not w.is_contiguous():
                return f"not contiguous: {name} (strides {list(w.stride())})"
            if w is not None and name not in scales and w.data_ptr() % 16 != 0:
                return f"{name} does not begin at a multiple of 16 bytes"
        return None

    def _check(self, ep: AnyExpertParallel) -> None:
        _check_values(ep, "w_gate_up", self.gate_up, self.gate_up_scales)
        _check_values(ep, "w_down", self.down, self.down_scales)
        if (self.gate_up_scales is None) != (self.down_scales is None):
            raise TypeError(
                f"w_gate_up has dtype {self.gate_up.dtype} and w_down {self.down.dtype} on rank {ep.rank}; pass float8 with "
                "scales for both or for neither"
            )
        if self.gate_up.dim() != 3 or (self.gate_up.shape[0], self.gate_up.shape[2]) != (
            ep.num_local_experts,
            ep.hidden,
        ):
            raise ValueError(
                f"w_gate_up has shape {list(self.gate_up.shape)}, expected [num_local_experts={ep.num_local_experts}, "
                f"2 * intermediate, hidden={ep.hidden}] on rank {ep.rank}; pass this rank's experts"
            )
        experts, double_intermediate, hidden = self.gate_up.shape
        intermediate = double_intermediate // 2
        if list(self.down.shape) != [experts, hidden, intermediate] or double_intermediate % 2 or intermediate == 0:
            raise ValueError(
                f"w_down has shape {list(self.down.shape)}, expected {[experts, hidden, intermediate]} on rank "
                f"{ep.rank}; pass [num_local_experts, hidden, intermediate] to w_gate_up's [.., 2 * intermediate, ..]"
            )
        of_hidden, of_intermediate = -(-hidden // BLOCK), -(-intermediate // BLOCK)
        _check_scales(ep, "w_gate_up", self.gate_up_scales, [experts, 2 * of_intermediate, of_hidden])
        _check_scales(ep, "w_down", self.down_scales, [experts, of_hidden, of_intermediate])


def _split(ep: AnyExpertParallel, name: str, weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    values, scales = weight if isinstance(weight, (tuple, list)) and len(weight) == 2 else (weight, None)
    arguments.check_tensor(ep.rank, name, values)
    arguments.check_optional_tensor(ep.rank, f"{name}'s scales", scales)
    return values, scales


def _check_values(ep: AnyExpertParallel, name: str, w: torch.Tensor, scales: torch.Tensor | None) -> None:
    expected = ep.dtype if scales is None else float8_dtype(ep.device)
    if w.dtype != expected:
        hint = (
            f"pass ({name}, scales)"
            if w.dtype.itemsize == 1 and w.is_floating_point()
            else f"pass {name}.to({expected})"
        )
        raise TypeError(f"{name} has dtype {w.dtype}, expected {expected} on rank {ep.rank}; {hint}")
    _check_device(ep, name, w)


def _check_scales(ep: AnyExpertParallel, of: str, scales: torch.Tensor | None, shape: list[int]) -> None:
    if scales is None:
        return
    if scales.dtype != torch.float32:
        raise TypeError(f"{of}'s scales have dtype {scales.dtype}, expected torch.float32 on rank {ep.rank}")
    if list(scales.shape) != shape:
        raise ValueError(
            f"{of}'s scales have shape {list(scales.shape)}, expected {shape} on rank {ep.rank}; pass one per 128 x 128 values"
        )
    _check_device(ep, f"{of}'s scales", scales)


def _check_device(ep: AnyExpertParallel, name: str, tensor: torch.Tensor) -> None:
    if tensor.device != ep.device:
        raise ValueError(
            f'{name} is on {tensor.device}, the ExpertParallel on {ep.device}, on rank {ep.rank}; pass .to("{ep.device}")'
        )


def dequantize(values: torch.Tensor, scales: torch.Tensor, rows_per_scale: int = BLOCK) -> torch.Tensor:
    """[rows, columns] of float8 with a scale per rows_per_scale x 128 -> fp32."""
    rows, columns = values.shape
    every = scales.repeat_interleave(rows_per_scale, dim=0)[:rows].repeat_interleave(BLOCK, dim=1)[:, :columns]
    return values.float() * every
