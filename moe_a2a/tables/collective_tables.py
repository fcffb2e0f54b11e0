"""What a call of Collectives looks up by its bytes: the algorithm that "auto" selects (tensors in symmetric memory have steps
of their own), the number of blocks, whether one-shot sends LL words, and which codecs pay.

The first match wins:

  1. the constructor's table= (a file), else the file that the environment variable MOE_A2A_COLLECTIVE_TABLE names;
  2. the table that `tune collectives` has written on this machine for this GPU and number of ranks, in the user's cache
     directory (<cache>/moe_a2a/tuned/collectives_<gpu>_<ranks>.json);
  3. the package's table for this GPU and number of ranks, if there is one;
  4. a model: see model().

A call's algorithm= and the constructor's num_blocks= override all of them. All ranks must have the same table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from moe_a2a.arguments import ROW_DTYPE_NAMES
from moe_a2a.codecs import CODECS
from moe_a2a.files.json_fields import Field
from moe_a2a.tables import launch_tables, tuned_files

ENVIRONMENT_VARIABLE = "MOE_A2A_COLLECTIVE_TABLE"
PREFIX = "collectives_"  # of file names
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
# Kinds without a choice use "two_shot".
ALGORITHMS = ("one_shot", "two_shot", "ring", "recursive_doubling")
LARGEST = 1 << 50  # bytes
MOST_IN_WORDS = 32 << 10  # kMaxWordsBytes in csrc/collectives/announcement.h


class CollectiveStep(NamedTuple):
    """For calls of up to max_nbytes, all ranks' bytes together; the last step also serves larger calls."""

    max_nbytes: int
    algorithm: str
    num_blocks: int  # 0: one block per chunk, up to the device's limit


@dataclass(frozen=True)
class CollectiveTable:
    """Measured for one kind and dtype. codecs: the fewest bytes from which each codec pays; absent: it never does.
    most_in_words: the most bytes that one-shot sends as LL words; larger calls use rows with signals. symmetric: the steps
    for all-reduces of tensors in symmetric memory, which may also go "direct"; if empty, those go direct instead of "two_shot"."""

    kind: str
    dtype: str
    steps: tuple[CollectiveStep, ...]
    codecs: dict[str, int] = field(default_factory=dict)
    most_in_words: int = 0
    symmetric: tuple[CollectiveStep, ...] = ()

    def step(self, nbytes: int, symmetric: bool = False) -> CollectiveStep:
        """symmetric: of tensors in symmetric memory."""
        steps = self.symmetric_steps if symmetric else self.steps
        for step in steps:  # a few: quicker than bisect with a key
            if nbytes <= step.max_nbytes:
                return step
        return steps[-1]

    @cached_property
    def symmetric_steps(self) -> tuple[CollectiveStep, ...]:
        """Where nothing was measured, direct instead of two-shot: it has fewer steps."""
        return self.symmetric or tuple(
            step._replace(algorithm="direct", num_blocks=0) if step.algorithm == "two_shot" else step
            for step in self.steps
        )


class Tables:
    """The tables of one object."""

    def __init__(self, tables: Sequence[CollectiveTable], origin: str):
        self.origin = origin
        self._tables = tables
        self.of = cache(self._nearest)  # looked up by every call

    def _nearest(self, kind: str, dtype: str) -> CollectiveTable:
        """The table of this dtype, else of a dtype of the same size, else any."""
        size = getattr(torch, dtype).itemsize

        def distance(table: CollectiveTable) -> tuple[bool, bool]:
            return table.dtype != dtype, getattr(torch, table.dtype).itemsize != size

        return min((table for table in self._tables if table.kind == kind), key=distance)


def in_effect(device: torch.device, num_ranks: int, file: str | os.PathLike[str] | None = None) -> Tables:
    """The model supplies the kinds that a file lacks."""
    path = tuned_files.chosen_file(file or os.environ.get(ENVIRONMENT_VARIABLE), PREFIX, device, num_ranks)
    modelled = model(device.type, num_ranks)
    if path is None:
        return Tables(modelled, "no table, the model")
    tables = read(path)
    kinds = {table.kind for table in tables}
    return Tables([*tables, *(table for table in modelled if table.kind not in kinds)], str(path))


def own_file(device: torch.device, num_ranks: int) -> Path:
    return tuned_files.own_file(PREFIX, device, num_ranks)


# ---- the model

MOST_ONE_SHOT_ON_CPU = 8 << 10  # measured with 4 ranks on 2 cores
# Bytes that a GPU's links carry in the time of two-shot's second trip: 5.5 us, 349 GB/s (2 and 4 H200).
TRIP_NBYTES = 1_900_000
# Beyond this every rank's reduction of everything takes longer than the second trip. 2 H100, us of one-shot and two-shot: 4 MiB
# 26.8 and 28.6, 8 MiB 49.5 and 45.2, 32 MiB 150 and 141.
MOST_ONE_SHOT_ON_GPU = 6 << 20
# Per codec. CPU: never; 2 ranks, 16 MiB of bfloat16: 5 ms without a codec, 62 with q8, 80 with q4. GPU: 2 H200, bfloat16,
# against no codec: q4 19.7 and 20.4 us at 4 MiB, q8 32.4 and 36.5 us at 8 MiB, q6 31.4.
LEAST_WITH_CODEC: dict[str, dict[str, int]] = {
    "cpu": {},
    "cuda": {"fp8": 8 << 20, "q8": 8 << 20, "q6": 8 << 20, "q4": 4 << 20},
}


def model(device_type: str, num_ranks: int) -> list[CollectiveTable]:
    """One-shot while the bytes that two-shot saves take less time than its second trip: one-shot sends R - 1 times
    the message, two-shot 2 (R - 1) / R times; and up to a few MiB, as one-shot also reduces R times as much. Ring and recursive
    doubling are for machines whose ranks do not all reach each other equally well; on other machines they were never the
    fastest."""
    saved = (num_ranks - 1) * (num_ranks - 2)
    if device_type == "cpu":
        most = MOST_ONE_SHOT_ON_CPU
    elif num_ranks == 1:
        most = LARGEST
    else:
        most = min(num_ranks * TRIP_NBYTES // saved if saved else LARGEST, MOST_ONE_SHOT_ON_GPU)
    all_reduce = (CollectiveStep(most, "one_shot", 0), CollectiveStep(LARGEST, "two_shot", 0))
    codecs = LEAST_WITH_CODEC[device_type]
    # On the CPU, where a signal costs almost nothing, LL words are never faster: 4 ranks on 2 cores, us as rows and as words:
    # 18.0 and 18.3 for 16 bytes, 20 and 30 for 512, 34 and 176 for 8 KiB. On 2 H100 they are faster at all sizes that a launch
    # can send: 5.8 us for 1 KiB and 7.0 for 32 KiB; as rows 4 KiB take 8.2. More ranks send as many bytes from smaller tensors.
    most_in_words = 0 if device_type == "cpu" else MOST_IN_WORDS // max(num_ranks - 1, 1)
    return [
        CollectiveTable("all_reduce", "bfloat16", all_reduce, codecs, most_in_words),
        *(CollectiveTable(kind, "bfloat16", (CollectiveStep(LARGEST, "two_shot", 0),)) for kind in KINDS[1:]),
    ]


# ---- files


def read(path: Path) -> list[CollectiveTable]:
    """Raises ValueError that names the file and the field."""
    return tuned_files.read(path, _table, "table of collectives", "python -m moe_a2a tune collectives")


def _table(field: Field) -> CollectiveTable:
    kind, dtype = field["kind"].text(KINDS), field["dtype"].text(ROW_DTYPE_NAMES)
    steps = _steps(field["steps"], ALGORITHMS)
    if not steps:
        raise field["steps"].error("an array of steps")
    codecs = field["codecs"]
    if not isinstance(codecs.value, dict) or not set(codecs.value) <= set(CODECS):
        raise codecs.error(f"an object with some of {', '.join(CODECS)}")
    least = {name: codecs[name].integer(0, LARGEST) for name in codecs.value}
    # Older files lack what did not exist yet.
    most_in_words = field["most_in_words"].integer(0, MOST_IN_WORDS) if "most_in_words" in field.value else 0
    symmetric = _steps(field["symmetric"], (*ALGORITHMS, "direct")) if "symmetric" in field.value else ()
    return CollectiveTable(kind, dtype, steps, least, most_in_words, symmetric)


def _steps(field: Field, algorithms: Sequence[str]) -> tuple[CollectiveStep, ...]:
    steps: list[CollectiveStep] = []
    for step in field.items():
        parts = step.items()
        if len(parts) != len(CollectiveStep._fields):
            raise step.error(f"[{', '.join(CollectiveStep._fields)}]")
        most, blocks = parts[0].integer(1, LARGEST), parts[2].integer(0, launch_tables.LARGEST)
        if steps and most <= steps[-1].max_nbytes:
            raise step.error(f"a step for more than {steps[-1].max_nbytes} bytes, the previous step's limit")
        steps.append(CollectiveStep(most, parts[1].text(algorithms), blocks))
    return tuple(steps)


def write(path: Path, about: dict, tables: Sequence[CollectiveTable]) -> None:
    """Adds the tables to the file, replacing older ones of the same kinds and dtypes."""
    known = {(table.kind, table.dtype): table for table in (read(path) if path.exists() else [])}
    known |= {(table.kind, table.dtype): table for table in tables}
    tuned_files.write(path, about, "[max_nbytes, algorithm, num_blocks]", map(asdict, known.values()))
