"""Random operands of grouped_gemm(), and the rows that it gathers."""

import on_device
import torch

DEVICE = torch.device(on_device.NAME)

# Rows of each expert: none, one, few, less and more than a tile, an exact number of tiles, all on one.
ROUTINGS = {
    "random": [37, 0, 129, 64, 1, 200, 16, 25],
    "one_token": [0, 0, 1, 0],
    "all_on_one": [0, 700, 0],
    "whole_tiles": [128, 256, 64, 128],
    "many_experts": [3, 0, 1, 0, 7] * 15,
    "none": [0, 0, 0],
}
# A kernel may multiply them in other ways if they are few: up to 16, 32, 64, more.
FEW_AND_MANY = [1, 16, 130, 17, 32, 33, 9, 64]


def make_case(counts, hidden, columns, dtype, seed, gather=True):
    """x, row_index, expert_offsets, w of a random routing; w holds gate and up, each of `columns`."""
    generator = torch.Generator().manual_seed(seed)
    num_routes = sum(counts)
    num_rows = max(num_routes // 2, 3) if gather else num_routes
    x = torch.randn(num_rows, hidden, generator=generator).to(dtype)
    w = (2 * torch.randn(len(counts), 2 * columns, hidden, generator=generator) / hidden**0.5).to(dtype)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    row_index = torch.randint(-1, num_rows, (num_routes,), generator=generator).int() if gather else None
    return [t if t is None else t.to(DEVICE) for t in (x, row_index, offsets, w)]


def gathered(x, row_index):
    if row_index is None:
        return x
    return torch.where(row_index[:, None] < 0, torch.zeros((), dtype=x.dtype), x[row_index.clamp_min(0).long()])
