"""torch.ops.moe_a2a: calls as torch.compile and torch.export see them, one operator each, with a known result shape.

While PyTorch traces, `MoELayer`, `grouped_gemm()` and the methods of `Collectives` call these operators, whose bodies make
the same calls again. An operator takes tensors, numbers and strings, so an object is passed as its number. A graph works only in
the process that compiled it, and only while the object lives.
"""

from __future__ import annotations

import itertools
import os
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_a2a.grouped_gemm import grouped_gemm

# Larger than any size: in a graph of dynamic shapes, equal sizes and numbers share a symbol, and telling them apart recompiles.
_numbers = itertools.count(1 << 30)
_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_process: int


def _draw_process() -> None:
    """Added to the numbers in exported programs: another process that loads one has other objects with the same numbers. Not in
    compiled graphs, which PyTorch would then not find in its cache."""
    global _process
    _process = random.SystemRandom().randrange(1, 1 << 31) << 32


_draw_process()
os.register_at_fork(after_in_child=_draw_process)


class GraphNumber:
    """The number by which graphs find the object that has it as an attribute. A copy of that object is another object: its
    number is 0, none, until numbered() gives it one.

    It is the size of a tensor without memory. Dynamo takes an int in a module for a constant and would compile each layer of
    a model again, until it reaches its limit of 8; a size becomes dynamic, and the layers share a graph."""

    def __init__(self, value: int = 0) -> None:
        self._tensor = torch.empty(value, dtype=torch.uint8, device="meta")

    @property
    def value(self) -> int:
        number = self._tensor.shape[0]
        return number + _process if number and torch.compiler.is_exporting() else number

    def __reduce__(self) -> tuple[type[GraphNumber], tuple[()]]:
        return GraphNumber, ()


def numbered(used_in_graphs: Any) -> GraphNumber:
    """A new number, by which graphs find the object."""
    number = next(_numbers)
    _objects[number] = _objects[number + _process] = used_in_graphs
    return GraphNumber(number)


def _object(number: int) -> Any:
    found = _objects.get(number)
    if found is None:
        raise RuntimeError(
            f"a compiled graph uses object {number} of moe_a2a, which this process does not have or no longer has; keep the object "
            "for as long as the graph, and compile in the process that runs the graph"
        )
    return found


def _operator(name: str, schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    def made(function: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(f"moe_a2a::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        operator.register_autograd(no_backward)
        return operator

    def no_backward(*_: Any) -> NoReturn:
        raise RuntimeError(f"moe_a2a::{name} has no backward; call it under torch.no_grad()")

    return made


def _communicates(name: str, schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Defines a second operator, `<name>_without_result`, for calls whose result has no elements. Inductor removes a call whose
    result contributes nothing, although other ranks wait for it; the declared effect of this operator keeps it. Only these calls
    use it, since an effect adds a token on the CPU, and Inductor captures no CUDA graph that has tensors there."""

    def made(function: Callable[..., Any]) -> Any:
        operator = _operator(f"{name}_without_result", schema, fake)(function)
        if hasattr(operator, "register_effect"):  # depends on PyTorch's version
            from torch._library.effects import EffectType

            operator.register_effect(EffectType.ORDERED)
        return _operator(name, schema, fake)(function)

    return made


def that_returns(num_elements: Any, name: str) -> Any:
    """The operator for a call whose result has this many elements, in a graph."""
    from torch.fx.experimental import symbolic_shapes  # a slow import, which only tracing needs

    is_certain = getattr(symbolic_shapes, "guard_or_false", bool)  # older versions of PyTorch have no such function
    return getattr(torch.ops.moe_a2a, f"{name}_without_result" if is_certain(num_elements == 0) else name)


# ---- of a MoELayer


def _like_first(hidden_states: Tensor, *_: Any) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


@_communicates(
    "moe_layer",
    "(Tensor hidden_states, Tensor topk_idx, Tensor? topk_weights, Tensor w_gate_up, Tensor w_down, "
    "Tensor? w_gate_up_scales, Tensor? w_down_scales, SymInt layer) -> Tensor",
    _like_first,
)
def _moe_layer(hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, *weights_and_layer: Any) -> Tensor:
    *weights, layer = weights_and_layer
    return _object(layer)._run_in_graph(hidden_states, topk_idx, topk_weights, *weights)


# ---- of the experts function of transformers, for one of its modules


@_communicates(
    "transformers_experts",
    "(Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, SymInt experts_module, SymInt registered) -> Tensor",
    _like_first,
)
def _transformers_experts(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts_module: int, registered: int
) -> Tensor:
    return _object(registered)(_object(experts_module), hidden_states, top_k_index, top_k_weights)


# ---- of a Collectives


@_communicates(
    "all_reduce",
    "(Tensor x, str op, str algorithm, str? codec, float? max_error, SymInt collectives) -> Tensor",
    _like_first,
)
def _all_reduce(
    x: Tensor, op: str, algorithm: str, codec: str | None, max_error: float | None, collectives: int
) -> Tensor:
    return _object(collectives).all_reduce(x, op, algorithm, codec, max_error=max_error)


# The rank and the number of ranks, on which the shape of the result depends, are arguments: PyTorch's caches of graphs, which
# the ranks share, then tell them apart.


def num_own_rows(x: Tensor, counts: Sequence[int] | None, rank: int, num_ranks: int) -> int:
    return x.shape[0] // num_ranks if counts is None else counts[rank]


def _own_rows(x: Tensor, op: str, counts: Sequence[int] | None, rank: int, num_ranks: int, *_: Any) -> Tensor:
    return x.new_empty(num_own_rows(x, counts, rank, num_ranks), *x.shape[1:])


@_communicates(
    "reduce_scatter",
    "(Tensor x, str op, int[]? counts, int rank, int num_ranks, SymInt collectives) -> Tensor",
    _own_rows,
)
def _reduce_scatter(
    x: Tensor, op: str, counts: Sequence[int] | None, rank: int, num_ranks: int, collectives: int
) -> Tensor:
    return _object(collectives).reduce_scatter(x, op, counts)


def num_all_rows(x: Tensor, counts: Sequence[int] | None, num_ranks: int) -> int:
    return x.shape[0] * num_ranks if counts is None else sum(counts)


def _all_rows(x: Tensor, counts: Sequence[int] | None, num_ranks: int, *_: Any) -> Tensor:
    return x.new_empty(num_all_rows(x, counts, num_ranks), *x.shape[1:])


@_communicates("all_gather", "(Tensor x, int[]? counts, int num_ranks, SymInt collectives) -> Tensor", _all_rows)
def _all_gather(x: Tensor, counts: Sequence[int] | None, num_ranks: int, collectives: int) -> Tensor:
    return _object(collectives).all_gather(x, counts)


# ---- the grouped GEMM: tensors by position, the rest by name

_GEMM = (
    "(Tensor x, Tensor? row_index, Tensor expert_offsets, Tensor w, Tensor? bias, Tensor? x_scales, Tensor? w_scales, *, "
    "str? activation, bool gated, bool interleaved, float alpha, float? limit, float up_shift, {result}int num_blocks)"
)


def _multiplied(x: Tensor, row_index: Any, expert_offsets: Tensor, w: Tensor, *by_name: Any, **options: Any) -> Any:
    tensors = dict(zip(("bias", "x_scales", "w_scales"), by_name, strict=True))
    return grouped_gemm(x, row_index, expert_offsets, w, **tensors, **options)


def _result_shape(x: Tensor, row_index: Tensor | None, w: Tensor, activation: str | None, gated: bool) -> list[Any]:
    num_rows = x.shape[0] if row_index is None else row_index.shape[0]
    return [num_rows, w.shape[1] // 2 if gated or activation == "swiglu" else w.shape[1]]


def _product(x: Tensor, row_index: Any, expert_offsets: Tensor, w: Tensor, *_: Any, **options: Any) -> Tensor:
    default = torch.bfloat16 if x.element_size() == 1 else x.dtype
    shape = _result_shape(x, row_index, w, options["activation"], options["gated"])
    return x.new_empty(shape, dtype=options["out_dtype"] or default)


@_operator("grouped_gemm", _GEMM.format(result="ScalarType? out_dtype, ") + " -> Tensor", _product)
def _grouped_gemm(*tensors: Any, **options: Any) -> Tensor:
    return _multiplied(*tensors, **options)


def _quantized_product(
    x: Tensor, row_index: Any, expert_offsets: Tensor, w: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    shape = _result_shape(x, row_index, w, options["activation"], options["gated"])
    return x.new_empty(shape), x.new_empty([shape[0], -(-shape[1] // 128)], dtype=torch.float32)


@_operator("grouped_gemm_quantized", _GEMM.format(result="") + " -> (Tensor, Tensor)", _quantized_product)
def _grouped_gemm_quantized(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _multiplied(*tensors, **options, quantize_output=True)
