"""Output for other tools: the lines of POPCORN_FD and the exit codes of the public evaluator."""

from __future__ import annotations

import base64
import errno
import fcntl
import os
from collections.abc import Mapping
from typing import TextIO

from moe_a2a.leaderboard.modes import CaseResult

OK, FAILED, BAD_CASES, NO_DESCRIPTOR = 0, 112, 113, 111


class Popcorn:
    """Writes `key: value` lines; without POPCORN_FD, nothing."""

    def __init__(self, file: TextIO | None):
        self._file = file

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Popcorn:
        """Raises OSError, ValueError or OverflowError if POPCORN_FD names no descriptor that can be written."""
        text = environment.get("POPCORN_FD")
        if text is None:
            return cls(None)
        descriptor = int(text)
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "it can only be read")
        # Left open at the end: it may be stdout, which is flushed later.
        return cls(os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False))

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def log(self, key: str, value: object) -> None:
        if self._file is not None:
            self._file.write(f"{key}: {' '.join(str(value).split())}\n")  # keeps a value on one line
            self._file.flush()

    def count(self, mode: str, number: int) -> None:
        self.log(f"{_prefix(mode)}-count", number)

    def case(self, mode: str, number: int, result: CaseResult) -> None:
        """test.{i}.spec, status, error; benchmark.{i}.spec, runs, mean, std, err, best, worst, report, status,
        error."""
        name = f"{_prefix(mode)}.{number}"
        self.log(f"{name}.spec", result.case.spec)
        if not result.passed:
            self.log(f"{name}.status", "fail")
            self.log(f"{name}.error", f"{result.verdict}: {result.message}")
        elif _prefix(mode) == "test":
            self.log(f"{name}.status", "pass")
        elif mode == "profile":
            self.log(f"{name}.report", base64.b64encode(result.summary.encode()).decode())
        else:
            for field, value in result.stats.as_dict().items():
                self.log(f"{name}.{field}", value)

    def check(self, passed: bool) -> None:
        self.log("check", "pass" if passed else "fail")


def _prefix(mode: str) -> str:
    return "benchmark" if mode in ("benchmark", "leaderboard", "profile") else "test"


def exit_code(mode: str, passed: bool, popcorn: Popcorn) -> int:
    """112 on failure. Only a leaderboard run read by other tools always returns 0, as theirs does: they read `check`."""
    if passed or (mode == "leaderboard" and popcorn.is_open):
        return OK
    return FAILED
