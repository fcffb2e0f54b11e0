"""Files of measured tables: where they are, and what all of them have in common."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
import torch

from moe_a2a import devices
from moe_a2a.files import replaced_files
from moe_a2a.files.json_fields import Field, FieldError, loads

SHIPPED = Path(__file__).parent / "tuned"
OWN = platformdirs.user_cache_path("moe_a2a", appauthor=False) / "tuned"  # written by `tune`

Table = TypeVar("Table")
Step = TypeVar("Step", bound=tuple[Any, ...])


def own_file(prefix: str, device: torch.device, num_ranks: int) -> Path:
    """The file that `tune` writes on this machine."""
    return OWN / f"{prefix}{devices.short_name(device)}_{num_ranks}.json"


def chosen_file(named: str | os.PathLike[str] | None, prefix: str, device: torch.device, num_ranks: int) -> Path | None:
    """The file `named`, else this machine's own, else the shipped one; for the CPU only the first."""
    if named:
        return Path(named)
    if device.type != "cuda":
        return None
    own = own_file(prefix, device, num_ranks)
    # Unlike Path.exists(), this does not raise for a cache below a folder that this user may not look into.
    return next((path for path in (own, SHIPPED / own.name) if os.path.exists(path)), None)


def merged(steps: Iterable[Step]) -> list[Step]:
    """Merges adjacent steps, (limit, choice...), with the same choice."""
    found: list[Step] = []
    for step in steps:
        if found and found[-1][1:] == step[1:]:
            found.pop()
        found.append(step)
    return found


def read(path: Path, parse: Callable[[Field], Table], what: str, command: str) -> list[Table]:
    """Raises ValueError that names the file (a `what`), the field, and the command that writes such a file."""
    try:
        if path.exists() and not path.is_file():
            raise FieldError("it is not a regular file")
        tables = [parse(field) for field in loads(path.read_bytes())["tables"].items()]
        if not tables:
            raise FieldError("it holds no table")
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror}; write one with `{command}`") from None
    except FieldError as error:  # the command reads the table in effect, too
        raise ValueError(
            f"{what} {path}: {error}; name a file that `{command}` has written, or remove this one"
        ) from None
    return tables


def write(path: Path, about: dict, steps: str, tables: Iterable[dict[str, Any]]) -> None:
    """`steps`: the meaning of a step's numbers, for readers of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(table) for table in tables)
    head = f'"about": {json.dumps(about, indent=1)},\n "steps": "{steps}"'
    replaced_files.write_text(path, f'{{\n {head},\n "tables": [\n  {lines}\n ]\n}}\n')
