"""How many blocks a call uses if it does not say: a table indexed by number of tokens, passed to the core once.

The first match wins:

  1. the constructor's launch_table= (a file), else the file that the environment variable MOE_A2A_LAUNCH_TABLE names;
  2. the table that `tune` has written on this machine for this GPU and number of ranks, in the user's cache directory
     (<cache>/moe_a2a/tuned/<gpu>_<ranks>.json);
  3. the package's table for this GPU and number of ranks, if there is one (moe_a2a/tuned/<gpu>_<ranks>.json);
  4. a model: see model().

num_blocks= of a call or of the constructor overrides all of them. On the CPU there is no table: one thread.

`python -m moe_a2a tune` writes such files and prints the table in effect.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from moe_a2a import tuned_files
from moe_a2a.arguments import ROW_DTYPE_NAMES
from moe_a2a.json_fields import Field

ENVIRONMENT_VARIABLE = "MOE_A2A_LAUNCH_TABLE"
LARGEST = (1 << 31) - 1  # the core's counters are 32-bit


class LaunchStep(NamedTuple):
    """For calls with up to max_tokens tokens; the last step also serves larger calls."""

    max_tokens: int
    dispatch_blocks: int
    combine_blocks: int


@dataclass(frozen=True)
class TunedTable:
    """Measured for rows of one length and type."""

    hidden: int
    dtype: str  # "bfloat16"
    steps: tuple[LaunchStep, ...]

    @property
    def row_bytes(self) -> int:
        return self.hidden * getattr(torch, self.dtype).itemsize

    def scaled_to(self, row_bytes: int) -> TunedTable:
        """The table for another row length, scaled by the bytes of a call."""
        ratio = self.row_bytes / row_bytes
        steps: dict[int, LaunchStep] = {}
        for step in self.steps:
            max_tokens = min(LARGEST, max(1, round(step.max_tokens * ratio)))
            steps[max_tokens] = step._replace(max_tokens=max_tokens)
        return replace(self, steps=tuple(steps.values()))


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
    if path is not None:
        nearest = min(read(path), key=lambda table: abs(math.log(table.row_bytes / row_bytes)))
        is_same = nearest.row_bytes == row_bytes
        origin = f"{path}, hidden {nearest.hidden} {nearest.dtype}" + ("" if is_same else ", scaled by the row's bytes")
        return list((nearest if is_same else nearest.scaled_to(row_bytes)).steps), origin
    if device.type != "cuda":
        return [], "no table, one thread per call"
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return model(num_ranks, num_topk, row_bytes, num_multiprocessors), "no table, the model"


def own_file(device: torch.device, num_ranks: int) -> Path:
    return tuned_files.own_file("", device, num_ranks)


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
    (4 KiB in a small batch). At least 64, at most one per SM.

    With K uniform choices, a token's row goes to R * (1 - (1 - 1 / R) ** K) ranks on average.
    """
    copies = num_ranks * (1 - (1 - 1 / num_ranks) ** num_topk)
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
    return TunedTable(hidden, dtype, tuple(steps))


def write(path: Path, about: dict, table: TunedTable) -> None:
    """Adds the table to the file, replacing an older one for the same rows."""
    tables = read(path) if path.exists() else []
    same_rows = (table.hidden, table.dtype)
    tables = [old for old in tables if (old.hidden, old.dtype) != same_rows] + [table]
    tuned_files.write(path, about, "[max_tokens, dispatch_blocks, combine_blocks]", map(asdict, tables))
