"""The options of a collective call, as PyTorch passes them: the operator and the timeout."""

from __future__ import annotations

from typing import Any

import torch

_RedOp: Any = torch._C._distributed_c10d.ReduceOp.RedOpType  # type: ignore[attr-defined]
OPS = {_RedOp.SUM: "sum", _RedOp.MAX: "max", _RedOp.MIN: "min", _RedOp.AVG: "avg"}
_OP_NAMES = {int(kind): name for kind, name in OPS.items()}


def reduce_options(kind: Any, opts: Any, op: Any, timeout: Any) -> Any:
    """The options of a reduction: `opts`, unless it is missing or an operator."""
    if opts is not None and hasattr(opts, "reduceOp"):
        return opts
    made, op = with_timeout(kind(), timeout), op if opts is None else opts
    if op is not None:
        made.reduceOp = op
    return made


def with_timeout(opts: Any, timeout: Any) -> Any:
    if timeout is not None:
        opts.timeout = timeout
    return opts


def op_of(opts: Any) -> str:
    """The operator as Collectives names it; "" if Collectives lacks it."""
    op = opts.reduceOp
    return _OP_NAMES.get(int(getattr(op, "op", op)), "")
