"""Sends and receives of batch_isend_irecv(), as one batch of the delegate.

NCCL makes single sends and receives of two ranks one after another: if both send first, both wait for ever. A batch has no order.
PyTorch makes one only for groups whose class is ProcessGroup itself; on any other it calls send() and recv() in turn. So these
look whether batch_isend_irecv() calls them, collect its operations, and start all with the last.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from moe_a2a.torch_backend.work import Work

MOST_FRAMES = 12  # between batch_isend_irecv() and here: isend(), and the wrappers of PyTorch and Dynamo


class Batches(threading.local):
    """Of a group: the batch that each thread collects."""

    def __init__(self) -> None:
        self._operations: Sequence[Any] | None = None  # of the batch
        self._collected: list[tuple[Any, BatchWork]] = []

    def call(self, group: Any, delegate: Any, name: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """delegate.send() or recv(), by name: at once, or with the others of its batch."""
        operations = _operations_of_caller() if delegate.supports_coalescing else None
        if operations is None or len(operations) < 2:
            return getattr(delegate, name)(tensors, peer, tag)
        if operations is not self._operations:  # a batch before may have failed halfway
            self._operations, self._collected = operations, []
        work = BatchWork(tensors)
        self._collected.append(((name, tensors, peer, tag), work))
        if len(self._collected) == len(operations):
            self._start(group, delegate, tensors[0].device)
        return work

    def _start(self, group: Any, delegate: Any, device: torch.device) -> None:
        collected = self._collected
        self._operations, self._collected = None, []
        group._start_coalescing(device)
        try:
            for (name, *arguments), _ in collected:
                getattr(delegate, name)(*arguments)
        finally:
            batch = group._end_coalescing(device)
        for _, work in collected:
            work.batch = batch


class BatchWork(Work):
    """An operation of a batch; over when the batch is."""

    batch: Any

    def wait(self, timeout: timedelta | None = None) -> bool:
        done: bool = self.batch.wait() if timeout is None else self.batch.wait(timeout)
        return done

    def get_future(self) -> Any:
        return self.batch.get_future().then(lambda _: self._results)

    def is_completed(self) -> bool:
        completed: bool = self.batch.is_completed()
        return completed


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
