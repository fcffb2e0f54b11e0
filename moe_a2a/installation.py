"""What is installed. check(): the extension exists and was built for this PyTorch. `import moe_a2a` calls it once, before it
loads the extension: a mismatch would fail later with an undefined symbol, or not at all."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent


def check() -> None:
    """Raises ImportError that says what is missing and which command fixes it."""
    torch = _torch()
    if importlib.util.find_spec("moe_a2a._core") is None:
        raise ImportError(missing_extension())
    build_info = importlib.import_module("moe_a2a._build_info")
    wrong = mismatch(build_info, torch)
    if wrong is not None:
        raise ImportError(f"{wrong}. {_how_to_build()}")
    try:
        importlib.import_module("moe_a2a._core")
    except ImportError as error:
        raise ImportError(
            f"moe_a2a's extension, built for {_describe(build_info)}, does not load into PyTorch "
            f"{torch.__version__}: {error}. {_how_to_build()}"
        ) from error


def mismatch(build_info: Any, torch: Any) -> str | None:
    """What prevents an extension built for `build_info` from running in `torch`, naming both; None if nothing does.

    PyTorch keeps its binary interface only within a minor version. The runtimes of CUDA and HIP are compatible within a major
    version."""
    if _minor(build_info.TORCH) != _minor(torch.__version__):
        return f"moe_a2a was built for PyTorch {build_info.TORCH}, this is PyTorch {torch.__version__}"
    cxx11_abi = bool(torch._C._GLIBCXX_USE_CXX11_ABI)
    if bool(build_info.TORCH_CXX11_ABI) != cxx11_abi:
        return (
            f"moe_a2a was built for PyTorch {build_info.TORCH} with _GLIBCXX_USE_CXX11_ABI="
            f"{int(build_info.TORCH_CXX11_ABI)}, this PyTorch {torch.__version__} has {int(cxx11_abi)}"
        )
    for what, built, kind, needed in (
        ("by nvcc", build_info.CUDA, "CUDA", torch.version.cuda),
        ("for the HIP runtime", build_info.HIP, "HIP", torch.version.hip),
    ):
        if built and needed and _major(built) != _major(needed):
            return (
                f"moe_a2a's kernels were built {what} {built}, this PyTorch {torch.__version__} is for {kind} {needed}; the major "
                "versions have to be the same"
            )
    return None


def version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def architectures(target: str) -> list[str]:
    """The GPU architectures of a built target, such as ["80", "90"]; [] for "cpu"."""
    build_info: Any = importlib.import_module("moe_a2a._build_info")
    named = {"cuda": build_info.CUDA_ARCHITECTURES, "hip": build_info.HIP_ARCHITECTURES}.get(target, "")
    return [name for name in named.split(";") if name]


def missing_extension() -> str:
    where = "a source checkout" if _is_checkout() else "an incomplete installation"
    version = ".".join(map(str, sys.version_info[:2]))
    shadowed = (
        "If `pip install` has installed moe_a2a into this environment, this folder hides it: run from another folder. "
        if _is_checkout()
        else ""
    )
    return (
        f"the compiled extension moe_a2a._core is missing: {ROOT} is {where} without one for Python {version}. "
        f"{shadowed}{_how_to_build()}"
    )


def _how_to_build() -> str:
    if _is_checkout():
        return f"Build it: `make -C {ROOT.parent} setup` (then use its .venv), or `pip install {ROOT.parent}`."
    return (
        "Build it for this environment: `pip install --force-reinstall --no-deps --no-cache-dir <source of moe_a2a>`."
    )


def _is_checkout() -> bool:
    return (ROOT.parent / "CMakeLists.txt").exists()


def _torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            "moe_a2a needs PyTorch, which this environment lacks. Install it: `pip install torch`"
        ) from None


def _describe(build_info: Any) -> str:
    gpu_sides = [
        f" and {name} {version}" for name, version in (("CUDA", build_info.CUDA), ("HIP", build_info.HIP)) if version
    ]
    return f"Python {build_info.PYTHON}, PyTorch {build_info.TORCH}{''.join(gpu_sides)}"


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _major(version: str) -> str:
    return version.split(".")[0]
