"""Which target's kernels run on a PyTorch device."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from moe_a2a import _core, environment


def target_of(device: torch.device) -> str:
    """The target whose kernels run on a PyTorch device. ROCm builds of PyTorch call their devices "cuda" too."""
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return "hip" if torch.version.hip else "cuda"
    raise ValueError(f"device={str(device)!r} is not supported; pass a cpu or cuda device")


def default_device() -> torch.device:
    """The device in MOE_A2A_DEVICE; else this process's GPU if this build and this machine have one, else the CPU."""
    return with_index(_device_of_environment() or torch.device(default_device_type()))


def _device_of_environment() -> torch.device | None:
    name = os.environ.get("MOE_A2A_DEVICE")
    if not name:
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"the environment variable MOE_A2A_DEVICE is {name!r}; set it to cpu, cuda, or cuda:<index>")
    if not _exists(device):
        raise ValueError(
            f"the environment variable MOE_A2A_DEVICE is {name!r}, but PyTorch finds {torch.cuda.device_count()} GPUs; set "
            "it to cpu, or to a GPU that PyTorch finds"
        )
    return device


def _exists(device: torch.device) -> bool:
    return device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()


def checked_device(rank: int, device: Any) -> torch.device:
    """A constructor's device=, with an index if it needs one."""
    if device is None:
        return default_device()
    expected = 'pass "cpu", "cuda" or "cuda:<index>"'
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"device={device!r} is not a device on rank {rank}; {expected}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r} on rank {rank}; {expected}")
    if not _exists(chosen):
        raise ValueError(
            f"device={str(device)!r}, but PyTorch finds {torch.cuda.device_count()} GPUs on rank {rank}; "
            'pass "cpu", or a GPU that PyTorch finds'
        )
    return with_index(chosen)


def with_index(device: torch.device) -> torch.device:
    """ "cuda" becomes "cuda:<this process's GPU>". There is one CPU: "cpu:0" is "cpu"."""
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", this_gpu()) if device.type == "cuda" and device.index is None else device


def this_gpu() -> int:
    """The current GPU. Every process starts on GPU 0. If a process under torchrun is still there, this takes the GPU of its
    LOCAL_RANK and makes it current, because NCCL's collectives on Python objects run on the current GPU."""
    current, num_gpus = torch.cuda.current_device(), torch.cuda.device_count()
    local_rank = os.environ.get("LOCAL_RANK", "")
    own = int(local_rank) if local_rank.isdecimal() else 0
    if ranks_may_share_gpus():
        own %= num_gpus
    if current == 0 and 0 < own < num_gpus:
        torch.cuda.set_device(own)
        return own
    return current


def ranks_may_share_gpus() -> bool:
    """MOE_A2A_SHARE_GPUS=1: processes that share a GPU are no error. The driver divides the GPU's time among them, so a
    kernel that waits for another rank's never keeps that one from running, but every wait takes milliseconds."""
    return environment.is_on("MOE_A2A_SHARE_GPUS")


def gpu_identity(device: torch.device) -> str | None:
    """Names the physical GPU, independently of CUDA_VISIBLE_DEVICES; None for the CPU. If ranks may share GPUs, it names the
    process too: threads may not, because the kernels of one process can wait for each other in its queues.

    ROCm has one uuid for all GPUs without a serial number, such as virtual functions: there the PCI address is part of it."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    pci = [getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")]
    gpu = str(getattr(properties, "uuid", pci))
    if torch.version.hip:
        gpu += " at PCI " + ":".join(f"{part:02x}" for part in pci)
    return f"{gpu} in process {os.getpid()} of {platform.node()}" if ranks_may_share_gpus() else gpu


def check_one_rank_per_gpu(identities: list[str | None]) -> None:
    """`identities`: gpu_identity() of every rank. Raises the same error on every rank."""
    first_rank: dict[str, int] = {}
    for rank, identity in enumerate(identities):
        if identity is not None and first_rank.setdefault(identity, rank) != rank:
            raise ValueError(
                f"ranks {first_rank[identity]} and {rank} are both on GPU {identity}; each rank needs a GPU of its own. "
                "Before making the ExpertParallel call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), or pass "
                "device=f'cuda:{local_rank}'. To try several ranks on one GPU, each in a process of its own, set "
                "MOE_A2A_SHARE_GPUS=1: correct, but slow"
            )


def keep_for_current_stream(*tensors: torch.Tensor) -> None:
    """For tensors that we made and that a later call uses, perhaps on a different stream: PyTorch's allocator then reuses
    their memory only after what the current stream has queued. Callers do this for their own tensors."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def default_device_type() -> str:
    """The type of default_device(), without touching a GPU."""
    if (named := _device_of_environment()) is not None:
        return named.type
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
    """The float8 type that quantize="fp8" yields on a device: e4m3fnuz on gfx942, e4m3fn everywhere else."""
    if device.type == "cuda" and torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return torch.float8_e4m3fnuz if name.startswith("gfx942") else torch.float8_e4m3fn
    return torch.float8_e4m3fn
