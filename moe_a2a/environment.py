"""Environment variables that switch something on, or give a number of seconds. An error names the variable."""

from __future__ import annotations

import math
import os

from moe_a2a import arguments

OFF, ON = ("", "0", "false", "no", "off"), ("1", "true", "yes", "on")


def is_on(variable: str) -> bool:
    """1 or 0, or one of these words, in any case. Unset or empty: off."""
    text = os.environ.get(variable, "")
    if (word := text.strip().lower()) in OFF:
        return False
    if word not in ON:
        raise ValueError(f"the environment variable {variable} is {arguments.shown(text)}; set it to 1 or 0")
    return True


def seconds(variable: str, default: float) -> float:
    """For a constructor's timeout=. Unset or empty: the default."""
    text = os.environ.get(variable) or str(default)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= arguments.MAX_TIMEOUT:
        raise ValueError(
            f"the environment variable {variable} is {arguments.shown(text)}; set it to a number of seconds in "
            f"(0, {arguments.MAX_TIMEOUT:.0f}]"
        )
    return number
