"""The commit that results name."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit of the checkout that the package runs from; outside a checkout, MOE_A2A_COMMIT."""
    if "MOE_A2A_COMMIT" in os.environ:
        return os.environ["MOE_A2A_COMMIT"]
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None
