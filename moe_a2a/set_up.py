"""Makes a Communicator or one of its clients on all ranks of a group together. A failure on one rank raises on all, within
`timeout`, and frees the memory: nobody waits for a rank that has left, and the group stays usable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from moe_a2a import arguments, calls, devices
from moe_a2a.errors import PeerTimeoutError
from moe_a2a.groups import as_group, rendezvous

DEFAULT_TIMEOUT = 30.0  # seconds; for a meeting in which a rank reports that its timeout is invalid


class Made(Protocol):
    """The object to make: it knows its group, and its core holds the memory."""

    _group: Any
    _core: Any
    rank: int
    timeout: Any
    device: Any

    def get_comm_handle(self) -> bytes: ...
    def set_comm_handles(self, handles: list[bytes]) -> None: ...
    def _drop_core(self) -> None: ...


@contextlib.contextmanager
def refused_if_failed(group: Any, what: str) -> Iterator[None]:
    """Wraps work after which all ranks make a `what`, for which the peers may already wait: if it fails, they raise
    its error. group: as the constructor takes it."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # a bad group, or one without meetings
            group = as_group(getattr(group, "_group", group))
            with rendezvous.begin(group, f"make the {what}") as meeting:
                meeting.post((None, None, repr(error)))
        raise


def _making_refused(made: Any, /, *given: Any, **by_name: Any) -> AbstractContextManager[None]:
    group = given[0] if given else by_name.get("group")  # both, which is an error, must not be one here
    return refused_if_failed(group, type(made).__name__)


# Decorates a constructor whose first argument is `group`: arguments that do not match its signature are refused on every rank.
refuses_wrong_arguments = calls.refuses_arguments_by(_making_refused)


def _timeout_of_meeting(made: Made) -> float:
    try:
        return arguments.checked_timeout(made.rank, made.timeout)
    except (TypeError, ValueError):
        return DEFAULT_TIMEOUT


def make_together(made: Made, allocate: Callable[[], None]) -> None:
    """Allocates, exchanges handles, maps the other ranks' memory."""
    timeout = _timeout_of_meeting(made)
    with rendezvous.begin(made._group, f"make the {type(made).__name__}") as meeting:
        try:
            handles = _exchange(made, meeting, timeout, allocate)
            _map(made, meeting, timeout, handles)
        except BaseException:
            made._drop_core()
            raise


def _exchange(made: Made, meeting: Any, timeout: float, allocate: Callable[[], None]) -> list[bytes]:
    own: Exception | None = None
    gpu = None
    try:
        allocate()
        gpu = devices.gpu_identity(made.device)
    except Exception as error:
        own = error
    except BaseException:
        meeting.leave()
        raise
    mine = (made.get_comm_handle(), gpu) if own is None else (None, None)
    try:
        said = meeting.all_gather((*mine, repr(own) if own else None), timeout)
    except PeerTimeoutError:
        if own is None and meeting.is_certainly_missed():
            made._core.give_back()
        raise
    except ValueError:  # raised on every rank: they make different objects, so none maps the others' memory
        if own is None:
            made._core.give_back()
        raise
    errors = [error for *_, error in said]
    if any(errors):
        if made._core is not None:
            made._core.give_back()  # nobody has mapped it, or ever will
        _raise_first(made, own, errors)
    try:
        devices.check_one_rank_per_gpu([gpu for _, gpu, _ in said])
    except ValueError:  # raised on every rank
        made._core.give_back()
        raise
    return [handle for handle, *_ in said]


def _map(made: Made, meeting: Any, timeout: float, handles: list[bytes]) -> None:
    own: Exception | None = None
    try:
        made.set_comm_handles(handles)
    except Exception as error:
        own = error
    except BaseException:
        meeting.leave()
        raise
    try:
        errors = meeting.all_gather(repr(own) if own else None, timeout)
    except PeerTimeoutError:
        made._core.disconnect()  # keeps the memory: the missing rank may have mapped it
        raise
    if not any(errors):
        return
    made._core.disconnect()
    meeting.all_gather(None, timeout)
    made._core.give_back()  # no rank maps another's memory any more
    _raise_first(made, own, errors)


def _raise_first(made: Made, own: Exception | None, errors: list[str | None]) -> None:
    if own is not None:
        raise own
    rank = next(r for r, text in enumerate(errors) if text)
    raise RuntimeError(f"rank {rank} could not make its {type(made).__name__}: {errors[rank]}")
