"""Ctrl-C during a wait: KeyboardInterrupt at once, the peers learn of it, the object is unusable.

A host wait that does not check Python's signals goes on until the deadline, 30 s by default.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import on_device
import pytest
import ranks
import torch.distributed as dist
from small_calls import CONFIG, experts, good_call, make_inputs

import moe_a2a

TIMEOUT = 10.0
PROMPT = 1.0  # a fifth of a second on an idle machine


def interrupt_in_call(number=signal.SIGINT):
    """Sends the signal once the main thread has been inside a call of the object for a while. Returns a list: when it was sent."""
    sent = []

    def interrupt():
        inside = 0
        while inside < 3:
            time.sleep(0.1)
            frame = sys._current_frames()[threading.main_thread().ident]
            inside = inside + 1 if Path(frame.f_code.co_filename).name in ("expert_parallel.py", "client.py") else 0
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    return sent


def interrupted_call(group, operation, num_blocks, num_max_ll_tokens):
    config = {**CONFIG, "timeout": TIMEOUT, "num_blocks": num_blocks, "num_max_ll_tokens": num_max_ll_tokens}
    ranks.receive_interrupts()
    store = dist.distributed_c10d._get_default_store()
    group = moe_a2a.as_group(group)
    with moe_a2a.ExpertParallel(group, **config) as ep:
        good_call(ep)
        handle = ep.dispatch(*make_inputs(ep, 3))
        y = experts(handle)
        group.all_gather(None)
        if ep.rank == 0:
            sent = interrupt_in_call()
            with pytest.raises(KeyboardInterrupt):
                ep.combine(y, handle) if operation == "combine" else ep.dispatch(*make_inputs(ep))
            assert time.monotonic() - sent[0] < ranks.slack(PROMPT)
            store.set("interrupted", "")
            for call in (lambda: ep.dispatch(*make_inputs(ep)), ep.check):
                with pytest.raises(RuntimeError, match="rank 0: an earlier call was interrupted"):
                    call()
        else:
            store.wait(["interrupted"])  # makes no call before: rank 0 waits for rows, or for sums
            start = time.monotonic()
            with pytest.raises(moe_a2a.PeerTimeoutError, match="rank 0 left a call") as raised:
                for _ in range(3):  # rank 0 has sent its part of the first
                    ep.dispatch(*make_inputs(ep)).release()
            assert raised.value.peer == 0
            assert time.monotonic() - start < ranks.slack(PROMPT)
        start = time.monotonic()
        ep.close()
        assert time.monotonic() - start < ranks.slack(PROMPT)
    with moe_a2a.ExpertParallel(group, **config) as again:
        good_call(again)


@on_device.cpu_only
@pytest.mark.parametrize("num_max_ll_tokens", [0, 6], ids=["signals", "ll_words"])
@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_an_interrupt_ends_a_wait(operation, num_blocks, num_max_ll_tokens):
    ranks.run_processes(3, interrupted_call, operation, num_blocks, num_max_ll_tokens, timeout=40)


def handled_signal(group):
    """A handler that does not raise runs at once, and the wait continues."""
    store = dist.distributed_c10d._get_default_store()
    with moe_a2a.ExpertParallel(group, **{**CONFIG, "timeout": TIMEOUT}) as ep:
        moe_a2a.as_group(group).all_gather(None)
        if ep.rank == 0:
            seen = []

            def handler(*_):
                seen.append(time.monotonic())
                threading.Timer(0.5, store.set, ("handled", "")).start()

            signal.signal(signal.SIGUSR2, handler)
            sent = interrupt_in_call(signal.SIGUSR2)
            good_call(ep)
            assert time.monotonic() - seen[0] > 0.4
            assert len(seen) == 1 and seen[0] - sent[0] < ranks.slack(0.5)
        else:
            store.wait(["handled"])
            good_call(ep)


@on_device.cpu_only
def test_a_handler_that_raises_nothing_ends_nothing():
    ranks.run_processes(2, handled_signal, timeout=30)


def handler_calls_the_object(group):
    store = dist.distributed_c10d._get_default_store()
    with moe_a2a.ExpertParallel(group, **{**CONFIG, "timeout": TIMEOUT}) as ep:
        moe_a2a.as_group(group).all_gather(None)
        if ep.rank == 0:
            errors = []

            def handler(*_):
                with pytest.raises(RuntimeError, match="signal handler") as raised:
                    ep.check()
                errors.append(raised.value)
                store.set("handled", "")

            signal.signal(signal.SIGUSR2, handler)
            interrupt_in_call(signal.SIGUSR2)
            good_call(ep)
            assert len(errors) == 1
        else:
            store.wait(["handled"])
            good_call(ep)


@on_device.cpu_only
def test_a_handler_that_calls_the_object_is_refused():
    ranks.run_processes(2, handler_calls_the_object, timeout=30)


def handler_closes_the_object(group):
    ep = moe_a2a.ExpertParallel(group, **{**CONFIG, "timeout": TIMEOUT})
    store = dist.distributed_c10d._get_default_store()
    moe_a2a.as_group(group).all_gather(None)
    if ep.rank == 0:
        signal.signal(signal.SIGUSR2, lambda *_: ep.close())
        sent = interrupt_in_call(signal.SIGUSR2)
        with pytest.raises(RuntimeError, match=r"close\(\) was called"):
            good_call(ep)
        assert time.monotonic() - sent[0] < ranks.slack(PROMPT)
        assert ep.is_closed
        store.set("closed", "")
    else:
        store.wait(["closed"])
        with pytest.raises(moe_a2a.PeerTimeoutError, match="rank 0 left a call"):
            good_call(ep)
        ep.close()


@on_device.cpu_only
def test_a_handler_may_close_the_object():
    ranks.run_processes(2, handler_closes_the_object, timeout=30)


def interrupt_while_another_thread_is_in_a_call(group):
    """The main thread waits for its turn to call."""
    ranks.receive_interrupts()
    with moe_a2a.ExpertParallel(group, **{**CONFIG, "timeout": TIMEOUT}) as ep:
        moe_a2a.as_group(group).all_gather(None)
        if ep.rank == 1:
            time.sleep(3)
            good_call(ep)
            return
        other = threading.Thread(target=good_call, args=(ep,))
        other.start()
        time.sleep(0.2)
        sent = interrupt_in_call()
        with pytest.raises(KeyboardInterrupt):
            ep.check()
        assert time.monotonic() - sent[0] < ranks.slack(PROMPT)
        other.join()


@on_device.cpu_only
def test_an_interrupt_while_waiting_for_a_turn():
    ranks.run_processes(2, interrupt_while_another_thread_is_in_a_call, timeout=30)


MULTIPLY_UNTIL_A_SIGNAL = """
import signal, time, torch, moe_a2a
x, w = torch.ones(256, 1 << 19, dtype=torch.bfloat16), torch.ones(1, 48, 1 << 19, dtype=torch.bfloat16)
offsets = torch.tensor([0, 256], dtype=torch.int32)
calls, raised = [], 0
def handler(*_):
    calls.append(0)
    raise ValueError
signal.signal(signal.SIGALRM, handler)
start = time.monotonic()
moe_a2a.grouped_gemm(x, None, offsets, w, num_blocks=3)
seconds = time.monotonic() - start
for _ in range(10):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.7 * seconds)
        moe_a2a.grouped_gemm(x, None, offsets, w, num_blocks=3)
    except ValueError:
        raised += 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
    except ValueError:
        raised += 1
assert raised == len(calls), (raised, len(calls))
"""


def test_a_product_keeps_no_signal_to_itself():
    """The thread that launches it may wait for the other blocks, and then runs the handlers of signals."""
    subprocess.run([sys.executable, "-c", MULTIPLY_UNTIL_A_SIGNAL], check=True, timeout=120)
