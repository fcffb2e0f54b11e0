"""Making an ExpertParallel on all ranks of a group together. What fails on one rank raises on all, within `timeout`, and
gives the memory back: nobody waits for a rank that has left, and the group may be used again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moe_a2a import arguments, devices, rendezvous
from moe_a2a.errors import PeerTimeoutError

if TYPE_CHECKING:
    from moe_a2a.expert_parallel import ExpertParallel

DEFAULT_TIMEOUT = 30.0  # seconds; of a meeting in which a rank has to say that its timeout is none


def _timeout_of_meeting(ep: ExpertParallel) -> float:
    try:
        return arguments.checked_timeout(ep.rank, ep.timeout)
    except (TypeError, ValueError):
        return DEFAULT_TIMEOUT


def make_together(ep: ExpertParallel, allocate: Callable[[], None]) -> None:
    """Allocates, exchanges handles, maps the memory of the others."""
    meeting = rendezvous.begin(ep._group, "make the ExpertParallel")
    timeout = _timeout_of_meeting(ep)
    try:
        handles = _exchange(ep, meeting, timeout, allocate)
        _map(ep, meeting, timeout, handles)
    except BaseException:
        ep._drop_core()
        raise


def _exchange(ep: ExpertParallel, meeting: Any, timeout: float, allocate: Callable[[], None]) -> list[bytes]:
    own: Exception | None = None
    try:
        allocate()
    except Exception as error:
        own = error
    except BaseException:
        meeting.leave()
        raise
    mine = (ep.get_comm_handle(), devices.gpu_identity(ep.device)) if own is None else (None, None)
    try:
        said = meeting.all_gather((*mine, repr(own) if own else None), timeout)
    except PeerTimeoutError:
        if own is None and meeting.is_certainly_missed():
            ep._core.give_back()
        raise
    errors = [error for *_, error in said]
    if any(errors):
        if own is None:
            ep._core.give_back()  # nobody has mapped it, nor will
        _raise_first(own, errors)
    try:
        devices.check_one_rank_per_gpu([gpu for _, gpu, _ in said])
    except ValueError:  # on every rank
        ep._core.give_back()
        raise
    return [handle for handle, *_ in said]


def _map(ep: ExpertParallel, meeting: Any, timeout: float, handles: list[bytes]) -> None:
    own: Exception | None = None
    try:
        ep.set_comm_handles(handles)
    except Exception as error:
        own = error
    except BaseException:
        meeting.leave()
        raise
    try:
        errors = meeting.all_gather(repr(own) if own else None, timeout)
    except PeerTimeoutError:
        ep._core.disconnect()  # the memory itself stays: the rank that is missing may have mapped it
        raise
    if not any(errors):
        return
    ep._core.disconnect()
    meeting.all_gather(None, timeout)
    ep._core.give_back()  # by now no rank maps any other's
    _raise_first(own, errors)


def _raise_first(own: Exception | None, errors: list[str | None]) -> None:
    if own is not None:
        raise own
    rank = next(r for r, text in enumerate(errors) if text)
    raise RuntimeError(f"rank {rank} could not make its ExpertParallel: {errors[rank]}")
