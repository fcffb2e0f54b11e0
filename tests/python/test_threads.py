"""Several threads and one object: calls are serialised, close() ends a wait, nobody holds the GIL while it waits.

What is at stake: a segmentation fault if close() frees the memory that another thread's dispatch() polls, and threads that
never run if close(), check() or trace() hold the GIL while they wait.
"""

import functools
import sys
import threading
import time

import on_device
import pytest
import ranks
from small_calls import CONFIG, experts, good_call, make_inputs

import moe_a2a

TIMEOUT = 8.0


def make_objects(num_ranks=2, **config):
    groups = moe_a2a.thread_group(num_ranks)
    eps = [None] * num_ranks

    def make(rank):
        eps[rank] = moe_a2a.ExpertParallel(groups[rank], **{**CONFIG, "timeout": TIMEOUT, **config})

    in_threads([lambda rank=rank: make(rank) for rank in range(num_ranks)])
    return eps


def in_threads(bodies, seconds=30):
    errors = []

    def run(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


class Waiting:
    """A thread inside a call that waits for the peer."""

    def __init__(self, call):
        self.error, self.start = None, time.monotonic()

        def run():
            try:
                call()
            except BaseException as error:
                self.error = error
            self.seconds = time.monotonic() - self.start

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        time.sleep(0.3)
        assert self.thread.is_alive()

    def join(self):
        self.thread.join(TIMEOUT + 5)
        assert not self.thread.is_alive()
        return self.error


@on_device.cpu_only
@pytest.mark.parametrize("num_max_ll_tokens", [0, 6])
def test_a_rank_whose_peer_is_late_leaves_the_cores_to_others(num_max_ll_tokens):
    seconds, (ep, peer) = 1.0, make_objects(num_blocks=2, num_max_ll_tokens=num_max_ll_tokens)
    waiting = Waiting(lambda: good_call(ep, 3))
    before = time.process_time()
    time.sleep(seconds)
    used = time.process_time() - before
    good_call(peer, 3)
    assert waiting.join() is None
    assert used < 0.4 * seconds  # of two blocks' threads, which used to poll all the time
    for of in (ep, peer):
        of.close()


@on_device.cpu_only
@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("num_max_ll_tokens", [0, 6])
def test_close_ends_the_wait_of_another_thread(num_blocks, num_max_ll_tokens):
    ep, peer = make_objects(num_blocks=num_blocks, num_max_ll_tokens=num_max_ll_tokens)
    waiting = Waiting(lambda: ep.dispatch(*make_inputs(ep)))
    start = time.monotonic()
    ep.close()
    assert time.monotonic() - start < ranks.slack(1)
    error = waiting.join()
    assert isinstance(error, RuntimeError) and not isinstance(error, moe_a2a.PeerTimeoutError)
    assert "rank 0" in str(error) and "close() was called" in str(error)
    assert ep.is_closed
    # The peer learns of it and does not wait until its deadline.
    start = time.monotonic()
    with pytest.raises(moe_a2a.PeerTimeoutError, match="rank 0 left a call") as raised:
        for _ in range(3):
            peer.dispatch(*make_inputs(peer))
    assert time.monotonic() - start < ranks.slack(1)
    assert raised.value.peer == 0
    peer.close()


@on_device.cpu_only
def test_close_ends_the_wait_of_a_combine():
    ep, peer = make_objects()
    handles = [None, None]

    def dispatch(rank, of):
        handles[rank] = of.dispatch(*make_inputs(of, 3))

    in_threads([lambda: dispatch(0, ep), lambda: dispatch(1, peer)])
    waiting = Waiting(lambda: ep.combine(experts(handles[0]), handles[0]))
    ep.close()
    assert "close() was called" in str(waiting.join())
    peer.close()


@on_device.cpu_only
def test_close_ends_the_wait_for_ranks_that_set_no_handles():
    """Regression: it waited for the whole timeout."""
    eps = [moe_a2a.ExpertParallel(moe_a2a.HandleExchange(r, 2), **{**CONFIG, "timeout": TIMEOUT}) for r in range(2)]
    handles = [ep.get_comm_handle() for ep in eps]
    waiting = Waiting(lambda: eps[0].set_comm_handles(handles))
    for ep in eps:
        ep.close()
    assert "close() was called" in str(waiting.join())


def runs_while_freed(owner):
    """Whether another thread gets the GIL while the owner, the only one of an object's memory, is freed. It gets it only if given."""
    go, is_parked, runs = threading.Lock(), threading.Lock(), []
    go.acquire()
    is_parked.acquire()

    def run():
        is_parked.release()
        go.acquire()
        runs.append(None)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        other = threading.Thread(target=run)
        other.start()
        is_parked.acquire()
        go.release()
        owner.clear()
        return bool(runs)
    finally:
        sys.setswitchinterval(before)
        other.join()


@on_device.cpu_only
def test_memory_is_freed_without_the_gil():
    """Regression: on a GPU that waits for kernels, and they may wait for a rank in another thread, which needs the GIL."""

    def owner():
        (ep,) = make_objects(1, num_blocks=3)
        ep.dispatch(*make_inputs(ep, 3))
        owners = [ep._core.traced_experts()]
        ep.close()
        return owners

    assert any(runs_while_freed(owner()) for _ in range(50))  # the other thread may wake too late


@on_device.cpu_only
def test_many_rounds_of_close_during_calls():
    """At any moment of a call, not only in its wait. Run concurrently: if no call is in progress, the peer waits in vain."""
    in_threads([functools.partial(close_after, 0.001 * (i % 7)) for i in range(14)], seconds=3 * TIMEOUT + 15)


def close_after(delay):
    ep, peer = make_objects()

    def calls(of):
        try:
            for salt in range(100_000):
                good_call(of, salt)
        except RuntimeError:
            pass

    def close():
        time.sleep(delay)
        ep.close()

    in_threads([lambda: calls(ep), lambda: calls(peer), close], seconds=TIMEOUT + 5)
    peer.close()


@on_device.cpu_only
@pytest.mark.parametrize("call", ["check", "trace", "blocks_for"])
def test_other_calls_wait_for_their_turn_without_the_gil(call):
    ep, peer = make_objects()
    waiting = Waiting(lambda: good_call(ep))
    calls = {
        "check": ep.check,
        "trace": lambda: ep._open_core().trace_read(),
        "blocks_for": lambda: ep.blocks_for(1),
    }
    other = threading.Thread(target=calls[call], daemon=True)
    other.start()
    counted, end = 0, time.monotonic() + 0.5
    while time.monotonic() < end:  # stands still if either holds the GIL
        counted += 1
        time.sleep(0.001)
    assert counted > 50
    good_call(peer)
    other.join(5)
    assert waiting.join() is None and not other.is_alive()
    ep.close(), peer.close()


@on_device.cpu_only
def test_threads_of_a_rank_take_turns():
    """Each rank's calls come from four threads, one after the other; all give right results."""
    eps = make_objects(3, num_buffers=2)
    turns = [threading.Lock() for _ in eps]

    def caller(rank):
        for _ in range(6):
            with turns[rank]:  # the ranks' calls are the same, whichever thread makes them
                good_call(eps[rank])
            eps[rank].check()

    in_threads([lambda rank=rank: caller(rank) for rank in range(3) for _ in range(4)], seconds=60)
    for ep in eps:
        ep.close()
