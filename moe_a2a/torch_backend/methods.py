"""A decorator for the methods of a process group that PyTorch calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moe_a2a.torch_backend.work import Work
from moe_a2a.untraced import untraced

_c10d: Any = torch._C._distributed_c10d


def tracked(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates an untraced method whose first argument is what it writes: wait_tensor() of that waits for the call under
    allow_inflight_collective_as_graph_input_ctx(), as in PyTorch's own groups."""

    @functools.wraps(call)
    def call_and_register(group: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        work = call(group, outputs, *args, **kwargs)
        if _c10d._allow_inflight_collective_as_graph_input():
            # C++ needs a work that is more than its Python object.
            made = _c10d._create_work_from_future(work.get_future()) if isinstance(work, Work) else work
            for x in torch.utils._pytree.tree_leaves(outputs):
                _c10d._register_work(x, made)
        return work

    return untraced(call_and_register)
