"""The build backend: scikit-build-core, and PyTorch as a build requirement only where there is none to build for.

The extension fits one minor version of PyTorch, so it has to be built for the one that will load it. pip builds in an
isolated environment, but with the interpreter of the environment that it installs into: that environment's PyTorch can
be found by looking past the isolation, and then nothing is asked for. Tools that build with an interpreter of their own
(`python -m build`, uv) hide it, and an environment may have none yet: then the build gets a PyTorch from the package
index. Should that be another one than the program uses later, `import moe_a2a` says so.
"""

from __future__ import annotations

import os
import subprocess
import sys

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import (  # noqa: F401 (the hooks of PEP 517 and 660)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

TORCH = "torch>=2.6"


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return [*_scikit_build.get_requires_for_build_wheel(config_settings), *_torch()]


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return [*_scikit_build.get_requires_for_build_editable(config_settings), *_torch()]


def _torch() -> list[str]:
    """Nothing where the interpreter has a PyTorch, seen as cmake/torch.cmake sees it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for env in (None, environment):
        command = [sys.executable, "-c", "import torch"]
        if subprocess.run(command, env=env, stderr=subprocess.DEVNULL).returncode == 0:
            return []
    return [TORCH]
