"""Whether this thread is building a graph, for torch.compile, torch.export or make_fx()."""

from __future__ import annotations

import torch
from torch._guards import detect_fake_mode

_MAKE_FX = torch._C._TorchDispatchModeKey.PROXY


def is_tracing() -> bool:
    """torch.compiler.is_compiling() is also true while another thread compiles."""
    if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and detect_fake_mode() is not None):
        return True
    return torch._C._get_dispatch_mode(_MAKE_FX) is not None
