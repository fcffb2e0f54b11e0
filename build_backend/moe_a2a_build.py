"""The build backend: scikit-build-core, and PyTorch as a build requirement only if none that is new enough is installed.

The extension fits one minor version of PyTorch, so it must be built for the one that will load it. pip builds in an
isolated environment, but with the target environment's interpreter: we find that environment's PyTorch by looking past
the isolation, and then require nothing. Tools that build with their own interpreter (`python -m build`, uv) hide it, and
an environment may have no PyTorch yet, or one that pip will replace because it is too old: then the build gets one from
the package index. If the program later uses a different one, `import moe_a2a` says so.
"""

from __future__ import annotations

import os
import subprocess
import sys

if sys.version_info < (3, 10):  # noqa: UP036 (pip looks for a PyTorch for this Python first, and finds none)
    raise SystemExit(f"moe_a2a needs Python 3.10 or newer, this is {sys.version_info[0]}.{sys.version_info[1]}")

try:
    from scikit_build_core import build as _scikit_build
    from scikit_build_core.build import (  # noqa: F401 (the hooks of PEP 517 and 660)
        build_editable,
        build_sdist,
        build_wheel,
        get_requires_for_build_sdist,
        prepare_metadata_for_build_editable,
        prepare_metadata_for_build_wheel,
    )
except ModuleNotFoundError:
    raise SystemExit(
        "a build without isolation needs its requirements in the environment: "
        "pip install scikit-build-core nlohmann_json cmake ninja"
    ) from None

OLDEST = 2, 11  # its c10::Stream is the first with native_handle(), which the bindings call
TORCH = "torch>={}.{}".format(*OLDEST)
HAS_TORCH = f"import torch; raise SystemExit((*map(int, torch.__version__.split('.')[:2]),) < {OLDEST})"


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return [*_scikit_build.get_requires_for_build_wheel(config_settings), *_torch()]


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return [*_scikit_build.get_requires_for_build_editable(config_settings), *_torch()]


def _torch() -> list[str]:
    """Nothing if the interpreter has a PyTorch that is new enough, found in the same way as in cmake/torch.cmake."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for env in (None, environment):
        command = [sys.executable, "-c", HAS_TORCH]
        if subprocess.run(command, env=env, stderr=subprocess.DEVNULL).returncode == 0:
            return []
    return [TORCH]
