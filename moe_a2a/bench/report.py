"""The figures of a bench that prints each one as it is measured, and writes all as JSON with the commit."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_a2a.bench import machine
from moe_a2a.bench.cases import Case
from moe_a2a.bench.left_out import leave_out, left_out_lines
from moe_a2a.bench.limits import Limits
from moe_a2a.bench.options import write_outputs


class Report:
    """Kept by every rank; rank 0 prints and writes. A line is a dataclass of the bench's own, printed by its str()."""

    def __init__(self, device: torch.device, options: argparse.Namespace, header: str):
        self.about = about = machine.about(device) | {"seed": options.seed}
        self._options = options
        self.lines: list[Any] = []
        self.limits: list[Limits] = []  # one per case
        self.left_out: list[dict[str, str]] = []
        self._is_first = dist.get_rank() == 0
        self._is_written = True
        self._print(f"# {about['ranks']} ranks on {about['machine']}; torch {about['versions']['torch']}, ", end="")
        self._print(f"commit {about['versions']['commit']}, {about['date']}, seed {about['seed']}\n{header}")

    @property
    def failed(self) -> bool:
        """Whether one of ours has no figure, or the files are not written."""
        return not self._is_written or any(
            line["what"].startswith("moe_a2a") and "+" not in line["what"] for line in self.left_out
        )

    def limit(self, case: Case, limit: Limits) -> None:
        self.limits.append(limit)
        float8 = f", {limit.float8_tflops:.1f} (float8)" if limit.float8_tflops else ""
        self._print(
            f"# limits: {limit.tflops:.1f} TFLOP/s (square product, {case.dtype_name}){float8}, {limit.tbps:.2f} TB/s (copy)"
        )

    def add(self, line: Any) -> None:
        self.lines.append(line)
        self._print(line)

    def leave_out(self, what: str, case: str, why: str) -> None:
        leave_out(self.left_out, what, case, why)

    def print_left_out(self) -> None:
        for line in left_out_lines(self.left_out):
            self._print(line)

    def write(self) -> None:
        """Called after each case, so that an interrupted run keeps its results."""
        if not self._is_first:
            return
        content = {
            "about": self.about,
            "limits": [asdict(limit) for limit in self.limits],
            "lines": [asdict(line) for line in self.lines],
            "left_out": self.left_out,
        }
        self._is_written = write_outputs(self._options, self.about["name"], json.dumps(content, indent=1) + "\n")

    def _print(self, text: Any, end: str = "\n") -> None:
        if self._is_first:
            print(text, end=end, flush=True)


def compare(what: str, out: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raises ArithmeticError unless `out` is as expected. tolerance: relative to the norm."""
    error, norm = (out.float() - expected.float()).norm().item(), expected.float().norm().item()
    if not error <= tolerance * norm:
        raise ArithmeticError(f"{what}: error {error:.3g}, of {norm:.3g}")
