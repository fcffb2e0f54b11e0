"""What a dispatch sends along the rail: a token's row once to each node that owns one of its experts, with its scales, choices
and weights, packed into one row of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_a2a import block_scales, devices

ALIGNMENT = 16  # bytes; the kernels copy rows that start at such addresses by vectors


@dataclass(frozen=True)
class Sent:
    """What this rank sends along the rail: rows for node 0 first, each node's in the order of the tokens."""

    rows: Tensor  # uint8 [n, bytes of a packed row]
    dtype: torch.dtype  # of x in it
    mx_scales: bool  # float8 rows whose scales are bytes, four in place of each float32
    tokens: Tensor  # int64 [n]
    num_tokens: int  # of the batch
    num_sent: list[int]  # rows for each node

    @property
    def row_format(self) -> int:
        """The number of the RowFormat in csrc/moe/moe_config.h."""
        return 0 if self.dtype.itemsize > 1 else 2 if self.mx_scales else 1


@dataclass(frozen=True)
class RailFormat:
    """How rows are packed. A node numbers its experts from 0; choices of other nodes' experts arrive as -1."""

    num_nodes: int
    num_node_experts: int
    num_topk: int
    hidden: int

    def pack(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, x_scales: Tensor | None, mx_scales: bool
    ) -> Sent:
        """Reads the numbers of rows on the host."""
        node_of_choice = topk_idx.div(self.num_node_experts, rounding_mode="floor")  # -1 stays
        each_node = torch.arange(self.num_nodes, device=topk_idx.device)
        goes = (node_of_choice[:, :, None] == each_node).any(1)
        nodes, tokens = goes.t().nonzero(as_tuple=True)

        is_there = node_of_choice[tokens] == nodes[:, None]
        ids = torch.where(is_there, topk_idx[tokens] - nodes[:, None] * self.num_node_experts, -1)
        weights = ids.new_ones(ids.shape, dtype=torch.float32) if topk_weights is None else topk_weights[tokens]
        columns = [_as_bits(x)[tokens], ids, weights] + ([] if x_scales is None else [x_scales[tokens]])
        packed = torch.empty(len(tokens), self._stride(x.dtype), dtype=torch.uint8, device=x.device)
        for column, values in zip(self._columns(packed, x.dtype), columns, strict=True):
            column.copy_(values)
        num_sent = torch.bincount(nodes, minlength=self.num_nodes).tolist()
        return Sent(packed, x.dtype, mx_scales, tokens, len(x), num_sent)

    def unpack(self, packed: Tensor, sent: Sent) -> dict[str, Tensor]:
        """The arguments of the node's dispatch. x and its scales are views of `packed`, whose rows are like those of `sent`."""
        x, ids, weights, *scales = self._columns(packed, sent.dtype)
        batch = {"x": x.view(sent.dtype), "topk_idx": ids.contiguous(), "topk_weights": weights.contiguous()}
        if scales:
            dtype = torch.uint8 if sent.mx_scales else None
            batch["x_scales"] = block_scales.unpacked(scales[0], dtype, self.hidden)
        return batch

    def _widths(self, dtype: torch.dtype) -> Sequence[tuple[int, torch.dtype]]:
        of_row = (self.hidden, dtype), (self.num_topk, torch.int32), (self.num_topk, torch.float32)
        return (*of_row, (-(-self.hidden // block_scales.FP8_BLOCK), torch.float32)) if dtype.itemsize == 1 else of_row

    def _stride(self, dtype: torch.dtype) -> int:
        return sum(_padded(width * column_dtype.itemsize) for width, column_dtype in self._widths(dtype))

    def _columns(self, packed: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Views of x (float8: as uint8), topk_idx, topk_weights and, if float8, x_scales, with gaps between their rows."""
        columns, begin = [], 0
        for width, column_dtype in self._widths(dtype):
            num_bytes = width * column_dtype.itemsize
            bits = packed[:, begin : begin + num_bytes]
            columns.append(bits if column_dtype.itemsize == 1 else bits.view(column_dtype))
            begin += _padded(num_bytes)
        return columns


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _as_bits(x: Tensor) -> Tensor:
    """float8 as uint8, which every operator of PyTorch takes."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


@dataclass(frozen=True)
class Passage:
    """A dispatch's rows on the rail, for the way back."""

    number: int  # of the dispatch, the same on the whole rail
    tokens: Tensor  # int64 [n]: of the rows that this rank has sent
    num_tokens: int  # of the batch
    num_sent: list[int]  # rows to each node
    num_received: list[int]  # rows from each node

    def add_up(self, sums: Tensor) -> Tensor:
        """[num_tokens, H]: for each token the sum over its nodes, ascending, of their `sums` [n, H], in fp32, rounded once."""
        devices.keep_for_current_stream(self.tokens)
        total = torch.zeros(self.num_tokens, sums.shape[1], dtype=torch.float32, device=sums.device)
        for tokens, rows in zip(self.tokens.split(self.num_sent), sums.split(self.num_sent), strict=True):
            total.index_add_(0, tokens, rows.float())  # a token occurs once
        return total.to(sums.dtype)
