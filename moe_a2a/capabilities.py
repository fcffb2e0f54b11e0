"""What Collectives can do on a machine, and which features of the machine they leave unused: Collectives.capabilities()."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h


@dataclass(frozen=True)
class InNetwork:
    """A reduction performed outside the GPUs.

    Attributes:
        supported: whether this machine has it, as far as it can be queried.
        used: whether Collectives use it.
        reason: why it is not used, or not available.
        fallback: what runs instead.
    """

    supported: bool
    used: bool
    reason: str
    fallback: str


@dataclass(frozen=True)
class Capabilities:
    """See Collectives.capabilities().

    Attributes:
        collectives: each collective with the arguments it accepts.
        dtypes: of tensors, by their torch names.
        max_errors: the codecs, with the bound of moe_a2a.codecs.max_error().
        multicast: loads and stores that NVSwitch reduces and copies (NVLS).
        sharp: reductions in InfiniBand switches.
    """

    device: str
    num_ranks: int
    collectives: dict[str, tuple[str, ...]]
    operators: tuple[str, ...]
    dtypes: tuple[str, ...]
    algorithms: tuple[str, ...]
    max_errors: dict[str, float]
    multicast: InNetwork
    sharp: InNetwork


FALLBACK = "one_shot and two_shot: ranks write into each other's memory, and each reduces its share itself"


def multicast(device: torch.device) -> InNetwork:
    """Asks the driver; creates nothing."""
    if device.type != "cuda":
        return InNetwork(False, False, "the ranks are on the CPU", FALLBACK)
    if torch.version.hip:
        return InNetwork(False, False, "AMD GPUs have no switch that reduces", FALLBACK)
    supported = _driver_says(device.index or 0)
    if supported is None:
        return InNetwork(False, False, "the CUDA driver could not be queried", FALLBACK)
    reason = "no kernel here uses it" if supported else "the CUDA driver says that this GPU has no multicast objects"
    return InNetwork(supported, False, reason, FALLBACK)


def sharp() -> InNetwork:
    return InNetwork(False, False, "Collectives join the ranks of one machine, without a network between", FALLBACK)


def _driver_says(index: int) -> bool | None:
    """None if no driver answers. Uses a symbol of this process or of the driver's library, and no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, value = ctypes.c_int(), ctypes.c_int()
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceGetAttribute(ctypes.byref(value), _MULTICAST_SUPPORTED, device)
        )
    except (OSError, AttributeError):
        return None
    return None if failed else value.value != 0
