"""The cases of a problem: its YAML file, and the one-line form that other evaluators use for cases."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "problems"
MOST_SEED = 2**31 - 1  # so that two of them combined fit a generator
MOST_DIGITS = 20
LINE_PART = re.compile(r"\s*([A-Za-z_]+)\s*:\s*([A-Za-z_]+|[+-]?[0-9]+)\s*")


class CaseFileError(Exception):
    """A file of cases, or a problem's YAML file, is unusable: where, and why."""


@dataclass(frozen=True)
class Case:
    """One shape. The names of the values are those of the published problems, including `seed` and `world_size`."""

    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    @property
    def spec(self) -> str:
        """num_experts: 8; experts_per_token: 2; ..."""
        return "; ".join(f"{name}: {value}" for name, value in self.values.items())

    @property
    def label(self) -> str:
        """The shape alone, for tables and plots."""
        return " ".join(str(value) for name, value in self.values.items() if name not in ("seed", "world_size"))

    def without_seed(self) -> Case:
        """For the ranks' processes, which also run the submission."""
        return Case({name: value for name, value in self.values.items() if name != "seed"})

    def with_values(self, **values: Any) -> Case:
        return Case({**self.values, **values})


@dataclass(frozen=True)
class ProblemFile:
    """The contents of problems/<name>.yml.

    tests, benchmarks: their shapes, in the order of scores. speed_of_light_us: the published bound per benchmark, or empty.
    test_timeout, benchmark_timeout: seconds after which a call counts as slow.
    shrinkable: the sizes that --shrunk may divide. entries: the folder of submissions/ with the entries in the tree; default:
    the problem's own name.
    """

    name: str
    summary: str
    tests: list[Case]
    benchmarks: list[Case]
    ranking_by: str = "geom"
    test_timeout: float = 60.0
    benchmark_timeout: float = 180.0
    entries: str = ""
    shrinkable: list[str] = field(default_factory=list)
    speed_of_light_us: list[float] = field(default_factory=list)


def shrunk(case: Case, names: list[str], divisor: int) -> Case:
    """The case with these sizes divided, rounded down to a multiple of 64, at least 64."""
    if divisor == 1:
        return case
    return case.with_values(**{name: max(64, case[name] // divisor // 64 * 64) for name in names})


def problem_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yml"))


def read_problem(path: Path) -> ProblemFile:
    import yaml

    try:
        fields = yaml.safe_load(_text_of(path))
    except yaml.YAMLError as error:
        raise CaseFileError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(fields, dict):
        raise CaseFileError(f"{path}: pass a mapping with name, summary, tests and benchmarks")
    try:
        tests, benchmarks = (
            [_checked(path, values) for values in fields.pop(name)] for name in ("tests", "benchmarks")
        )
        problem = ProblemFile(tests=tests, benchmarks=benchmarks, **fields)
    except (KeyError, TypeError) as error:
        raise CaseFileError(f"{path}: {error}") from None
    if problem.ranking_by != "geom":
        raise CaseFileError(f"{path}: ranking_by is {problem.ranking_by!r}; only geom, the geometric mean, is known")
    return problem


def _checked(path: Path, values: Any) -> Case:
    if not isinstance(values, dict) or not all(type(value) in (int, str, bool) for value in values.values()):
        raise CaseFileError(f"{path}: the case {values!r} is not a mapping of names to integers and words")
    if type(values.get("seed")) is not int:
        raise CaseFileError(f"{path}: the case {values!r} has no seed")
    return Case(dict(values))


def read_case_lines(path: Path) -> list[Case]:
    """One case per line, `name: value` joined by semicolons. A blank line is an error, as for the public evaluator."""
    cases = []
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        values: dict[str, Any] = {}
        for part in line.split(";"):
            matched = LINE_PART.fullmatch(part)
            if matched is None:
                raise CaseFileError(f"{path}:{number}: {part.strip()!r} is not `name: value` with a word or an integer")
            name, value = matched.groups()
            if name in values:
                raise CaseFileError(f"{path}:{number}: {name} is given twice")
            if len(value) > MOST_DIGITS:
                raise CaseFileError(f"{path}:{number}: {name} has {len(value)} characters, {MOST_DIGITS} at most")
            values[name] = int(value) if value.lstrip("+-").isdigit() else value
        if type(values.get("seed")) is not int:
            raise CaseFileError(f"{path}:{number}: the case has no seed")
        if not 0 <= values["seed"] <= MOST_SEED:
            raise CaseFileError(f"{path}:{number}: seed={values['seed']} is not in [0, {MOST_SEED}]")
        cases.append(Case(values))
    if not cases:
        raise CaseFileError(f"{path}: contains no cases")
    return cases


def _text_of(path: Path) -> str:
    """The text, with backslashes for what is not UTF-8: the parser then refuses that line by number."""
    return path.read_text(encoding="utf-8", errors="backslashreplace")


def combined_seed(seed: int, other: int) -> int:
    """Cantor's pairing of a case's seed with POPCORN_SEED: every pair gets a different number."""
    both = seed + other
    return seed + both * (both + 1) // 2
