"""Ranks that die, freeze, never arrive or leave early: the others raise PeerTimeoutError naming them.

They do so in time (deadline plus one second), on every other rank, and nothing remains in /dev/shm.
"""

import os
import signal
import threading
import time

import on_device
import pytest
import ranks
import torch
import torch.distributed as dist
from lost_ranks import CONFIG, TIMEOUT, VICTIM, WAYS, error_of_survivor, gather_pids, inputs, one_call, shared_memory_of

import moe_a2a

pytestmark = on_device.TESTS


def assert_nothing_left(group, pids):
    group = moe_a2a.as_group(group)
    group.all_gather(None)  # every rank has raised
    left = shared_memory_of(pids)
    group.all_gather(None)  # nobody makes a new object yet
    assert left == []


def survive_a_kill(group, point, kill_signal, num_max_ll_tokens):
    pids = gather_pids(group)
    ep = moe_a2a.ExpertParallel(group, **CONFIG, num_max_ll_tokens=num_max_ll_tokens)
    for _ in range(3):
        one_call(ep)
    if ep.rank == VICTIM:
        if point == "any time":
            delay = 0.001 * (os.getpid() % 40)
            threading.Timer(delay, os.kill, (os.getpid(), kill_signal)).start()
            while True:
                one_call(ep)
        one_call(ep, point, kill_signal)
    report = error_of_survivor(ep, calls=100_000)
    start = time.monotonic()
    ep.close()
    report["close"] = time.monotonic() - start
    report["left over"] = shared_memory_of(pids)
    if kill_signal == signal.SIGSTOP and ep.rank == 0:
        os.kill(pids[VICTIM], signal.SIGKILL)
    return report


def check_reports(reports):
    for rank, report in enumerate(reports):
        if rank == VICTIM:
            continue
        assert report["rank"] == rank
        assert report["peer"] == VICTIM, report
        assert f"rank {VICTIM}" in report["text"] and f"rank {rank}" in report["text"]
        assert report["elapsed"] < TIMEOUT + ranks.slack(1), report
        assert report.get("close", 0) < ranks.slack(1)
        assert report.get("left over", []) == []


POINTS = ("nothing", "dispatch_send", "dispatch_recv", "combine_send", "combine_recv", "any time")
FROZEN_POINTS = ("dispatch_send", "any time")
START = 0  # seconds
if on_device.IS_GPU:  # killed processes take long to restart there
    POINTS, FROZEN_POINTS, START = ("dispatch_recv", "any time"), ("any time",), 40


@WAYS
@pytest.mark.parametrize("point", POINTS)
def test_killed_rank_is_named_by_all_others(point, num_max_ll_tokens):
    on_device.needs(4)
    how = (point, signal.SIGKILL, num_max_ll_tokens)
    reports = ranks.run_processes(4, survive_a_kill, *how, timeout=20 + START, mortal={VICTIM})
    assert reports[VICTIM] == ranks.DIED
    check_reports(reports)


@WAYS
@pytest.mark.parametrize("point", FROZEN_POINTS)
def test_frozen_rank_is_named_by_all_others(point, num_max_ll_tokens):
    on_device.needs(3)
    how = (point, signal.SIGSTOP, num_max_ll_tokens)
    reports = ranks.run_processes(3, survive_a_kill, *how, timeout=20 + START, mortal={VICTIM})
    check_reports(reports)


def wait_for_one_that_never_comes(group):
    with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
        one_call(ep)
        if ep.rank == VICTIM:
            time.sleep(TIMEOUT + 1.5)
            start = time.monotonic()
            with pytest.raises(moe_a2a.PeerTimeoutError):  # too late: the others have given up
                for _ in range(3):
                    one_call(ep)
            assert time.monotonic() - start < ranks.slack(1)
            return None
        return error_of_survivor(ep)


@on_device.cpu_only
def test_rank_that_never_comes_processes():
    check_reports(ranks.run_processes(3, wait_for_one_that_never_comes, timeout=20))


def test_rank_that_never_comes():
    check_reports(on_device.run(3, wait_for_one_that_never_comes, timeout=20))


def wait_for_one_that_left(group):
    ep = moe_a2a.ExpertParallel(group, **CONFIG)
    one_call(ep)
    if ep.rank == VICTIM:
        ep.close()
        return None
    report = error_of_survivor(ep)
    ep.close()
    return report


@on_device.cpu_only
def test_rank_that_closes_early_processes():
    check_reports(ranks.run_processes(3, wait_for_one_that_left, timeout=20))


def test_rank_that_closes_early():
    check_reports(on_device.run(3, wait_for_one_that_left, timeout=20))


def name_the_phase(group, num_max_ll_tokens):
    """Rank 0 waits for the sums of a rank that has dispatched but does not combine."""
    with moe_a2a.ExpertParallel(group, **CONFIG, num_max_ll_tokens=num_max_ll_tokens) as ep:
        handle = ep.dispatch(*inputs(ep))
        if ep.rank == VICTIM:
            time.sleep(TIMEOUT + 1)
            return None
        y = torch.ones(len(handle.expert_row_index), ep.hidden, device=ep.device)
        with pytest.raises(moe_a2a.PeerTimeoutError) as raised:
            on_device.combine(ep, y, handle)
        error = raised.value
        assert isinstance(error, RuntimeError)
        assert (error.operation, error.phase) == ("combine_recv", "partial sum")
        needs_victim = (inputs(ep)[1] // (CONFIG["num_experts"] // 2) == VICTIM).any(1)
        assert needs_victim[error.token]
        assert error.expected_epoch > error.seen_epoch
        assert TIMEOUT <= error.elapsed_seconds < TIMEOUT + ranks.slack(1)
        return error.peer


@WAYS
def test_the_error_says_what_was_waited_for(num_max_ll_tokens):
    assert on_device.run(2, name_the_phase, num_max_ll_tokens, timeout=20) == [VICTIM, None]


# ------------------------------------------------------------------------------------ construction


def construct_with_other_hidden(group):
    rank = moe_a2a.as_group(group).rank
    with pytest.raises(ValueError, match=r"hidden=32 .*rank 0.*hidden=64 .*rank 2"):
        moe_a2a.ExpertParallel(group, **{**CONFIG, "hidden": 64 if rank == 2 else 32})
    # The group still works.
    with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
        one_call(ep)


def test_ranks_that_disagree_raise_everywhere():
    on_device.run(3, construct_with_other_hidden)


def construct_with_other_ll_tokens(group):
    rank = moe_a2a.as_group(group).rank
    with pytest.raises(ValueError, match=r"num_max_ll_tokens=4 .*rank 0.*num_max_ll_tokens=8 .*rank 2"):
        moe_a2a.ExpertParallel(group, **CONFIG, num_max_ll_tokens=8 if rank == 2 else 4)


def test_ranks_that_disagree_on_small_batches_raise_everywhere():
    on_device.run(3, construct_with_other_ll_tokens)


@on_device.cpu_only
def test_processes_that_disagree_raise_everywhere():
    ranks.run_processes(3, construct_with_other_hidden)


def construct_with_bad_argument_on_one_rank(group):
    rank = moe_a2a.as_group(group).rank
    pids = gather_pids(group)
    with pytest.raises((ValueError, RuntimeError), match=r"num_topk=0") as raised:
        moe_a2a.ExpertParallel(group, **{**CONFIG, "num_topk": 0 if rank == 1 else 3})
    assert "rank 1" in str(raised.value)
    assert_nothing_left(group, pids)
    with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
        one_call(ep)


def test_a_rank_that_cannot_construct_is_named_by_all():
    run = on_device.run if on_device.RANKS_ARE_PROCESSES else ranks.run_processes
    run(3, construct_with_bad_argument_on_one_rank)


def construct_more_than_memory(group):
    pids = gather_pids(group)
    huge = {**CONFIG, "hidden": 1 << 20, "num_max_tokens_per_rank": 1 << 15}
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"\d{9,} bytes o(f /dev/shm|n device).*num_max_tokens_per_rank"):
        moe_a2a.ExpertParallel(group, **huge)
    assert time.monotonic() - start < ranks.slack(5)
    assert_nothing_left(group, pids)
    with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
        one_call(ep)


def test_memory_too_small_raises_everywhere():
    run = on_device.run if on_device.RANKS_ARE_PROCESSES else ranks.run_processes
    run(2, construct_more_than_memory, timeout=30)


def construct_with_a_file_size_limit_on_one_rank(group):
    """One rank cannot get the memory, the others can: all must raise, and name that rank."""
    import resource

    rank, pids = moe_a2a.as_group(group).rank, gather_pids(group)
    if rank == 1:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # more than the group's own files need
    with pytest.raises(
        RuntimeError, match=r"\d{7} bytes of /dev/shm.*1048576 .ulimit -f.*num_max_tokens_per_rank"
    ) as raised:
        moe_a2a.ExpertParallel(group, **{**CONFIG, "num_max_tokens_per_rank": 4096})
    assert "rank 1" in str(raised.value)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_nothing_left(group, pids)
    with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
        one_call(ep)


@on_device.cpu_only
def test_memory_missing_on_one_rank_raises_everywhere():
    ranks.run_processes(3, construct_with_a_file_size_limit_on_one_rank, timeout=30)


def count_names_while_in_use(group):
    """Before the peers have mapped the memory, and after."""
    pids = gather_pids(group)
    group = moe_a2a.as_group(group)
    with moe_a2a.ExpertParallel(moe_a2a.HandleExchange(group.rank, group.num_ranks), **CONFIG) as ep:
        handles = group.all_gather(ep.get_comm_handle())
        names = shared_memory_of(pids)
        group.all_gather(None)
        ep.set_comm_handles(handles)
        one_call(ep)
        group.all_gather(None)
        return names + shared_memory_of(pids)


@on_device.cpu_only
def test_memory_never_has_a_name():
    assert ranks.run_processes(3, count_names_while_in_use) == [[], [], []]


def die_with_unmapped_memory(group):
    group = moe_a2a.as_group(group)
    exchange = moe_a2a.HandleExchange(group.rank, group.num_ranks)
    ep = moe_a2a.ExpertParallel(exchange, **CONFIG)
    group.all_gather(ep.get_comm_handle())
    if group.rank == 0:
        return gather_pids(group)
    gather_pids(group)
    os.kill(os.getpid(), signal.SIGKILL)


@on_device.cpu_only
def test_ranks_killed_between_making_and_mapping_leave_nothing():
    """Regression: if all ranks were killed here, names survived until another object was made in the same pid namespace."""
    pids, *others = ranks.run_processes(3, die_with_unmapped_memory, mortal={1, 2})
    assert others == [ranks.DIED, ranks.DIED]
    assert shared_memory_of(pids) == []


def die_before_connecting(group):
    if dist.get_rank(group) == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(moe_a2a.PeerTimeoutError, match=rf"for rank {VICTIM}\b.* to make the ExpertParallel") as raised:
        moe_a2a.ExpertParallel(group, **CONFIG)
    assert raised.value.peer == VICTIM
    assert time.monotonic() - start < TIMEOUT + ranks.slack(1)


@on_device.cpu_only
def test_rank_that_dies_before_the_constructor():
    results = ranks.run_processes(3, die_before_connecting, timeout=15, mortal={VICTIM})
    assert results[VICTIM] == ranks.DIED
