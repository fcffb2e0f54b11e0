"""The timed systems: ExpertParallel in its modes, as calls, as halves and as captured graphs. The baselines are in
torch_baselines.py and deep_ep.py.

A contender first rehearses one layer, which prepares everything that its steps need; then its steps run repeatedly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moe_a2a
from moe_a2a import codecs, reference
from moe_a2a.bench.cases import Inputs
from moe_a2a.bench.clock import Step
from moe_a2a.bench.expected import factor_of, local_sums
from moe_a2a.bench.together import FailedSomewhereError, together


class Contender(ABC):
    system: str
    mode: str
    launch = "eager"
    is_exact = False  # equals the specified sum bit for bit
    is_fp8 = False  # dispatch sends float8 rows with scales
    wire: str | None = None  # the codec of the sums
    blocks: tuple[int, int] | None = None  # of a dispatch and a combine; None: not reported by the system

    def __init__(self, inputs: Inputs):
        self.inputs = inputs
        self.handle: Any = None
        self.y: Any = None
        self.out: Tensor | None = None

    @abstractmethod
    def dispatch(self) -> Any:
        """Returns the handle that combine takes."""

    @abstractmethod
    def experts(self, handle: Any) -> Tensor:
        """Returns the y of combine: the check's experts applied to the received rows."""

    @abstractmethod
    def combine(self, y: Tensor, handle: Any) -> Tensor: ...

    def arrived(self, x: Tensor) -> Tensor:
        """This rank's rows as the experts see them."""
        return x

    def close(self) -> None:
        """Frees its resources."""
        self.handle = self.y = self.out = None

    def rehearse(self) -> Tensor:
        """Runs one layer with the check's experts. All timed combines reuse its y: the rows are the same."""
        handle = self.dispatch()
        try:
            # A rank that fails here must not leave the others waiting in combine.
            self.y = together(lambda: self.experts(handle))
        except FailedSomewhereError:
            self.release(handle)
            raise
        return self.combine(self.y, handle)

    def release(self, handle: Any) -> None:  # noqa: B027  (most hold nothing)
        """Ends a handle that is not going to be combined."""

    def steps(self) -> list[Step]:
        return [Step("dispatch", self._dispatch, self.inputs.x), Step("combine", self._combine, self.y)]

    def _dispatch(self) -> None:
        self.handle = self.dispatch()

    def _combine(self) -> None:
        self.out = self.combine(self.y, self.handle)


# ---- ExpertParallel


@dataclass(frozen=True)
class Mode:
    """How ExpertParallel is called."""

    quantize: str | None = None
    presummed: bool = False
    layout: str = "rows"
    wire: str | None = None


MODES = {
    "rows": Mode(),
    "fp8": Mode(quantize="fp8"),
    "presummed": Mode(presummed=True),
    "fp8+presummed": Mode(quantize="fp8", presummed=True),
    "expert_major": Mode(layout="expert_major"),
    **{f"wire_{codec}": Mode(wire=codec) for codec in codecs.CODECS},
}


class Ours(Contender):
    system = "moe_a2a"

    def __init__(self, ep: moe_a2a.ExpertParallel, inputs: Inputs, mode: str = "rows", num_blocks: int = 0):
        super().__init__(inputs)
        self.ep = ep
        self.mode = mode
        self.num_blocks = num_blocks
        self._how = MODES[mode]
        self.is_fp8 = self._how.quantize is not None
        self.wire = None if ep._core.returns_ll(len(inputs.x)) else self._how.wire  # LL words are not coded
        self.is_exact = self.wire is None
        self.blocks = (num_blocks, num_blocks) if num_blocks else ep.blocks_for(len(inputs.x))
        self._out = torch.empty_like(inputs.x)

    def dispatch(self) -> moe_a2a.DispatchHandle:
        handle = self.ep.dispatch(
            self.inputs.x,
            self.inputs.topk_idx,
            self.inputs.topk_weights,
            layout=self._how.layout,
            quantize=self._how.quantize,
            num_blocks=self.num_blocks,
        )
        if self._how.layout != "rows":
            handle.expert_x  # noqa: B018  (copied when it is first read)
        return handle

    def combine(self, y: Tensor, handle: moe_a2a.DispatchHandle) -> Tensor:
        return self.ep.combine(
            y, handle, presummed=self._how.presummed, wire=self._how.wire, out=self._out, num_blocks=self.num_blocks
        )

    def release(self, handle: moe_a2a.DispatchHandle) -> None:
        handle.release()

    def arrived(self, x: Tensor) -> Tensor:
        if not self.is_fp8:
            return x
        fp8 = moe_a2a.devices.float8_dtype(x.device)
        return reference.dequantize_fp8(*reference.quantize_fp8(x, fp8)).to(x.dtype)

    def experts(self, handle: moe_a2a.DispatchHandle) -> Tensor:
        inputs = self.inputs
        if self._how.presummed:
            rows = self._landed(handle, slice(None))
            return local_sums(rows, inputs.all_topk_idx, inputs.all_topk_weights, inputs.rank, inputs.num_local_experts)
        place = torch.arange(handle.num_routes, device=inputs.x.device)
        local_expert = torch.bucketize(place, handle.expert_offsets[1:].long(), right=True)
        factor = factor_of(local_expert + inputs.rank * inputs.num_local_experts)
        if self._how.layout == "rows":
            rows = self._landed(handle, handle.expert_row_index[: len(place)].long())
        else:
            rows = handle.expert_x[: len(place)]
        return (factor[:, None] * rows.float()).to(inputs.x.dtype)

    def _landed(self, handle: moe_a2a.DispatchHandle, which: Any) -> Tensor:
        """Rows of recv_x in the dtype of x."""
        if not self.is_fp8:
            return handle.recv_x[which]
        values = handle.recv_x.view(torch.uint8)[which].view(handle.row_dtype)  # torch indexes no float8
        return reference.dequantize_fp8(values, handle.recv_x_scales[which]).to(self.inputs.x.dtype)


class OursInHalves(Ours):
    """All ranks align before each half, so a recv finds its rows already there."""

    launch = "eager, halves"

    def dispatch(self) -> moe_a2a.DispatchHandle:
        return self._receive(self._send())

    def combine(self, y: Tensor, handle: moe_a2a.DispatchHandle) -> Tensor:
        self._send_sums(y, handle)
        return self._receive_sums(handle)

    def steps(self) -> list[Step]:
        return [
            Step("dispatch_send", self._keep_sent, self.inputs.x),
            Step("dispatch_recv", lambda: self._receive(self.handle)),
            Step("combine_send", lambda: self._send_sums(self.y, self.handle), self.y),
            Step("combine_recv", lambda: self._receive_sums(self.handle)),
        ]

    def _keep_sent(self) -> None:
        self.handle = self._send()

    def _send(self) -> moe_a2a.DispatchHandle:
        x, idx, weights = self.inputs.x, self.inputs.topk_idx, self.inputs.topk_weights
        return self.ep.dispatch_send(x, idx, weights, quantize=self._how.quantize, num_blocks=self.num_blocks)

    def _receive(self, handle: moe_a2a.DispatchHandle) -> moe_a2a.DispatchHandle:
        return self.ep.dispatch_recv(handle, layout=self._how.layout, num_blocks=self.num_blocks)

    def _send_sums(self, y: Tensor, handle: moe_a2a.DispatchHandle) -> None:
        self.ep.combine_send(y, handle, presummed=self._how.presummed, wire=self._how.wire, num_blocks=self.num_blocks)

    def _receive_sums(self, handle: moe_a2a.DispatchHandle) -> Tensor:
        return self.ep.combine_recv(handle, out=self._out, num_blocks=self.num_blocks)


class OursInGraphs(Ours):
    """dispatch and combine, each captured once; a replay is a fresh call."""

    launch = "graph"

    def rehearse(self) -> Tensor:
        super().rehearse()  # loads kernels, makes y
        try:
            # A rank whose capture fails must not leave the others waiting in a replay.
            self._graphs = together(lambda: [captured(self._dispatch), captured(self._combine)])
        except FailedSomewhereError:
            if self.handle is not None:
                self.handle.release()
            raise
        self._out.zero_()
        for graph in self._graphs:
            graph.replay()
        return self._out

    def steps(self) -> list[Step]:
        dispatch, combine = super().steps()
        dispatch.run, combine.run = (graph.replay for graph in self._graphs)
        return [dispatch, combine]


class OursInChains(OursInGraphs):
    """Pairs of dispatch and combine in one captured graph, as a decoder runs its layers."""

    launch = "chain"

    def steps(self) -> list[Step]:
        return [chain(self._dispatch, self._combine, self.inputs.x)]


PAIRS_PER_CHAIN = 10


def chain(dispatch: Callable[[], Any], combine: Callable[[], Any], x: Tensor) -> Step:
    """Ten pairs in one graph; the step's time is that of one pair."""

    def pairs() -> None:
        for _ in range(PAIRS_PER_CHAIN):
            dispatch()
            combine()

    return Step("pair", captured(pairs).replay, x, repeats=PAIRS_PER_CHAIN)


def captured(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # Thread-local: the process group's own thread may query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph
