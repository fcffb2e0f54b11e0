"""Which target's kernels run on a PyTorch device."""

from __future__ import annotations

import os

import torch

from moe_a2a import _core


def target_of(device: torch.device) -> str:
    """The target whose kernels run on a PyTorch device. ROCm builds of PyTorch call their devices "cuda" too."""
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return "hip" if torch.version.hip else "cuda"
    raise ValueError(f"device={str(device)!r} has no target; pass a cpu or cuda device")


def default_device() -> torch.device:
    """What MOE_A2A_DEVICE names; else the current GPU where this build and this machine have one, else the CPU."""
    if os.environ.get("MOE_A2A_DEVICE"):
        return torch.device(os.environ["MOE_A2A_DEVICE"])
    kind = default_device_type()
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def default_device_type() -> str:
    """Of default_device(), found without touching a GPU."""
    if os.environ.get("MOE_A2A_DEVICE"):
        return torch.device(os.environ["MOE_A2A_DEVICE"]).type
    has_target = target_of(torch.device("cuda")) in _core.built_targets()
    return "cuda" if has_target and torch.cuda.is_available() else "cpu"


def short_name(device: torch.device) -> str:
    """Names the machine in files: "h200" for an NVIDIA H200, "mi300x" for an AMD Instinct MI300X, "cpu"."""
    if device.type != "cuda":
        return "cpu"
    words = torch.cuda.get_device_name(device).lower().replace("/", " ").split()
    rest = [word for word in words if word not in ("nvidia", "amd", "instinct", "tesla", "geforce")]
    return "_".join(rest) or "gpu"


def float8_dtype(device: torch.device) -> torch.dtype:
    """The float8 type that quantize="fp8" makes on a device: gfx942 has e4m3fnuz, everything else e4m3fn."""
    if device.type == "cuda" and torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return torch.float8_e4m3fnuz if name.startswith("gfx942") else torch.float8_e4m3fn
    return torch.float8_e4m3fn
