"""What the options --device and --ranks of a command mean on this machine."""

from __future__ import annotations

import argparse

import torch

from moe_a2a import _core, devices
from moe_a2a.commands.command_line import UsageError

CPU_RANKS = 4


def device_type_of(options: argparse.Namespace) -> str:
    """ "cpu" or "cuda"; default: that of moe_a2a."""
    try:
        kind = options.device or devices.default_device_type()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if (target := devices.target_of(torch.device(kind))) not in _core.built_targets():
        raise UsageError(
            f"--device {kind}: this build has no {target} kernels, only {', '.join(_core.built_targets())}"
        )
    return kind


def num_processes(wanted: int | None, device_type: str) -> int:
    """How many ranks to start; None: one per GPU, or CPU_RANKS."""
    if device_type == "cpu":
        return wanted or CPU_RANKS
    num_gpus = torch.cuda.device_count()
    if (wanted or 1) > num_gpus:
        raise UsageError(f"--ranks {wanted or 1}: each rank needs a GPU, and PyTorch finds {num_gpus}")
    return wanted or num_gpus
