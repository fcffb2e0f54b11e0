"""What the demo's processes return for a model. Imports no transformers, which takes seconds: the command needs none of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOLERANCE = 1e-5


@dataclass
class WholeRun:
    """The results of the untouched model in one process."""

    logits: np.ndarray  # fp32 [sequences, length, vocabulary]
    expert_bytes: int  # weights of all experts


@dataclass
class RankRun:
    """The results of one rank for one model."""

    logits: np.ndarray  # fp32 [sequences, length, vocabulary], for this rank's part of the batch
    tokens_per_expert: np.ndarray  # int64 [num_experts]: this rank's routes, over all layers
    expert_bytes: int  # weights of the experts on this rank


def max_difference(runs: Sequence[RankRun], expected: np.ndarray) -> float:
    """Over all logits of all ranks; NaN if one is NaN."""
    return float(np.abs(np.concatenate([run.logits for run in runs]) - expected).max())
