"""Where and when figures were measured."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_a2a import devices, installation
from moe_a2a.commands import checkout
from moe_a2a.commands.command_line import UsageError


def about(device: torch.device) -> dict[str, Any]:
    """Called by a rank."""
    on_gpu, num_ranks = device.type == "cuda", dist.get_world_size()
    return {
        "machine": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "name": f"{devices.short_name(device)}_{num_ranks}",
        "ranks": num_ranks,
        "driver": _driver() if on_gpu else None,
        "cpu": _processor(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {
            "moe_a2a": installation.version("moe_a2a"),
            "commit": checkout.commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "CUDA": torch.version.cuda,
            "HIP": torch.version.hip,
            "NCCL": _nccl() if on_gpu else None,
            "deep_ep": installation.version("deep_ep"),
            "deep_gemm": installation.version("deep_gemm"),
        },
    }


def _nccl() -> str:
    """The version of the library in use, which LD_PRELOAD may have put in place of the one that PyTorch was built with."""
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL(
            "librccl.so.1" if torch.version.hip else "libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD
        )
        library.ncclGetVersion(ctypes.byref(number))
    except OSError:  # linked into PyTorch
        return ".".join(map(str, torch.cuda.nccl.version()))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def _processor() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return f"{found.group(1) if found else platform.machine()}, {os.cpu_count()} cores"


def available_memory() -> int | None:
    """Bytes that processes can still get without swapping, as Linux estimates them; None where /proc does not say."""
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(found.group(1)) if found else None


def check_memory(what: str, nbytes: int, remedy: str) -> None:
    """For the CPU, where all ranks share the machine's memory. If it runs out, the kernel ends processes, not only ours."""
    available = available_memory()
    if available is not None and nbytes > available:
        raise UsageError(
            f"{what} take {nbytes >> 20} MiB or more, and {available >> 20} MiB of memory are available; {remedy}"
        )


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None
