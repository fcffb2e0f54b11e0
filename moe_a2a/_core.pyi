# Written by `make stubs`.
"""
The compiled core of moe_a2a; use the classes of the package instead.
"""

from __future__ import annotations
import collections.abc
import numpy.typing
import torch
import typing

__all__: list[str] = [
    "Client",
    "Collectives",
    "Communicator",
    "DispatchHandle",
    "ExpertParallel",
    "TracedExperts",
    "built_targets",
    "check_dispatch",
    "check_expert_weights",
    "check_plain",
    "grouped_gemm",
    "nbytes_for",
    "topk_layout",
    "trace_kinds",
    "trace_operations",
    "write_chrome_json",
    "write_perfetto",
]

class TracedExperts:
    pass

class Client:
    def align_clocks(
        self, arg0: typing.SupportsInt | typing.SupportsIndex
    ) -> list[typing.Annotated[list[int], "FixedSize(3)"]]: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
    def comm_handle(self) -> bytes: ...
    def connect(self, arg0: collections.abc.Sequence[str], arg1: bool) -> None: ...
    def disconnect(self) -> None: ...
    def give_back(self) -> None: ...
    def raise_reported(self) -> None: ...
    def trace_read(self) -> dict: ...
    def trace_start(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def trace_stop(self) -> None: ...
    @property
    def nbytes(self) -> int: ...

class Communicator(Client):
    def __init__(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: str,
        arg3: torch.device,
        arg4: typing.SupportsFloat | typing.SupportsIndex,
        arg5: bool,
    ) -> None: ...
    @property
    def rank(self) -> int: ...

class Collectives(Client):
    def __init__(
        self,
        arg0: Communicator,
        arg1: bool,
        arg2: torch.device,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: typing.SupportsInt | typing.SupportsIndex,
        arg5: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def all_gather(
        self,
        arg0: torch.Tensor,
        arg1: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] | None,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: torch.Tensor | None,
    ) -> torch.Tensor: ...
    def all_reduce(
        self,
        arg0: torch.Tensor,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: bool,
        arg5: typing.SupportsInt | typing.SupportsIndex,
        arg6: torch.Tensor | None,
    ) -> torch.Tensor: ...
    def barrier(self) -> None: ...
    def holds(self, arg0: torch.Tensor) -> bool: ...
    def reduce_scatter(
        self,
        arg0: torch.Tensor,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] | None,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: torch.Tensor | None,
    ) -> torch.Tensor: ...
    def refuse(self, arg0: str) -> None: ...
    def take_tensor(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> torch.Tensor: ...
    @property
    def share_nbytes(self) -> int: ...

class DispatchHandle:
    @property
    def buffer(self) -> int: ...
    @property
    def expert_alignment(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def layout(self) -> int: ...
    @property
    def num_max_tokens_per_rank(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...

class ExpertParallel(Client):
    def __init__(
        self,
        arg0: Communicator,
        arg1: bool,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: typing.SupportsInt | typing.SupportsIndex,
        arg5: typing.SupportsInt | typing.SupportsIndex,
        arg6: typing.SupportsInt | typing.SupportsIndex,
        arg7: typing.Any,
        arg8: typing.SupportsInt | typing.SupportsIndex | None,
        arg9: torch.device,
    ) -> None: ...
    def blocks_for(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> tuple[int, int]: ...
    def can_send_with_product(self, arg0: DispatchHandle) -> bool: ...
    def capacity(self, arg0: DispatchHandle) -> int: ...
    def combine(
        self,
        y: torch.Tensor,
        handle: DispatchHandle,
        presummed: bool,
        codec: typing.SupportsInt | typing.SupportsIndex,
        out: torch.Tensor | None,
        num_blocks: typing.SupportsInt | typing.SupportsIndex,
        sum_index: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def combine_recv(
        self, arg0: DispatchHandle, arg1: torch.Tensor | None, arg2: typing.SupportsInt | typing.SupportsIndex
    ) -> torch.Tensor: ...
    def combine_send(
        self,
        arg0: torch.Tensor,
        arg1: DispatchHandle,
        arg2: bool,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: typing.SupportsInt | typing.SupportsIndex,
        arg5: torch.Tensor | None,
    ) -> None: ...
    def dispatch(
        self,
        arg0: torch.Tensor,
        arg1: torch.Tensor,
        arg2: torch.Tensor | None,
        arg3: torch.Tensor | None,
        arg4: bool,
        arg5: bool,
        arg6: typing.SupportsInt | typing.SupportsIndex,
        arg7: typing.SupportsInt | typing.SupportsIndex,
        arg8: typing.SupportsInt | typing.SupportsIndex,
        arg9: typing.SupportsInt | typing.SupportsIndex,
    ) -> DispatchHandle: ...
    def dispatch_recv(
        self,
        arg0: DispatchHandle,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def dispatch_send(
        self,
        arg0: torch.Tensor,
        arg1: torch.Tensor,
        arg2: torch.Tensor | None,
        arg3: torch.Tensor | None,
        arg4: bool,
        arg5: bool,
        arg6: typing.SupportsInt | typing.SupportsIndex,
        arg7: typing.SupportsInt | typing.SupportsIndex,
    ) -> DispatchHandle: ...
    def expert_counts(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def expert_offsets(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def expert_row_index(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def experts(
        self,
        arg0: DispatchHandle,
        arg1: torch.Tensor,
        arg2: torch.Tensor,
        arg3: torch.Tensor | None,
        arg4: torch.Tensor | None,
        arg5: typing.SupportsInt | typing.SupportsIndex,
        arg6: bool,
        arg7: typing.SupportsInt | typing.SupportsIndex,
        arg8: torch.Tensor | None,
        arg9: typing.SupportsInt | typing.SupportsIndex,
    ) -> torch.Tensor: ...
    def gather_rows(
        self,
        handle: DispatchHandle,
        row_dtype: typing.Any,
        num_blocks: typing.SupportsInt | typing.SupportsIndex,
        scales_by_column: bool = False,
        given: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def landed_offsets(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def landed_rows(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def num_recv_tokens_per_rank(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def packed_topk(
        self,
        handle: DispatchHandle,
        num_rows: typing.SupportsInt | typing.SupportsIndex,
        id_dtype: typing.Any,
        first_expert: typing.SupportsInt | typing.SupportsIndex,
        no_expert: typing.SupportsInt | typing.SupportsIndex | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def product_combine(
        self,
        arg0: torch.Tensor,
        arg1: torch.Tensor | None,
        arg2: torch.Tensor,
        arg3: torch.Tensor,
        arg4: torch.Tensor | None,
        arg5: DispatchHandle,
        arg6: torch.Tensor | None,
        arg7: typing.SupportsInt | typing.SupportsIndex,
    ) -> torch.Tensor: ...
    def push_rows(
        self, arg0: torch.Tensor, arg1: torch.Tensor, arg2: str, arg3: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def recv_topk(
        self,
        handle: DispatchHandle,
        id_dtype: typing.Any,
        first_expert: typing.SupportsInt | typing.SupportsIndex,
        no_expert: typing.SupportsInt | typing.SupportsIndex | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def recv_x(self, arg0: DispatchHandle, arg1: typing.Any) -> torch.Tensor: ...
    def recv_x_scales(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def release(self, handle: DispatchHandle, why: str = "") -> None: ...
    def returns_ll(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> bool: ...
    def route_src_rank(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def route_src_token_idx(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def route_weights(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def set_launch_table(
        self,
        arg0: collections.abc.Sequence[
            typing.Annotated[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], "FixedSize(3)"]
        ],
    ) -> None: ...
    def set_term_weights(self, arg0: DispatchHandle, arg1: torch.Tensor) -> None: ...
    def simulated_experts(
        self, arg0: DispatchHandle, arg1: torch.Tensor | None, arg2: typing.SupportsFloat | typing.SupportsIndex
    ) -> torch.Tensor: ...
    def simulated_layer(
        self,
        arg0: torch.Tensor,
        arg1: torch.Tensor,
        arg2: torch.Tensor | None,
        arg3: torch.Tensor | None,
        arg4: typing.SupportsFloat | typing.SupportsIndex,
    ) -> torch.Tensor: ...
    def tell_combine_failed(self, arg0: DispatchHandle, arg1: str) -> None: ...
    def tell_dispatch_failed(self, arg0: str, arg1: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def term_positions(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def term_weights(self, arg0: DispatchHandle) -> torch.Tensor: ...
    def traced_experts(self) -> TracedExperts: ...
    def weighted_grads(
        self, arg0: torch.Tensor, arg1: torch.Tensor, arg2: DispatchHandle
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @property
    def num_dispatches(self) -> int: ...
    @property
    def num_max_ll_tokens(self) -> int: ...

def built_targets() -> list[str]:
    """
    Names of the targets in this build: "cpu", "cuda", "hip".
    """

def check_dispatch(
    arg0: typing.SupportsInt | typing.SupportsIndex,
    arg1: typing.SupportsInt | typing.SupportsIndex,
    arg2: typing.SupportsInt | typing.SupportsIndex,
    arg3: typing.SupportsInt | typing.SupportsIndex,
    arg4: typing.SupportsInt | typing.SupportsIndex,
    arg5: typing.Any,
    arg6: torch.device,
    arg7: torch.Tensor,
    arg8: torch.Tensor,
    arg9: torch.Tensor | None,
    arg10: torch.Tensor | None,
    arg11: bool,
) -> None:
    """
    Raises what a dispatch of these tensors would.
    """

def check_expert_weights(
    arg0: typing.SupportsInt | typing.SupportsIndex,
    arg1: typing.SupportsInt | typing.SupportsIndex,
    arg2: typing.SupportsInt | typing.SupportsIndex,
    arg3: torch.device,
    arg4: typing.Any,
    arg5: typing.Any,
    arg6: torch.Tensor,
    arg7: torch.Tensor,
    arg8: torch.Tensor | None,
    arg9: torch.Tensor | None,
) -> None: ...
def check_plain(
    arg0: typing.SupportsInt | typing.SupportsIndex, arg1: torch.device, arg2: torch.Tensor, arg3: str
) -> None:
    """
    Raises for a tensor without memory of its own, or on another device.
    """

def grouped_gemm(
    arg0: torch.Tensor,
    arg1: torch.Tensor | None,
    arg2: torch.Tensor,
    arg3: torch.Tensor,
    arg4: str | None,
    arg5: bool,
    arg6: bool,
    arg7: typing.SupportsFloat | typing.SupportsIndex,
    arg8: typing.SupportsFloat | typing.SupportsIndex | None,
    arg9: typing.SupportsFloat | typing.SupportsIndex,
    arg10: torch.Tensor | None,
    arg11: torch.Tensor | None,
    arg12: torch.Tensor | None,
    arg13: typing.Any,
    arg14: str,
    arg15: typing.SupportsInt | typing.SupportsIndex,
    arg16: collections.abc.Sequence[TracedExperts],
) -> tuple[torch.Tensor, torch.Tensor | None]: ...
def nbytes_for(
    arg0: typing.SupportsInt | typing.SupportsIndex,
    arg1: typing.SupportsInt | typing.SupportsIndex,
    arg2: typing.SupportsInt | typing.SupportsIndex,
    arg3: typing.SupportsInt | typing.SupportsIndex,
    arg4: typing.SupportsInt | typing.SupportsIndex,
    arg5: typing.SupportsInt | typing.SupportsIndex,
    arg6: typing.SupportsInt | typing.SupportsIndex,
    arg7: typing.Any,
    arg8: typing.SupportsInt | typing.SupportsIndex | None,
    arg9: str,
) -> int:
    """
    Bytes that one rank of such an ExpertParallel takes.
    """

def topk_layout(
    topk_idx: torch.Tensor,
    num_experts: typing.SupportsInt | typing.SupportsIndex,
    num_ranks: typing.SupportsInt | typing.SupportsIndex,
    rank: typing.SupportsInt | typing.SupportsIndex,
    target: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
def trace_kinds() -> list[str]: ...
def trace_operations() -> list[str]: ...
def write_chrome_json(
    arg0: collections.abc.Callable,
    arg1: typing.Annotated[numpy.typing.ArrayLike, ...],
    arg2: typing.Annotated[numpy.typing.ArrayLike, ...],
    arg3: typing.Annotated[numpy.typing.ArrayLike, ...],
    arg4: collections.abc.Sequence[str],
    arg5: collections.abc.Sequence[str],
    arg6: str,
) -> None: ...
def write_perfetto(
    arg0: collections.abc.Callable,
    arg1: typing.Annotated[numpy.typing.ArrayLike, ...],
    arg2: typing.Annotated[numpy.typing.ArrayLike, ...],
    arg3: typing.Annotated[numpy.typing.ArrayLike, ...],
    arg4: collections.abc.Sequence[str],
    arg5: collections.abc.Sequence[str],
    arg6: str,
) -> None: ...
