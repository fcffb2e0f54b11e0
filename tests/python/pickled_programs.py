"""Sends programs to a rank's process, which cannot import test modules by the names that pytest gives them."""

from __future__ import annotations

import builtins
import importlib.util
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _pytest.assertion.rewrite
import torch

TESTS = Path(__file__).parent


def to_bytes(value: Any) -> bytes:
    """Pickles functions of the tests by file and name, and nested ones by their code and closure."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # PyTorch's own reduction does not support every float8 type
            saved = io.BytesIO()
            torch.save(value, saved)
            return _tensor, (saved.getvalue(),)
        if not isinstance(value, types.FunctionType) or Path(value.__code__.co_filename).parent != TESTS:
            return NotImplemented
        code = value.__code__
        if "<" not in value.__qualname__:
            if value.__module__ == Path(code.co_filename).stem:  # a helper: importable there by its plain name
                return NotImplemented
            return load_program, (code.co_filename, value.__qualname__)
        enclosed = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return _nested_function, (marshal.dumps(code), value.__name__, value.__defaults__, enclosed)


def _tensor(saved: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(saved))


def _nested_function(code: bytes, name: str, defaults: Any, enclosed: tuple[Any, ...]) -> types.FunctionType:
    code = marshal.loads(code)
    surroundings = vars(load_module(code.co_filename))
    # Names used by pytest's rewritten asserts.
    surroundings.setdefault("@py_builtins", builtins)
    surroundings.setdefault("@pytest_ar", _pytest.assertion.rewrite)
    return types.FunctionType(code, surroundings, name, defaults, tuple(map(types.CellType, enclosed)))


def load_program(file: str, name: str) -> Callable[..., Any]:
    return getattr(load_module(file), name)


def load_module(file: str) -> types.ModuleType:
    """A test module, imported under its file's plain name."""
    module_name = Path(file).stem
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "__file__", None) != file:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return module
