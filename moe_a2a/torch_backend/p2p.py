"""Sends and receives of batch_isend_irecv(), as one batch of the delegate.

NCCL runs single sends and receives one after another: if two ranks both send first, both wait for ever. A batch has no order.
PyTorch makes a batch only for groups whose class is ProcessGroup itself; for any other group it calls send() and recv() one by
one. So these methods check whether batch_isend_irecv() is the caller, collect its operations, and start all of them at the last.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from moe_a2a.torch_backend.work import JointWork

MOST_FRAMES = 12  # between batch_isend_irecv() and here: isend(), and the wrappers of PyTorch and Dynamo


class Batches(threading.local):
    """The batch that each thread collects for a group."""

    def __init__(self) -> None:
        self._operations: Sequence[Any] | None = None  # of the batch
        self._calls: list[tuple[Any, ...]] = []
        self._started: list[Any] = []  # the delegate's work, once there is one

    def call(self, group: Any, delegate: Any, name: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """delegate.send() or recv(), by name: at once, or with the others of its batch."""
        operations = _operations_of_caller() if delegate.supports_coalescing else None
        if operations is None or len(operations) < 2:
            return getattr(delegate, name)(tensors, peer, tag)
        if operations is not self._operations:  # a batch before may have failed halfway
            self._operations, self._calls, self._started = operations, [], []
        self._calls.append((getattr(delegate, name), tensors, peer, tag))
        work = JointWork(tensors, self._started)
        if len(self._calls) == len(operations):
            self._start(group, tensors[0].device)
        return work

    def _start(self, group: Any, device: torch.device) -> None:
        calls, started = self._calls, self._started
        self._operations, self._calls, self._started = None, [], []
        group._start_coalescing(device)
        try:
            for call, *arguments in calls:
                call(*arguments)
        finally:
            started.append(group._end_coalescing(device))


def _operations_of_caller() -> Sequence[Any] | None:
    """The argument of the batch_isend_irecv() that is calling, if all its tensors are on one device."""
    frame = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code.co_name == "batch_isend_irecv":
            operations: Sequence[Any] = frame.f_locals.get("p2p_op_list", ())
            return operations if len({operation.tensor.device for operation in operations}) == 1 else None
    return None
