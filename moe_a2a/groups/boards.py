"""Where the ranks of a group post values for each other: a torch group's store, messages of an MPI communicator, or a
dictionary shared by threads.

A board knows nothing about a meeting's order or deadline; see moe_a2a/groups/rendezvous.py.
"""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any, Protocol


class Board(Protocol):
    def post(self, key: str, value: Any) -> None: ...

    def look(self, keys: list[str]) -> dict[str, Any]:
        """The values of those keys that have been posted."""
        ...

    def settle(self, key: str, value: Any) -> Any:
        """Posts the value unless the key has one, in one step; returns the value that it has then, the same on every rank."""
        ...

    def wait(self, seconds: float) -> None:
        """Waits until something new may have been posted, at most `seconds`."""
        ...

    def forget(self, keys: list[str]) -> None:
        """Removes values that this rank has posted and nobody reads any more."""
        ...


class ThreadBoard:
    """For ranks that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._changed = threading.Condition()

    def post(self, key: str, value: Any) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def look(self, keys: list[str]) -> dict[str, Any]:
        with self._changed:
            return {key: self._values[key] for key in keys if key in self._values}

    def settle(self, key: str, value: Any) -> Any:
        with self._changed:
            self._changed.notify_all()
            return self._values.setdefault(key, value)

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)

    def forget(self, keys: list[str]) -> None:
        with self._changed:
            for key in keys:
                self._values.pop(key, None)


def since_restart(store: Any) -> Any:
    """The store without what ranks wrote before torchrun restarted them: with one agent torchrun keeps its store. With several
    agents nothing is hidden, since each counts its own restarts and the number may differ between ranks."""
    import torch.distributed as dist

    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        return store
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class StoreBoard:
    """The store of a torch.distributed group. It answers at once whether a key exists, so a rank that never posts can be
    named; a collective of the group would hang, or fail without a name."""

    def __init__(self, store: Any):
        import torch.distributed as dist

        self._store = dist.PrefixStore("moe_a2a", since_restart(store))
        self._pause = 0.0005
        self._asleep = threading.Event()  # never set: sleeps in pieces that see Ctrl-C

    def post(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]

    def look(self, keys: list[str]) -> dict[str, Any]:
        if not keys:
            return {}
        there = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        if there:
            self._pause = 0.0005
        return {key: pickle.loads(self._store.get(key)) for key in there}

    def settle(self, key: str, value: Any) -> Any:
        # An empty expected value means that the key has none.
        return pickle.loads(self._store.compare_set(key, "", pickle.dumps(value)))  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        self._asleep.wait(min(self._pause, seconds))
        self._pause = min(2 * self._pause, 0.02)

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete_key(key)


class MpiBoard:
    """An mpi4py communicator: each value is a message to every other rank, under its own tag."""

    TAG = 20717

    def __init__(self, communicator: Any):
        self._communicator = communicator
        self._values: dict[str, Any] = {}
        self._sends: list[Any] = []  # requests still in progress
        self._asleep = threading.Event()

    def post(self, key: str, value: Any) -> None:
        self._values[key] = value
        for rank in range(self._communicator.Get_size()):
            if rank != self._communicator.Get_rank():
                self._sends.append(self._communicator.isend((key, value), dest=rank, tag=self.TAG))

    def look(self, keys: list[str]) -> dict[str, Any]:
        self._sends = [request for request in self._sends if not request.test()[0]]
        for rank in range(self._communicator.Get_size()):
            while rank != self._communicator.Get_rank() and self._communicator.iprobe(source=rank, tag=self.TAG):
                key, value = self._communicator.recv(source=rank, tag=self.TAG)
                self._values[key] = value
        return {key: self._values[key] for key in keys if key in self._values}

    def settle(self, key: str, value: Any) -> Any:
        raise TypeError("messages have no place where the first value wins; use a group with a store")

    def wait(self, seconds: float) -> None:
        self._asleep.wait(min(0.0005, seconds))

    def forget(self, keys: list[str]) -> None:
        for key in keys:
            self._values.pop(key, None)


class PartOfBoard:
    """The keys of a board that begin with `prefix`, as a board."""

    def __init__(self, board: Board, prefix: str):
        self._board = board
        self._prefix = prefix

    def post(self, key: str, value: Any) -> None:
        self._board.post(self._prefix + key, value)

    def look(self, keys: list[str]) -> dict[str, Any]:
        found = self._board.look([self._prefix + key for key in keys])
        return {key.removeprefix(self._prefix): value for key, value in found.items()}

    def settle(self, key: str, value: Any) -> Any:
        return self._board.settle(self._prefix + key, value)

    def wait(self, seconds: float) -> None:
        self._board.wait(seconds)

    def forget(self, keys: list[str]) -> None:
        self._board.forget([self._prefix + key for key in keys])
