"""CallThread, which runs the calls of the torch.distributed backend on CPU tensors, without ranks: a call is a function that may
wait for an event."""

import random
import threading
import time

import pytest

from moe_a2a.torch_backend.work import CallThread

LONG = 30  # seconds; only a failing test waits for them


def waiting_call(calls: CallThread, is_over: threading.Event) -> threading.Thread:
    """Another thread, in a synchronous call that lasts until is_over, or LONG."""
    has_begun = threading.Event()

    def call() -> None:
        has_begun.set()
        is_over.wait(LONG)

    thread = threading.Thread(target=lambda: calls.run(call, [], True).wait(), daemon=True)
    thread.start()
    assert has_begun.wait(LONG)
    return thread


def test_async_calls_return_while_another_thread_waits_in_a_call():
    """Regression: the synchronous call held the lock while it waited for its peers."""
    calls, is_over, ran = CallThread("test"), threading.Event(), []
    thread = waiting_call(calls, is_over)
    works = [calls.run(lambda number=number: ran.append(number), [], False) for number in range(3)]
    assert thread.is_alive() and not ran and not works[0].is_completed()
    is_over.set()
    assert all(work.wait() for work in works) and ran == [0, 1, 2]
    thread.join(LONG)
    calls.close()


def test_close_gives_up_on_a_call_of_another_thread():
    """Regression: a process that ended waited for the group's timeout, not for EXIT_SECONDS."""
    calls, is_over, ran = CallThread("test"), threading.Event(), []
    thread = waiting_call(calls, is_over)
    calls.run(lambda: ran.append(1), [], False)
    calls.close(0.1)
    assert thread.is_alive()
    is_over.set()
    thread.join(LONG)
    assert not ran  # dropped


@pytest.mark.parametrize("seconds", [None, LONG])
def test_close_waits_for_a_call_of_another_thread_and_those_behind_it(seconds):
    calls, is_over, ran = CallThread("test"), threading.Event(), []
    calls.run(lambda: ran.append(0), [], False).wait()  # its thread stays, and waits for the next call
    thread = waiting_call(calls, is_over)
    calls.run(lambda: ran.append(1), [], False)
    threading.Timer(0.2, is_over.set).start()
    calls.close(seconds)
    assert is_over.is_set() and ran == [0, 1]
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_synchronous_call_never_overtakes_a_queued_one():
    calls, is_over, ran = CallThread("test"), threading.Event(), []
    waiting_call(calls, is_over)
    calls.run(lambda: (time.sleep(0.1), ran.append("queued")), [], False)
    second = calls.run(lambda: ran.append("synchronous"), [], True)
    is_over.set()
    second.wait()
    calls.run(lambda: ran.append("last"), [], True).wait()
    assert ran == ["queued", "synchronous", "last"]
    calls.close()


@pytest.mark.parametrize("waits_at_once", [True, False])
def test_calls_within_a_call(waits_at_once):
    """As a signal handler or a finaliser makes them: a synchronous one runs at once, else it would wait for itself."""
    calls, ran = CallThread("test"), []

    def outer() -> None:
        queued = calls.run(lambda: ran.append("queued"), [], False)
        calls.run(lambda: ran.append("within"), [], True).wait()
        assert not queued.is_completed()
        ran.append("outer")

    work = calls.run(outer, [], waits_at_once)
    assert work.wait()
    calls.close()
    assert ran == ["within", "outer", "queued"]


def test_a_call_that_fails_leaves_the_others_free():
    calls, is_over, ran = CallThread("test"), threading.Event(), []

    def fail() -> None:
        is_over.wait(LONG)
        raise ValueError("failed")

    caught: list[BaseException] = []

    def call() -> None:
        with pytest.raises(ValueError, match="failed") as raised:
            calls.run(fail, [], True)
        caught.append(raised.value)

    thread = threading.Thread(target=call)
    thread.start()
    is_over.set()
    thread.join(LONG)
    work = calls.run(lambda: ran.append(1), [], True)
    assert work.wait() and ran == [1] and len(caught) == 1
    calls.close()


def test_no_call_is_lost(session_seed):
    """One call at a time, in each thread's order, whoever runs it; then all end, while a thread closes."""
    calls, running, ran = CallThread("test"), threading.Lock(), []

    def call(thread: int, number: int) -> None:
        assert running.acquire(blocking=False), "two calls at the same time"
        ran.append((thread, number))
        running.release()

    def make(thread: int) -> None:
        chance = random.Random(session_seed + thread)
        for number in range(300):
            work = calls.run(lambda number=number: call(thread, number), [], chance.random() < 0.5)
            if chance.random() < 0.5:
                assert work.wait()

    threads = [threading.Thread(target=make, args=(thread,), daemon=True) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    calls.close(LONG)
    assert all([number for owner, number in ran if owner == thread] == list(range(300)) for thread in range(4))
