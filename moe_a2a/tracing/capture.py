"""with moe_a2a.trace(ep) as t: records what the kernels do inside the block, and merges the records of all ranks. Works for
an ExpertParallel, Collectives, or all clients of a Communicator."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_a2a import _core, arguments, calls, codecs, installation
from moe_a2a.client import Client
from moe_a2a.errors import PeerRefusedError
from moe_a2a.grouped_gemm import TRACED
from moe_a2a.groups import HandleExchange, rendezvous
from moe_a2a.tracing import export
from moe_a2a.tracing.merge import merge
from moe_a2a.tracing.records import ClockSample, RankRecords
from moe_a2a.tracing.report import Summary
from moe_a2a.tracing.summary import summarize
from moe_a2a.tracing.timeline import Timeline

log = logging.getLogger("moe_a2a")

# A CPU has few blocks of one thread each; on a GPU, 132 blocks of 16 warps take 35 MB.
DEFAULT_RECORDS = {"cpu": 65536, "cuda": 1024}
CLOCK_ROUNDS = 200  # exchanges with each rank, of which the fastest is used


class Trace:
    """Returned by trace(); call save() and summary() after its block has ended.

    All ranks enter and leave the block together: their clocks are compared at both ends, and the records are gathered at the
    end. If a rank cannot begin, all raise its error's text. If the block ends with an exception on any rank, nothing is
    gathered: each rank keeps its own records, and its file shows what its warps did last. The same holds for a
    HandleExchange, which has no channel to gather through."""

    def __init__(self, clients: Sequence[Client], records_per_segment: int):
        self._clients, self._first = clients, clients[0]
        moe = [client for client in clients if hasattr(client, "num_experts")]
        self._moe: Any = moe[0] if moe else None  # an ExpertParallel
        self._records_per_segment = records_per_segment
        self._clocks: list[ClockSample] = []
        self._experts: _core.TracedExperts | None = None  # its products are recorded too
        self._choices: list[torch.Tensor] = []  # the topk_idx of each dispatch
        self._row_bytes: set[int] = set()
        self._sum_bytes: set[int] = set()  # of combines with a codec, and without
        self._ranks: list[RankRecords] = []

    def __enter__(self) -> Trace:
        with contextlib.ExitStack() as undone:
            with _meeting(self._first, "begin the trace") as meeting:
                with _told_if_it_fails(meeting):
                    self._check_unused()
                    undone.callback(self._stop)
                    self._start()
                texts = meeting.all_gather(None, self._first.timeout) if meeting is not None else []
            for rank, text in enumerate(texts):
                if text is not None:
                    raise PeerRefusedError(f"rank {rank} could not begin its trace: {text}", peer=rank)
            self._clocks = [self._meet()]
            undone.pop_all()
        return self

    def _check_unused(self) -> None:
        if self._clocks:
            raise RuntimeError(f"this Trace of rank {self._first.rank} has been used already; call trace() again")
        for client in self._clients:
            if client._trace is not None:
                name = type(client).__name__
                raise RuntimeError(f"rank {client.rank} is inside another trace of this {name}; leave that first")

    def _start(self) -> None:
        for client in self._clients:
            core, records = client._open_core(), self._records_per_segment
            try:
                core.trace_start(records)
            except RuntimeError as error:
                raise RuntimeError(
                    f"records_per_segment={records} on rank {client.rank}: {error}; pass a smaller number"
                ) from None
            client._trace = self
        if self._moe is not None:
            self._experts = self._moe._open_core().traced_experts()
            TRACED.append(self._experts)

    def _stop(self) -> None:
        for client in self._clients:
            if client._trace is self:
                client._trace = None
                if not client.is_closed:
                    client._open_core().trace_stop()
        if self._experts is not None:
            TRACED.remove(self._experts)
            self._experts = None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            with _meeting(self._first, "end the trace") as meeting:
                with _told_if_it_fails(meeting):
                    own = self._read()
                have_ended = self._all_have_ended(meeting, error)
            if have_ended:
                own.clocks = [*self._clocks, self._meet()]
                self._ranks = self._first._group.all_gather(own)
            else:
                own.clocks = [ClockSample(np.zeros(1, np.int64), np.zeros(1, np.int64), 0)]
                self._ranks = [own]
        finally:
            self._stop()

    def _all_have_ended(self, meeting: Any, error: object) -> bool:
        """Whether no rank's block ended with an exception, so that clocks can be compared and records gathered. A rank whose
        block did waits for nobody."""
        if meeting is None:
            return False
        if error is not None:
            meeting.post(repr(error))
            return False
        for rank, text in enumerate(meeting.all_gather(None, self._first.timeout)):
            if text is not None:
                log.warning(
                    "rank %d: the traced block of rank %d ended with %s; the trace of this rank holds its own records only",
                    self._first.rank, rank, text,
                )  # fmt: skip
                return False
        return True

    def dispatched(self, topk_idx: torch.Tensor, row_dtype: torch.dtype) -> None:
        """Called by every dispatch: keeps data that the records do not hold. Skipped during graph capture: replays would
        keep writing after the trace has ended."""
        if topk_idx.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._choices.append(topk_idx.detach().clone())
        hidden = self._moe.hidden
        scales = 4 * -(-hidden // 128) if row_dtype.itemsize == 1 else 0
        self._row_bytes.add(hidden * row_dtype.itemsize + scales)

    def combined(self, wire: str | None) -> None:
        """Called by every combine, with the codec in which this rank sends."""
        hidden = self._moe.hidden
        self._sum_bytes.add(hidden * self._moe.dtype.itemsize if wire is None else codecs.line_bytes(wire, hidden))

    @cached_property
    def timeline(self) -> Timeline:
        """All ranks on one clock. Computed once, on the ranks that ask."""
        self._check_has_records()
        row_bytes = self._moe.hidden * self._moe.dtype.itemsize if self._moe else -1
        return merge(self._ranks, _configuration(self._first, self._moe), row_bytes)

    def save(self, path: str | Path) -> None:
        """Writes one file with all ranks. Every rank may call it; rank 0 writes. After an exception every rank writes its own
        file, with `.rank<r>` before the suffix. Its folder is made if need be. A trace without records raises RuntimeError.

        The suffix of `path` selects the format: .json.gz and .json are Chrome's, .pftrace and .perfetto-trace Perfetto's.
        https://ui.perfetto.dev opens all of them.
        """
        export.check_path(path)
        self._check_has_records()
        if len(self._ranks) < self._first.num_ranks:
            export.save(self.timeline, export.path_of_rank(path, self._first.rank))
        elif self._first.rank == 0:
            export.save(self.timeline, path)

    def summary(self) -> Summary:
        """The trace in numbers, equal on every rank. print() it."""
        return summarize(self.timeline)

    def _check_has_records(self) -> None:
        if not self._ranks:
            raise RuntimeError("the trace has not ended; read it after the `with` block")
        if not any(len(rank.records) for rank in self._ranks):
            raise RuntimeError("the trace is empty: no kernel ran inside its block")

    def _meet(self) -> ClockSample:
        """Compares the clocks of all ranks."""
        readings = np.array(self._first._open_core().align_clocks(CLOCK_ROUNDS), dtype=np.int64)
        return ClockSample(readings[:, 0].copy(), readings[:, 1].copy(), int(readings[self._first.rank, 2]))

    def _read(self) -> RankRecords:
        """Segments of products follow those of their ExpertParallel, and the second client's those of the first, as if they
        were further blocks."""
        read = [client._open_core().trace_read() for client in self._clients]
        joined = {
            name: np.concatenate([of_client[name].numpy() for of_client in read])
            for name in ("records", "segment_written", "segment_dropped")
        }
        return RankRecords(
            rank=self._first.rank,
            **joined,
            warps_per_block=read[0]["warps_per_block"],
            ticks_per_second=float(read[0]["ticks_per_second"]),
            clock_step_ticks=float(self._clocks[0].round_trips[self._first.rank]) if self._clocks else 1.0,
            kinds=_core.trace_kinds(),
            operations=_core.trace_operations(),
            clocks=[],
            tokens_per_expert=self._tokens_per_expert(),
            dispatch_row_bytes=self._row_bytes.pop() if len(self._row_bytes) == 1 else -1,
            sum_bytes=min(self._sum_bytes) if len(self._sum_bytes) == 1 else -1 if self._sum_bytes else None,
        )

    def _tokens_per_expert(self) -> np.ndarray:
        num_experts = self._moe.num_experts if self._moe else 0
        counts = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        for topk_idx in self._choices:
            experts = topk_idx.reshape(-1).long().cpu()
            counts += torch.bincount(experts[(experts >= 0) & (experts < num_experts)], minlength=num_experts)
        return counts.numpy()


def trace(of: Client, records_per_segment: int | None = None) -> Trace:
    """Records what kernels do inside the `with` block; every rank enters it::

        with moe_a2a.trace(ep) as t:
            h = ep.dispatch(x, topk_idx, topk_weights)
            out = ep.combine(experts(h), h)
        t.save("layer.pftrace")
        print(t.summary())

    Args:
        of: whose kernels to record: an ExpertParallel, Collectives, or a Communicator (all its open clients, at most one of
            them an ExpertParallel).
        records_per_segment: capacity of each warp's segment (CPU: each thread's), 16 bytes per record; default: 1024 on a
            GPU, 65536 on the CPU. A full segment drops further records, and the file says how many. Sending a row takes one
            record plus one per destination rank (in a small batch, one per piece of a row), a chunk of a collective one per
            stage; a wait takes one.
    """
    if not isinstance(of, Client):
        raise TypeError(
            f"of={arguments.shown(of)} is a {type(of).__name__}; pass an ExpertParallel, Collectives or a Communicator"
        )
    try:
        return _checked_trace(of, records_per_segment)
    except (TypeError, ValueError):
        with _meeting(of, "begin the trace") as meeting, _told_if_it_fails(meeting):
            raise


def _checked_trace(of: Client, records_per_segment: int | None) -> Trace:
    clients = of.traced_clients()
    if not clients:
        raise ValueError(
            f"the Communicator of rank {of.rank} has no clients; make an ExpertParallel or Collectives on it first"
        )
    if sum(hasattr(client, "num_experts") for client in clients) > 1:
        raise ValueError(f"the Communicator of rank {of.rank} has several ExpertParallel objects; trace one of them")
    if records_per_segment is None:
        records_per_segment = DEFAULT_RECORDS[of.device.type]
    return Trace(clients, arguments.checked_int(of.rank, "records_per_segment", records_per_segment, 1))


def _meeting(of: Client, what: str) -> contextlib.AbstractContextManager[Any]:
    """None for a HandleExchange, which has no channel."""
    if not of.is_closed:
        _ = of.nbytes  # raises in a forked child, which would post in its parent's name
    return contextlib.nullcontext() if isinstance(of._group, HandleExchange) else rendezvous.begin(of._group, what)


@contextlib.contextmanager
def _told_if_it_fails(meeting: Any) -> Iterator[None]:
    """Wraps this rank's part of a meeting: if it fails, the others get the error's text instead of None."""
    try:
        yield
    except BaseException as error:
        if meeting is not None:
            meeting.post(calls.words_of(error))
        raise


def _configuration(client: Client, moe: Any) -> dict[str, Any]:
    configuration: dict[str, Any] = {"num_ranks": client.num_ranks}
    if moe is not None:
        names = ("num_experts", "num_topk", "hidden", "num_max_tokens_per_rank", "num_buffers")
        configuration |= {name: getattr(moe, name) for name in names}
        configuration["dtype"] = str(moe.dtype).removeprefix("torch.")
    return configuration | {
        "device": client.device.type,
        "device_name": torch.cuda.get_device_name(client.device)
        if client.device.type == "cuda"
        else platform.machine(),
        "versions": {
            "moe_a2a": installation.version("moe_a2a") or "not installed",
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
