"""An object belongs to the process that made it.

A forked child has the parent's shared memory and epochs, and none of its threads: if it called an object, the PARENT would get
wrong values, or hang; if it freed one, it would unlink the parent's memory or crash. So every call in a child is refused by
name, and dropping an object there changes nothing.
"""

import gc
import logging
import os
import pickle
import signal
import threading
import time
import traceback

import on_device
import pytest
import ranks
import torch
import torch.distributed as dist
from small_calls import CONFIG, experts, good_call, make_inputs

import moe_a2a

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(body):
    """Runs body() in a forked child; returns its result. AssertionError if the child raises, crashes or does not end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(20)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            message = ("result", body())
        except BaseException:
            message = ("error", traceback.format_exc())
        os.write(writer, pickle.dumps(message))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}"
    kind, value = pickle.loads(data)
    assert kind == "result", value
    return value


def refusals(ep, handle):
    """The error of each entry point in this process, and what is logged meanwhile."""
    logged = []
    logging.getLogger("moe_a2a").addFilter(lambda record: logged.append(record.getMessage()))
    x, topk_idx, weights = make_inputs(ep)
    y = torch.zeros(8, ep.hidden)
    calls = {
        "dispatch": lambda: ep.dispatch(x, topk_idx, weights),
        "dispatch_send": lambda: ep.dispatch_send(x, topk_idx, weights),
        "dispatch with a bad argument": lambda: ep.dispatch(x[:, 1:], topk_idx, weights),
        "dispatch_recv": lambda: ep.dispatch_recv(handle),
        "combine": lambda: ep.combine(y, handle),
        "combine_send": lambda: ep.combine_send(y, handle),
        "combine_recv": lambda: ep.combine_recv(handle),
        "release": handle.release,
        "check": ep.check,
        "get_comm_handle": ep.get_comm_handle,
        "set_comm_handles": lambda: ep.set_comm_handles([b""] * ep.num_ranks),
        "nbytes": lambda: ep.nbytes,
        "recv_x": lambda: handle.recv_x,
        "num_routes": lambda: handle.num_routes,
        "trace": lambda: moe_a2a.trace(ep).__enter__(),
        "end of a trace": lambda: moe_a2a.trace(ep).__exit__(None, None, None),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said, logged


def check_every_call_is_refused(group, num_blocks):
    with moe_a2a.ExpertParallel(group, **CONFIG, num_blocks=num_blocks) as ep:
        good_call(ep)
        handle = ep.dispatch(*make_inputs(ep))
        y = experts(handle)
        parent = os.getpid()
        said, logged = in_child(lambda: refusals(ep, handle))
        assert not logged  # a child tells its parent's peers nothing, and does not complain that it cannot
        for name, text in said.items():
            assert text.startswith("RuntimeError"), (name, text)
            assert f"made by process {parent}" in text and "after the fork" in text, (name, text)
        group.barrier()
        with moe_a2a.trace(ep):  # the ranks meet: the children have not posted in their parents' names
            ep.combine(y, handle)
        for salt in range(3):
            good_call(ep, salt)


@on_device.cpu_only
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_every_call_in_a_child_is_refused_and_the_parent_goes_on(num_blocks):
    ranks.run_processes(2, check_every_call_is_refused, num_blocks, timeout=40)


def print_in_child(group):
    with moe_a2a.ExpertParallel(group, **CONFIG) as ep, moe_a2a.Collectives(group) as coll:
        in_parent = repr(ep), repr(coll)
        assert in_child(lambda: (repr(ep), repr(coll))) == in_parent
        group.barrier()


@on_device.cpu_only
def test_a_child_can_print_an_object():
    """A worker of a DataLoader could not log its model: repr() asked the object for its size, which is refused there."""
    ranks.run_processes(2, print_in_child, timeout=40)


def make_in_child(group):
    def make():
        with pytest.raises(
            RuntimeError, match=rf"group of rank \d belongs to process {parent} .*forked from it; call torch"
        ):
            moe_a2a.Collectives(group, timeout=1)

    parent = os.getpid()
    moe_a2a.Collectives(group).close()
    in_child(make)
    group.barrier()
    with moe_a2a.Collectives(group) as coll:
        assert coll.all_reduce(torch.ones(1)).item() == coll.num_ranks


@on_device.cpu_only
def test_a_child_makes_no_object_on_its_parents_group():
    """It posted in its parent's name, under the number of the meeting that the parent takes part in next."""
    ranks.run_processes(2, make_in_child, timeout=40)


def let_go_in_child(group, how):
    ep = moe_a2a.ExpertParallel(group, **CONFIG, num_blocks=3)
    good_call(ep)
    kept = [ep, ep.dispatch(*make_inputs(ep)), moe_a2a.trace(ep)]
    y = experts(kept[1])

    def let_go():
        if how == "close":
            kept[0].close()
        elif how == "with":
            with kept[0]:
                pass
        kept.clear()
        gc.collect()

    def whole_child():
        nonlocal ep
        ep = None
        let_go()

    in_child(whole_child)
    ep.combine(y, kept[1])
    for salt in range(3):
        good_call(ep, salt)
    ep.close()


@on_device.cpu_only
@pytest.mark.parametrize("how", ["drop", "close", "with"])
def test_a_child_that_lets_go_harms_nothing(how):
    ranks.run_processes(2, let_go_in_child, how, timeout=40)


def exit_normally_in_child(group):
    """sys.exit in the child: the interpreter shuts down with the parent's objects in it."""
    ep = moe_a2a.ExpertParallel(group, **CONFIG, num_blocks=3)
    good_call(ep)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        import atexit

        # multiprocessing ends its children without running them.
        atexit._run_exitfuncs()
        del ep
        gc.collect()
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    good_call(ep)
    ep.close()


@on_device.cpu_only
def test_a_child_ends_normally():
    ranks.run_processes(2, exit_normally_in_child, timeout=40)


def fork_before_the_peers_have_mapped(group):
    """The memory has no peers yet when the child drops its object."""
    group = moe_a2a.as_group(group)
    ep = moe_a2a.ExpertParallel(moe_a2a.HandleExchange(group.rank, group.num_ranks), **CONFIG)
    kept = [ep]

    def drop():
        nonlocal ep
        ep = None
        kept.clear()
        gc.collect()

    in_child(drop)
    handles = group.all_gather(ep.get_comm_handle())
    ep.set_comm_handles(handles)
    good_call(ep)
    group.all_gather(None)
    ep.close()


@on_device.cpu_only
def test_a_child_drops_an_object_that_is_not_connected():
    ranks.run_processes(2, fork_before_the_peers_have_mapped, timeout=40)


def fork_in_the_middle_of_a_call():
    """Another thread waits in a call when the process forks: the child has its lock, but not the thread."""
    groups = moe_a2a.thread_group(2)
    eps = [None, None]

    def make(rank):
        eps[rank] = moe_a2a.ExpertParallel(groups[rank], **CONFIG, num_blocks=2)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    ep, peer = eps
    eps.clear()
    waiting = threading.Thread(target=good_call, args=(ep,))
    waiting.start()
    time.sleep(0.3)

    def child():
        nonlocal ep, peer
        with pytest.raises(RuntimeError, match="made by process"):
            ep.check()
        ep = peer = None
        gc.collect()
        with moe_a2a.ExpertParallel(moe_a2a.thread_group(1)[0], **CONFIG) as own:
            good_call(own)

    in_child(child)
    good_call(peer)
    waiting.join(10)
    assert not waiting.is_alive()
    ep.close(), peer.close()


@on_device.cpu_only
def test_fork_while_another_thread_waits():
    in_child(fork_in_the_middle_of_a_call)


def construct_after_fork(group):
    """The error's advice: the child makes its own object."""
    with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
        good_call(ep)

        def child():
            with moe_a2a.ExpertParallel(moe_a2a.thread_group(1)[0], **CONFIG) as own:
                good_call(own)

        in_child(child)
        good_call(ep)


@on_device.cpu_only
def test_a_child_makes_an_object_of_its_own():
    ranks.run_processes(2, construct_after_fork, timeout=40)


def backend_in_a_child(gloo):
    """An asynchronous call of the backend waited in the child for a thread that exists in the parent only."""
    group = dist.new_group(backend="moe_a2a")
    x = torch.ones(3)
    dist.all_reduce(x, group=group, async_op=True).wait()

    def child():
        for async_op in (False, True):
            with pytest.raises(RuntimeError, match="made by process"):
                dist.all_reduce(x, group=group, async_op=async_op)

    in_child(child)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [4.0] * 3
    dist.destroy_process_group(group)


@on_device.cpu_only
def test_calls_of_the_backend_in_a_child():
    ranks.run_processes(2, backend_in_a_child, timeout=40)
