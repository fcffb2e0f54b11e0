"""Decorators for the methods of a process group that PyTorch calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from moe_a2a.torch_backend.work import Work

_c10d: Any = torch._C._distributed_c10d


class untraced:  # noqa: N801 (a decorator)
    """Decorates a method that Dynamo shall not trace. Where torch.compile() breaks a graph, as in DDP's forward pass, PyTorch calls
    the group while Dynamo compiles every Python function that gets a tensor, and it cannot compile a process group's.

    A descriptor, since a function around the method would be traced itself. It does not import Dynamo, which takes seconds; until
    another does, nothing is compiled."""

    def __init__(self, call: Callable[..., Any]):
        self._call = call
        self._untraced: Callable[..., Any] | None = None

    def __get__(self, group: Any, kind: type | None = None) -> Any:
        call = self._untraced or self._untraced_call()
        return call if group is None else MethodType(call, group)

    def _untraced_call(self) -> Callable[..., Any]:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if disable is None:
            return self._call
        self._untraced = disable(self._call)
        return self._untraced


def tracked(call: Callable[..., Any]) -> untraced:
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
