"""How many blocks a call uses if it does not say: a table indexed by number of tokens, passed to the core once.

The first match wins:

  1. the constructor's launch_table= (a file), else the file that the environment variable MOE_A2A_LAUNCH_TABLE names;
  2. the table that `tune` has written on this machine for this GPU and number of ranks, in the user's cache directory
     (<cache>/moe_a2a/tuned/<gpu>_<ranks>.json);
  3. the package's table for this GPU and number of ranks, if there is one (moe_a2a/tables/tuned/<gpu>_<ranks>.json);
  4. a model: see model().

num_blocks= of a call or of the constructor overrides all of them. On the CPU there is no table: one thread.

`python -m moe_a2a tune` writes such files and prints the table in effect.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from moe_a2a.arguments import ROW_DTYPE_NAMES
from moe_a2a.files.json_fields import Field
from moe_a2a.tables import tuned_files

ENVIRONMENT_VARIABLE = "MOE_A2A_LAUNCH_TABLE"
LARGEST = (1 << 31) - 1  # the core's counters are 32-bit


class LaunchStep(NamedTuple):
    """For calls with up to max_tokens tokens; the last step also serves larger calls."""

    max_tokens: int
    dispatch_blocks: int
    combine_blocks: int


@dataclass(frozen=True)
class TunedTable:
    """Measured for rows of one length and type, and one number of experts per token."""

    hidden: int
    dtype: str  # "bfloat16"
    steps: tuple[LaunchStep, ...]
    topk: int = 8  # if the file does not say

    @property
    def row_bytes(self) -> int:
        return self.hidden * getattr(torch, self.dtype).itemsize

    def scaled_to(self, row_bytes: int, num_topk: int, num_ranks: int, most_blocks: int) -> TunedTable:
        """The table for other rows and another number of experts per token.

        Numbers of tokens are scaled by the bytes of a row. A token that goes to fewer ranks needs as many instructions
        (to quantise it, to place it, to write its sum) for fewer bytes on the links: numbers of blocks are scaled by its
        number of ranks, those of batches that go as rows. They are not reduced for a token that goes to more ranks."""
        ratio = self.row_bytes / row_bytes
        more = max(1.0, ranks_per_token(num_ranks, self.topk) / ranks_per_token(num_ranks, num_topk))
        steps: dict[int, LaunchStep] = {}
        for step in self.steps:
            max_tokens = min(LARGEST, max(1, round(step.max_tokens * ratio)))
            blocks: Iterable[int] = step[1:]
            if max_tokens > LARGEST_SMALL_BATCH:
                blocks = (max(count, min(most_blocks, round(count * more))) for count in blocks)
            steps[max_tokens] = LaunchStep(max_tokens, *blocks)
        return replace(self, steps=tuple(steps.values()), topk=num_topk)


def in_effect(
    device: torch.device,
    num_ranks: int,
    hidden: int,
    dtype: torch.dtype,
    num_topk: int,
    file: str | os.PathLike[str] | None = None,
) -> tuple[list[LaunchStep], str]:
    """The table, and its origin as text. An empty table: the target's default."""
    path = tuned_files.chosen_file(file or os.environ.get(ENVIRONMENT_VARIABLE), "", device, num_ranks)
    row_bytes = hidden * dtype.itemsize
    is_gpu = device.type == "cuda"
    most_blocks = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else LARGEST
    if path is not None:

        def distance(table: TunedTable) -> tuple[float, float]:
            return abs(math.log(table.row_bytes / row_bytes)), abs(math.log(table.topk / num_topk))

        nearest = min(read(path), key=distance)
        is_same = (nearest.row_bytes, nearest.topk) == (row_bytes, num_topk)
        table = nearest if is_same else nearest.scaled_to(row_bytes, num_topk, num_ranks, most_blocks)
        measured = f"{path}, hidden {nearest.hidden} {nearest.dtype} top-{nearest.topk}"
        return list(table.steps), measured + ("" if is_same else ", scaled")
    if not is_gpu:
        return [], "no table, one thread per call"
    return model(num_ranks, num_topk, row_bytes, most_blocks), "no table, the model"


def own_file(device: torch.device, num_ranks: int) -> Path:
    return tuned_files.own_file("", device, num_ranks)


def ranks_per_token(num_ranks: int, num_topk: int) -> float:
    """To how many of R ranks a token with K uniform choices goes on average: R * (1 - (1 - 1 / R) ** K)."""
    return num_ranks * (1 - (1 - 1 / num_ranks) ** num_topk)


# ---- the model

FEWEST_BLOCKS = 64  # enough to saturate the links with a dispatch of a large batch
BYTES_PER_BLOCK = 32 << 10  # rows that justify a block of a combine, which adds as well as sends
LARGEST_TOKENS = 1 << 14
# Small batches (LL words): one warp per KiB sent and one per token's choices, plus a few blocks for the lists. A warp that
# adds needs an SM nearly to itself.
LARGEST_SMALL_BATCH = 128
WARPS_PER_BLOCK = 16
BLOCKS_FOR_LISTS = 9
ADDED_BYTES_PER_BLOCK = 4 << 10


def model(num_ranks: int, num_topk: int, row_bytes: int, most_blocks: int) -> list[LaunchStep]:
    """Dispatch: 64 blocks, or enough to give each warp one piece of a small batch. Combine: one block per 32 KiB of rows
    (4 KiB in a small batch). At least 64, at most one per SM."""
    copies = ranks_per_token(num_ranks, num_topk)
    steps: list[LaunchStep] = []
    max_tokens = 1
    while max_tokens <= LARGEST_TOKENS:
        is_small = max_tokens <= LARGEST_SMALL_BATCH
        pieces = max_tokens * (row_bytes / 1024 + 1) if is_small else 0
        for_lists = BLOCKS_FOR_LISTS if is_small else 0
        added = max_tokens * row_bytes * copies / (ADDED_BYTES_PER_BLOCK if is_small else BYTES_PER_BLOCK)
        wanted = (pieces / WARPS_PER_BLOCK + for_lists, added)
        blocks = [min(most_blocks, max(FEWEST_BLOCKS, math.ceil(count))) for count in wanted]
        steps.append(LaunchStep(max_tokens, *blocks))
        max_tokens *= 2
    return tuned_files.merged(steps)


# ---- files


def read(path: Path) -> list[TunedTable]:
    """Raises ValueError that names the file and the field."""
    return tuned_files.read(path, _table, "launch table", "python -m moe_a2a tune")


def _table(field: Field) -> TunedTable:
    hidden, dtype = field["hidden"].integer(1, LARGEST), field["dtype"].text(ROW_DTYPE_NAMES)
    steps: list[LaunchStep] = []
    for step in field["steps"].items():
        numbers = [number.integer(1, LARGEST) for number in step.items()]
        if len(numbers) != len(LaunchStep._fields):
            raise step.error(f"[{', '.join(LaunchStep._fields)}]")
        if steps and numbers[0] <= steps[-1].max_tokens:
            raise step.error(f"a step for more than {steps[-1].max_tokens} tokens, the previous step's limit")
        steps.append(LaunchStep(*numbers))
    if not steps:
        raise field["steps"].error("an array of steps")
    topk = field["topk"].integer(1, LARGEST) if "topk" in field.value else TunedTable.topk
    return TunedTable(hidden, dtype, tuple(steps), topk)


def write(path: Path, about: dict, table: TunedTable) -> None:
    """Adds the table to the file, replacing an older one for the same rows."""
    tables = read(path) if path.exists() else []
    tables = [old for old in tables if replace(old, steps=table.steps) != table] + [table]
    tuned_files.write(path, about, "[max_tokens, dispatch_blocks, combine_blocks]", map(asdict, tables))
