"""Imports a submission in a rank's process, under the names that the public evaluator gives it."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "submissions"


class SubmissionError(Exception):
    """The file is not a submission."""


class Submission:
    """An imported submission.py: custom_kernel(data), and traced() if it has one."""

    def __init__(self, path: Path):
        _add_contract_modules()
        spec = importlib.util.spec_from_file_location("submission", path)
        if spec is None or spec.loader is None:
            raise SubmissionError(f"{path} is not a Python file")
        sys.path.insert(0, str(path.parent))  # as for `python submission.py`: it may import files beside it
        module = importlib.util.module_from_spec(spec)
        sys.modules["submission"] = module
        spec.loader.exec_module(module)
        kernel = getattr(module, "custom_kernel", None)
        if not callable(kernel):
            raise SubmissionError(f"{path.name} has no function custom_kernel(data)")
        self.kernel: Callable[[Any], Any] = kernel
        self._traced = getattr(module, "traced", lambda: None)

    def traced(self) -> Any:
        """The object whose kernels a trace records; None if there is none."""
        return self._traced()


def _add_contract_modules() -> None:
    """Most public submissions begin with `from task import input_t, output_t`, which are only annotations."""
    task = types.ModuleType("task")
    task.input_t = task.output_t = Any  # type: ignore[attr-defined]
    sys.modules.setdefault("task", task)


def entry_path(problem_entries: str, name: str) -> Path | None:
    """An entry of the tree, by name; "null" exists for every problem."""
    if Path(name).name != name:
        return None
    for path in (FOLDER / problem_entries / f"{name}.py", FOLDER / f"{name}.py"):
        if path.exists():
            return path
    return None


def entry_names(problem_entries: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / problem_entries).glob("*.py"))
