"""Calls in which all ranks take part: whatever makes one fail on this rank before its launch, the peers are told.

They raise PeerRefusedError with this rank's words instead of waiting for it until their deadline.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from moe_a2a.errors import PeerRefusedError, PeerTimeoutError, RoutingError
from moe_a2a.handle import DispatchHandle, Owner

log = logging.getLogger("moe_a2a")
Call = TypeVar("Call", bound=Callable[..., Any])


class Client(Protocol):
    """Whose method is called."""

    rank: int
    _core: Any


class Caller(Client, Owner, Protocol):
    """An ExpertParallel."""

    _num_dispatches: int


# Raised by kernels, or for an earlier call: every rank that is concerned learns of it by itself.
REPORTS = (PeerTimeoutError, PeerRefusedError, RoutingError)


def opens_a_handle(call: Call) -> Call:
    """Of dispatch() and dispatch_send(). A call that fails before its launch passes for every rank, refused. One that
    fails after it (by KeyboardInterrupt, say) ends its handle here; the peers' combine is refused."""

    @functools.wraps(call)
    def made(ep: Caller, *args: Any, **kwargs: Any) -> Any:
        try:
            handle = call(ep, *args, **kwargs)
        except BaseException as error:
            _tell(ep, error, functools.partial(_dispatch_failed, ep, isinstance(error, REPORTS)))
            raise
        ep._num_dispatches += 1
        return handle

    return made  # type: ignore[return-value]


def _dispatch_failed(ep: Caller, is_report: bool, core: Any, why: str) -> None:
    try:
        was_launched = core.num_dispatches != ep._num_dispatches
        if was_launched or not is_report:
            core.tell_dispatch_failed(why, ep._num_dispatches)
    finally:
        ep._num_dispatches = core.num_dispatches


def serves_a_handle(position: int) -> Callable[[Call], Call]:
    """Of the calls between a dispatch and the end of its combine; `position`: of the handle among the arguments. A call
    that fails before this rank's sums are on their way refuses the combine; all may try again with the same handle.

    Which one the peers wait for is not known when the handle itself is wrong (closed, of another object, no handle).
    Then the combine of every handle that is received and open on this rank is refused once: a peer may be told in the
    combine of another handle than was meant, and makes that call again."""

    def decorate(call: Call) -> Call:
        @functools.wraps(call)
        def made(ep: Caller, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(ep, *args, **kwargs)
            except REPORTS:
                raise
            except BaseException as error:
                handle = kwargs.get("handle", args[position] if len(args) > position else None)
                key = handle._handle if isinstance(handle, DispatchHandle) else None
                _tell(ep, error, lambda core, why: core.tell_combine_failed(key, why))
                raise

        return made  # type: ignore[return-value]

    return decorate


@contextlib.contextmanager
def dispatch_refused_if_failed(ep: Caller) -> Iterator[None]:
    """Around what is done before a dispatch(), whose peers may wait already: if it fails, that dispatch has passed for every
    rank, refused."""
    try:
        yield
    except BaseException as error:
        _tell(ep, error, functools.partial(_dispatch_failed, ep, False))
        raise


@contextlib.contextmanager
def refused_if_failed(collectives: Client) -> Iterator[None]:
    """Around what a call of a Collectives does before its launch. If that fails, the peers raise PeerRefusedError, and the
    call counts as made on every rank."""
    try:
        yield
    except BaseException as error:
        _tell(collectives, error, lambda core, why: core.refuse(why))
        raise


def _tell(ep: Client, error: BaseException, tell: Callable[[Any, str], None]) -> None:
    if ep._core is None:  # closed: there is no memory to say it in
        return
    try:
        tell(ep._core, words_of(error))
    except Exception as failure:  # the error on its way is the one to see
        log.warning("rank %d could not tell its peers that its call failed: %r", ep.rank, failure)


def words_of(error: BaseException) -> str:
    """The error's text, as UTF-8 can carry it; with its type where that is not clear from the text."""
    try:
        text = str(error)
    except Exception:
        text = ""
    if not isinstance(error, (ValueError, TypeError)) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text.encode("utf-8", "backslashreplace").decode()
