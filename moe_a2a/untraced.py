"""A decorator that hides methods from torch.compile()."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

Call = TypeVar("Call", bound=Callable[..., Any])


def untraced(call: Call) -> Call:
    """Decorates a method that Dynamo must not trace. Where torch.compile() breaks a graph, as in DDP's forward pass, Dynamo
    compiles every Python function that is called, the methods of a process group and of its works too. It cannot compile a
    group's, and crashed in those of works on streams."""
    return _Untraced(call)  # type: ignore[return-value]


class _Untraced:
    """A descriptor, since a wrapper function would itself be traced. It does not import Dynamo, which takes seconds: until somebody
    else does, nothing is compiled."""

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
