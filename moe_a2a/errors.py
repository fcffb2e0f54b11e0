"""The exceptions of moe_a2a that carry attributes. Bad arguments raise ValueError or TypeError."""


class PeerTimeoutError(RuntimeError):
    """A rank did not arrive within the deadline: it is dead, late, or makes different calls.

    Afterwards the object is unusable on every rank. All ranks raise this error and name the rank that the
    first of them waited for. moe_a2a.shrink() continues without it.

    Attributes:
        operation: the step that waited: "dispatch_send", "dispatch_recv" or "combine_recv"; of Collectives
            "two_shot_all_reduce" and so on; of a trace "align_clocks"; while an object is made "construct" or
            "set_comm_handles"; "survivors".
        phase: what it waited for: "credit", "routing table", "row" or "partial sum"; of Collectives "call" or "chunk"; of a
            trace "clock"; while an object is made "peer" or "memory"; of survivors() "store".
        rank: the rank that waited.
        peer: the rank that did not arrive.
        token: the token whose row or sum was awaited; -1 if the wait was not for a token.
        expected_epoch, seen_epoch: the epoch that the awaited signal should have carried, and the one it carried.
        elapsed_seconds: how long the wait took.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        phase: str = "",
        rank: int = -1,
        peer: int = -1,
        token: int = -1,
        expected_epoch: int = 0,
        seen_epoch: int = 0,
        elapsed_seconds: float = 0.0,
    ):
        super().__init__(message)
        self.operation = operation
        self.phase = phase
        self.rank = rank
        self.peer = peer
        self.token = token
        self.expected_epoch = expected_epoch
        self.seen_epoch = seen_epoch
        self.elapsed_seconds = elapsed_seconds


class LeftOutError(RuntimeError):
    """The other ranks continue without this one: it reached survivors() or shrink() after they had agreed on who is left.

    This process can no longer join a group of theirs.

    Attributes:
        rank: this rank, in the original group.
        survivors: the ranks that continue, in the original group.
    """

    def __init__(self, message: str, *, rank: int = -1, survivors: tuple[int, ...] = ()):
        super().__init__(message)
        self.rank = rank
        self.survivors = survivors


class RoutingError(ValueError):
    """Bad routing that only the kernels could see: ids out of range in a topk_idx on a device, routes without room
    in the masked layout, a y with too few rows. The kernels treated these routes as dropped.

    Raised by calls that synchronise with the device: ep.check(), ep.close(), and properties of a handle that synchronise.
    On the CPU dispatch() itself raises it; then this rank has no handle, and the others' combine is refused.
    """


class PeerRefusedError(RuntimeError):
    """Another rank's part of this call failed before its launch; the message is that rank's.

    The object stays usable on every rank. A refused dispatch is over on all ranks; all may retry a refused combine
    with the same handle while handle.is_open.

    Attributes:
        peer: the rank that refused.
    """

    def __init__(self, message: str, *, peer: int = -1):
        super().__init__(message)
        self.peer = peer


class CallMismatchError(ValueError):
    """Ranks made different calls. Collectives: a different collective, count, row shape, dtype, operator, algorithm or codec.
    ExpertParallel: some ranks dispatched float8 rows and others did not, or float8 rows with scales of another kind, or with
    another bound (num_max_tokens_per_rank of dispatch()).

    Raised on every rank, with the calls of this rank and of one that differs. The call is over on all ranks, without a
    result, and the object stays usable.

    Attributes:
        peer: a rank whose call differs from this rank's.
    """

    def __init__(self, message: str, *, peer: int = -1):
        super().__init__(message)
        self.peer = peer


class TraceFileError(ValueError):
    """A file is not a complete trace as Trace.save() writes it: empty, truncated, damaged, or written by something else.

    Attributes:
        path: the file, as the caller named it.
        reason: what is wrong with it.
    """

    def __init__(self, path: object, reason: str):
        self.path = str(path)
        self.reason = reason
        super().__init__(self.path, reason)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}; pass a complete file that Trace.save() wrote"
