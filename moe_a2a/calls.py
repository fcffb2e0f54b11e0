"""Calls that all ranks make: if one fails on this rank before its launch, this rank tells its peers.

They raise PeerRefusedError with this rank's error text instead of waiting until their deadline. Whatever may fail is guarded:

    what may fail                               guarded by                      if it fails
    dispatch() and dispatch_send()              @opens_a_handle                 the dispatch is over on every rank
    work before a dispatch                      dispatch_refused_if_failed()    the same
    a method that makes one dispatch            @makes_a_dispatch               the same
    calls on a handle, such as combine()        @serves_a_handle                all ranks may retry with the same handle
    work before a combine                       attempt_refused_if_failed()     the same
    work between dispatch and combine           combine_refused_if_failed()     no rank may retry: the handle ends on all
    several calls that report their own errors  released_if_failed()            this rank's handle ends
    a call of a Collectives                     refused_if_failed()             the call is over on every rank
    arguments that match no signature           @refuses_wrong_arguments()      as its guard says
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from moe_a2a.errors import CallMismatchError, PeerRefusedError, PeerTimeoutError, RoutingError
from moe_a2a.graph_tracing import is_tracing
from moe_a2a.handle import DispatchHandle, Owner

log = logging.getLogger("moe_a2a")
Call = TypeVar("Call", bound=Callable[..., Any])


class Called(Protocol):
    """The object whose method is called."""

    rank: int
    _core: Any


class Dispatcher(Protocol):
    """An ExpertParallel or TwoLevelExpertParallel."""

    @property
    def _num_dispatches(self) -> int: ...
    def _refuse_dispatch(self, error: BaseException) -> None: ...


# Raised by kernels, or for an earlier call: every affected rank learns of it independently.
REPORTS = (PeerTimeoutError, PeerRefusedError, RoutingError, CallMismatchError)


def opens_a_handle(call: Call) -> Call:
    """Decorates dispatch() and dispatch_send(). If a call fails before its launch, the dispatch counts as refused on every
    rank. If it fails after it (by KeyboardInterrupt, say), this rank's handle ends and the peers' combine is refused."""

    @functools.wraps(call)
    def made(ep: Owner, *args: Any, **kwargs: Any) -> Any:
        try:
            handle = call(ep, *args, **kwargs)
        except PeerTimeoutError:  # the peers raise it too, and not PeerRefusedError
            raise
        except BaseException as error:
            _tell(ep, error, functools.partial(_dispatch_failed, ep, isinstance(error, REPORTS)))
            raise
        ep._num_dispatches += 1
        return handle

    return made  # type: ignore[return-value]


def _dispatch_failed(ep: Owner, is_report: bool, core: Any, why: str) -> None:
    try:
        was_launched = core.num_dispatches != ep._num_dispatches
        if was_launched or not is_report:
            core.tell_dispatch_failed(why, ep._num_dispatches)
    finally:
        ep._num_dispatches = core.num_dispatches


def serves_a_handle(position: int) -> Callable[[Call], Call]:
    """Decorates the calls between a dispatch and the end of its combine; `position`: the handle's place among the arguments. If
    a call fails before this rank's sums are sent, it refuses the combine; all ranks may retry with the same handle.

    If the handle itself is wrong (closed, another object's, not a handle), nobody knows which combine the peers wait for.
    Then the combine of every received, open handle on this rank is refused once: a peer may get the refusal in the
    combine of a different handle, and repeats that call."""

    def decorate(call: Call) -> Call:
        @functools.wraps(call)
        def made(ep: Owner, *args: Any, **kwargs: Any) -> Any:
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


class Guard(AbstractContextManager[None]):
    """Calls `failed` with the error that its body raises. Every call enters some of these, so it is a class: a generator
    takes three times as long."""

    __slots__ = ("_failed",)

    def __init__(self, failed: Callable[[BaseException], None]):
        self._failed = failed

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._failed(error)


def dispatch_refused_if_failed(ep: Dispatcher) -> AbstractContextManager[None]:
    """Wraps work that precedes a dispatch(), for which peers may already wait: if it fails, that dispatch counts as
    refused on every rank. The dispatch() itself may be inside, since it reports its own failure."""
    num_dispatches = ep._num_dispatches

    def failed(error: BaseException) -> None:
        if ep._num_dispatches == num_dispatches:
            ep._refuse_dispatch(error)

    return Guard(failed)


def refuse_dispatch(ep: Owner, error: BaseException) -> None:
    """This rank's next dispatch fails with `error`: it counts as refused on every rank."""
    _tell(ep, error, functools.partial(_dispatch_failed, ep, False))


def makes_a_dispatch(call: Call) -> Call:
    """Decorates a method that makes one dispatch() of its object's `ep`: whatever fails before it, a wrong argument list
    included, refuses that dispatch on every rank."""

    @functools.wraps(call)
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():  # the graph would be recompiled for each number of dispatches
            return call(self, *args, **kwargs)
        with dispatch_refused_if_failed(self.ep):
            return call(self, *args, **kwargs)

    return made  # type: ignore[return-value]


def released_if_failed(handle: DispatchHandle) -> AbstractContextManager[None]:
    """Wraps calls that report their own failures: if one fails, this rank's handle ends."""
    return Guard(lambda error: _release(handle))


def _release(handle: DispatchHandle) -> None:
    if handle.is_open:
        handle.release()


def combine_refused_if_failed(handle: DispatchHandle) -> AbstractContextManager[None]:
    """Wraps work between a dispatch() and its combine(), for which peers may already wait: if it fails, that combine is
    refused for good, which ends the handle on every rank."""

    def failed(error: BaseException) -> None:
        if isinstance(error, REPORTS) or not handle.is_open:
            _release(handle)
        else:
            # For good, at once: a peer that first found an attempt refused would keep its handle open, and its next dispatch would
            # take another buffer than this rank's.
            _tell(handle.ep, error, lambda core, why: core.release(handle._handle, why))

    return Guard(failed)


def attempt_refused_if_failed(ep: Called, handle: DispatchHandle | None = None) -> AbstractContextManager[None]:
    """Wraps work that precedes a combine(): if it fails, this combine is refused, and all ranks may retry with the same
    handle. Without a handle the combine of every received, open one is refused, as in serves_a_handle()."""
    return Guard(lambda error: refuse_combine(ep, error, handle))


def refuse_combine(ep: Called, error: BaseException, handle: DispatchHandle | None = None) -> None:
    """This rank's attempt to combine fails with `error`. handle: as for attempt_refused_if_failed()."""
    key = None if handle is None else handle._handle
    _tell(ep, error, lambda core, why: core.tell_combine_failed(key, why))


def refused_if_failed(collectives: Called) -> AbstractContextManager[None]:
    """Wraps what a call of a Collectives does before its launch. If that fails, the peers raise PeerRefusedError, and the call
    counts as made on every rank."""
    return Guard(lambda error: _tell(collectives, error, lambda core, why: core.refuse(why)))


def refuses_wrong_arguments(refused: Callable[..., AbstractContextManager[None]]) -> Callable[[Call], Call]:
    """Decorates a call that reports its own failures: if the arguments do not match its signature, it is refused on every rank too.

    refused: called with the object (of a function: its first argument, if any); returns a context manager that refuses the
    peers' call if its body fails, such as refused_if_failed()."""
    return refuses_arguments_by(lambda *args, **_: refused(*args[:1]))


def refuses_arguments_by(refused: Callable[..., AbstractContextManager[None]]) -> Callable[[Call], Call]:
    """The same; `refused` gets all arguments."""

    def decorate(call: Call) -> Call:
        @functools.wraps(call)
        def made(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return call(*args, **kwargs)
            try:
                return call(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # the call had begun: its body raised this
                with refused(*args, **kwargs):
                    raise

        return made  # type: ignore[return-value]

    return decorate


def _tell(ep: Called, error: BaseException, tell: Callable[[Any, str], None]) -> None:
    if ep._core is None:  # closed: there is no memory to write the refusal into
        return
    try:
        tell(ep._core, words_of(error))
    except PeerTimeoutError:  # of an earlier call: the object is lost on every rank, and no peer waits
        return
    except Exception as failure:  # the original error is the one to raise
        if words_of(failure) != words_of(error):  # a forked child is refused both, and no peer waits for it
            log.warning("rank %d could not tell its peers that its call failed: %r", ep.rank, failure)


def words_of(error: BaseException) -> str:
    """The error's text as valid UTF-8, with its type if the text does not make that clear."""
    try:
        text = str(error)
    except Exception:
        text = ""
    if not isinstance(error, (ValueError, TypeError)) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text.encode("utf-8", "backslashreplace").decode()
