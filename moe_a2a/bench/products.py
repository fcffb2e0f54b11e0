"""The two products of SwiGLU experts, by moe_a2a and by its peers, over the rows that a dispatch has brought."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import moe_a2a


class Products(ABC):
    """`first` gives what the experts' first product leaves, `second` takes [rows, intermediate] in the same layout."""

    system: str
    gathers = False  # the first product reads recv_x through the list, and applies SwiGLU

    def __init__(self, w_gate_up: Tensor, w_down: Tensor):
        self.w_gate_up, self.w_down = w_gate_up, w_down

    @staticmethod
    @abstractmethod
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None: ...

    def dispatch(self, ep: moe_a2a.ExpertParallel, *tokens: Tensor) -> moe_a2a.DispatchHandle:
        return ep.dispatch(*tokens)

    @abstractmethod
    def take(self, handle: moe_a2a.DispatchHandle) -> Tensor:
        """The rows of the first product; keeps what the products read of the handle."""

    @abstractmethod
    def first(self, rows: Tensor) -> Tensor: ...

    def activate(self, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate) * up

    @abstractmethod
    def second(self, inner: Tensor) -> Tensor: ...

    def layer(self, ep: moe_a2a.ExpertParallel, *tokens: Tensor) -> Tensor:
        handle = self.dispatch(ep, *tokens)
        inner = self.activate(self.first(self.take(handle)))
        return ep.combine(self.second(inner), handle)


class Ours(Products):
    system = "moe_a2a"
    gathers = True

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def take(self, handle: moe_a2a.DispatchHandle) -> Tensor:
        # As long as the routes, not as the handle's capacity: peers allocate no more either.
        self._rows, self._offsets = handle.expert_row_index[: handle.num_routes], handle.expert_offsets
        return handle.recv_x

    def first(self, rows: Tensor) -> Tensor:
        return moe_a2a.grouped_gemm(rows, self._rows, self._offsets, self.w_gate_up, "swiglu")

    def activate(self, inner: Tensor) -> Tensor:
        return inner

    def second(self, inner: Tensor) -> Tensor:
        return moe_a2a.grouped_gemm(inner, None, self._offsets, self.w_down)


class TorchGroupedMm(Products):
    """As an engineer would compose it today: gathered rows, torch._grouped_mm, SiLU(gate) * up. Reads num_routes on the host."""

    system = "torch._grouped_mm"

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        if not hasattr(torch, "_grouped_mm"):
            return f"torch {torch.__version__} has no _grouped_mm"
        return None if dtype == torch.bfloat16 else "torch._grouped_mm takes bfloat16"

    def take(self, handle: moe_a2a.DispatchHandle) -> Tensor:
        self._ends = handle.expert_offsets[1:]
        return handle.recv_x.index_select(0, handle.expert_row_index[: handle.num_routes])

    def first(self, rows: Tensor) -> Tensor:
        return torch._grouped_mm(rows, self.w_gate_up.transpose(1, 2), offs=self._ends)

    def second(self, inner: Tensor) -> Tensor:
        return torch._grouped_mm(inner, self.w_down.transpose(1, 2), offs=self._ends)


class DeepGemm(Products):
    """DeepGEMM's bfloat16 kernels: each expert's rows padded to 128, copied there by dispatch(layout="expert_major")."""

    system = "DeepGEMM"
    ALIGNMENT = 128

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return "DeepGEMM runs on GPUs"
        if isinstance(module := _deep_gemm(), str):
            return module
        if not hasattr(module, "m_grouped_bf16_gemm_nt_contiguous"):
            return "this deep_gemm has no m_grouped_bf16_gemm_nt_contiguous"
        return None if dtype == torch.bfloat16 else "DeepGEMM's unscaled kernels take bfloat16"

    def dispatch(self, ep: moe_a2a.ExpertParallel, *tokens: Tensor) -> moe_a2a.DispatchHandle:
        return ep.dispatch(*tokens, layout="expert_major", expert_alignment=self.ALIGNMENT)

    def take(self, handle: moe_a2a.DispatchHandle) -> Tensor:
        num_rows = int(handle.num_routes)  # with padding
        position = torch.arange(num_rows, dtype=torch.int32, device=handle.expert_offsets.device)
        self._experts = torch.searchsorted(handle.expert_offsets[1:].contiguous(), position, right=True).int()
        return handle.expert_x[:num_rows]

    def first(self, rows: Tensor) -> Tensor:
        return self._product(rows, self.w_gate_up)

    def second(self, inner: Tensor) -> Tensor:
        return self._product(inner, self.w_down)

    def _product(self, rows: Tensor, w: Tensor) -> Tensor:
        out = rows.new_empty(rows.shape[0], w.shape[1])
        _deep_gemm().m_grouped_bf16_gemm_nt_contiguous(rows, w, out, self._experts)
        return out


def _deep_gemm() -> Any:
    """The module, or why it is not there."""
    try:
        import deep_gemm
    except Exception as error:  # a wheel for another PyTorch raises what it likes
        return f"deep_gemm cannot be imported: {error}"
    return deep_gemm


ALL: tuple[type[Products], ...] = (Ours, TorchGroupedMm, DeepGemm)


def make_weights(num_experts: int, hidden: int, intermediate: int, like: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(like.device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32).to(like.dtype)

    w_gate_up = torch.stack([random(2 * intermediate, hidden) / hidden**0.5 for _ in range(num_experts)])
    w_down = torch.stack([random(hidden, intermediate) / intermediate**0.5 for _ in range(num_experts)])
    return w_gate_up, w_down
