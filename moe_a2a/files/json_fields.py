"""Typed access to untrusted JSON: errors name the place, "tables[0].hidden"."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from typing import Any

LARGEST = (1 << 53) - 1  # the largest integer that every JSON reader preserves


class FieldError(ValueError):
    """A value is missing, or has the wrong type or size."""


class Field:
    """A value and its place in the document."""

    def __init__(self, value: Any, place: str = ""):
        self.value = value
        self._place = place

    def __getitem__(self, key: str) -> Field:
        """A member of an object."""
        if not isinstance(self.value, dict):
            raise self.error(f"an object with {quoted(key)}")
        if key not in self.value:
            raise FieldError(f"{self._name(key)} is missing")
        return Field(self.value[key], self._name(key))

    def items(self) -> list[Field]:
        """The elements of an array."""
        if not isinstance(self.value, list):
            raise self.error("an array")
        return [Field(item, f"{self._place}[{i}]") for i, item in enumerate(self.value)]

    def integer(self, least: int = 0, most: int = LARGEST) -> int:
        if type(self.value) is not int or not least <= self.value <= most:  # bool is an int
            raise self.error(f"an integer from {least} to {most}")
        return self.value

    def number(self, least: float = 0.0) -> float:
        if type(self.value) not in (int, float) or not least <= self.value < math.inf:
            raise self.error(f"a number from {least:g}")
        return self.value

    def text(self, choices: Sequence[str] = ()) -> str:
        if not isinstance(self.value, str) or (choices and self.value not in choices):
            raise self.error(f"one of {', '.join(choices)}" if choices else "a string")
        return self.value

    def error(self, wanted: str) -> FieldError:
        return FieldError(f"{self._place or 'the document'} is {quoted(self.value)}, not {wanted}")

    def _name(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key


def loads(data: bytes) -> Field:
    """Rejects NaN and Infinity: Python's parser accepts them, but they are not JSON."""
    try:
        return Field(json.loads(data, parse_constant=_refuse))
    except RecursionError:
        raise FieldError("the JSON is nested too deeply") from None
    except ValueError as error:  # from JSON, UTF-8, or integers with thousands of digits
        raise FieldError(f"it is not JSON, or it is truncated: {error}") from None


def quoted(value: Any) -> str:
    """For messages: short, single-line and printable."""
    return reprlib.repr(value).encode("ascii", "backslashreplace").decode()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")
