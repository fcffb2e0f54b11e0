"""Ranks that stay up: processes that take one program after the other.

On a GPU a process needs seconds before its first kernel, more than most tests take. So the ranks are started once and
serve every test. One that hangs, dies or loses its GPU takes all of them with it, and the next test starts new ones.
"""

from __future__ import annotations

import builtins
import faulthandler
import io
import marshal
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import _pytest.assertion.rewrite
import ranks
import torch
import torch.distributed as dist

import moe_a2a

START_SECONDS = 60.0
TESTS = Path(__file__).parent


class RankPool:
    """`num_ranks` processes; a program runs on the first of them."""

    def __init__(self, num_ranks: int):
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks = []
        for rank in range(num_ranks):
            ours, theirs = ranks.context.Pipe()
            process = ranks.context.Process(
                target=_serve, args=(theirs, self._folder.name, rank, num_ranks), daemon=True
            )
            process.start()
            theirs.close()  # so that a rank's death closes the pipe
            self._ranks.append((process, ours))
        self._collect(num_ranks, "start of the ranks", START_SECONDS)

    def run(self, num_ranks: int, program: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """program(group, *args) on the ranks of a group of this size; closures travel too."""
        message = to_bytes((program, args, num_ranks))
        for _, connection in self._ranks[:num_ranks]:
            connection.send_bytes(message)
        return self._collect(num_ranks, program.__name__, timeout)

    def _collect(self, num_ranks: int, name: str, timeout: float) -> list[Any]:
        try:
            return ranks.collect(self._ranks[:num_ranks], name, timeout, set(), Path(self._folder.name))
        except BaseException as error:
            if not (isinstance(error, ranks.RankError) and error.all_ended):
                self.close()
            raise

    @property
    def is_closed(self) -> bool:
        return not self._ranks

    def close(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []
        self._folder.cleanup()


def _serve(connection: Any, folder: str, rank: int, num_ranks: int) -> None:
    _leave_with_parent()
    with open(Path(folder) / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        ranks.take_device(rank)
        store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
        limit = timedelta(seconds=START_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
        groups = [dist.new_group(range(size), timeout=limit) for size in range(1, num_ranks + 1)]
        dist.barrier()
        message: Any = ("result", None)  # started
        while True:
            # Plain bytes: multiprocessing's own pickler would move tensors through /dev/shm.
            connection.send_bytes(pickle.dumps(message))
            sys.stdout.flush()
            try:
                program, args, size = pickle.loads(connection.recv_bytes())
                message = ("result", program(moe_a2a.as_group(groups[size - 1]), *args))
            except EOFError:
                os._exit(0)  # without gloo's teardown, which waits for ranks that are gone
            except BaseException:
                message = ("error", traceback.format_exc())
                if torch.cuda.is_initialized() and not _has_its_gpu():
                    message = (ranks.DIED, f"{message[1]}\nand its GPU is out of use")


def _has_its_gpu() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # a fault of a kernel stays with its process
        return False
    return True


def _leave_with_parent() -> None:
    """A killed parent cannot stop its children, so each watches for its end."""

    def watch() -> None:
        wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ------------------------------------------------------------------------- programs on their way


def to_bytes(value: Any) -> bytes:
    """Pickled, with functions of the tests by file and name, and nested ones by their code and what they enclose."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # PyTorch's own reduction does not know every float8 type
            saved = io.BytesIO()
            torch.save(value, saved)
            return _tensor, (saved.getvalue(),)
        if not isinstance(value, types.FunctionType) or Path(value.__code__.co_filename).parent != TESTS:
            return NotImplemented
        code = value.__code__
        if "<" not in value.__qualname__:
            if value.__module__ == Path(code.co_filename).stem:  # a helper: its plain name is known there
                return NotImplemented
            return ranks.load_program, (code.co_filename, value.__qualname__)
        enclosed = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return _nested_function, (marshal.dumps(code), value.__name__, value.__defaults__, enclosed)


def _tensor(saved: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(saved))


def _nested_function(code: bytes, name: str, defaults: Any, enclosed: tuple[Any, ...]) -> types.FunctionType:
    code = marshal.loads(code)
    surroundings = vars(ranks.load_module(code.co_filename))
    # The names that pytest's rewritten asserts use.
    surroundings.setdefault("@py_builtins", builtins)
    surroundings.setdefault("@pytest_ar", _pytest.assertion.rewrite)
    return types.FunctionType(code, surroundings, name, defaults, tuple(map(types.CellType, enclosed)))
