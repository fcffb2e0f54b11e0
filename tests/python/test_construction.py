"""Construction honours `timeout`: within it every rank learns by name who did not arrive; the group stays usable.

A collective of gloo does neither: a killed rank causes raw errors without a name, the last after 8 to 9 s.
"""

import os
import signal
import threading
import time

import on_device
import pytest
import ranks
import torch.distributed as dist
from construction_errors import SHORT, check, timed_error
from lost_ranks import TIMEOUT, VICTIM, stop_at
from small_calls import CONFIG, good_call

import moe_a2a

# ---- ranks that are killed, frozen or late, at every point of construction


def lose_a_rank(group, point, kill_signal, victim):
    rank = dist.get_rank(group)
    pids = moe_a2a.as_group(group).all_gather(os.getpid())
    if rank == victim:
        stop_at(point, kill_signal)
        moe_a2a.ExpertParallel(group, **SHORT)
    report = timed_error(group)
    if kill_signal == signal.SIGSTOP and rank == (victim + 1) % len(pids):
        time.sleep(1)  # the others have raised by now
        os.kill(pids[victim], signal.SIGKILL)
    return report


@on_device.cpu_only
@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("point", ["before", "allocated", "said", "mapped"])
def test_killed_rank_is_named_by_all_others(point, victim):
    reports = ranks.run_processes(4, lose_a_rank, point, signal.SIGKILL, victim, timeout=20, mortal={victim})
    assert reports[victim] == ranks.DIED
    for rank, report in enumerate(reports):
        if rank != victim:
            check(report, rank, victim)


@on_device.cpu_only
@pytest.mark.parametrize("point", ["allocated", "mapped"])
def test_frozen_rank_is_named_by_all_others(point):
    reports = ranks.run_processes(3, lose_a_rank, point, signal.SIGSTOP, VICTIM, timeout=20, mortal={VICTIM})
    for rank in (0, 2):
        check(reports[rank], rank)


def come_too_late(group):
    rank = dist.get_rank(group)
    if rank == VICTIM:
        time.sleep(TIMEOUT + 1)
        with pytest.raises(moe_a2a.PeerTimeoutError, match="gave up waiting"):
            moe_a2a.ExpertParallel(group, **SHORT)
    else:
        check(timed_error(group), rank)
        time.sleep(1.5)
    # The same group again, twice.
    for _ in range(2):
        with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
            good_call(ep)


@on_device.cpu_only
def test_late_rank_learns_it_and_the_group_stays_usable():
    ranks.run_processes(3, come_too_late, timeout=40)


def different_timeouts(group):
    """A rank that gives up early tells the others."""
    rank = dist.get_rank(group)
    if rank == VICTIM:
        time.sleep(TIMEOUT + 2)
        with pytest.raises(moe_a2a.PeerTimeoutError):
            moe_a2a.ExpertParallel(group, **SHORT)
        return
    check(timed_error(group, timeout=TIMEOUT if rank == 0 else 30.0), rank)


@on_device.cpu_only
def test_the_first_to_give_up_tells_the_others():
    ranks.run_processes(3, different_timeouts, timeout=40)


def construct_on_a_subgroup(group):
    rank = dist.get_rank(group)
    pair = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError, match="not a member of the group"):
            moe_a2a.ExpertParallel(pair, **CONFIG)
    else:
        with moe_a2a.ExpertParallel(pair, **CONFIG) as ep:
            good_call(ep)
            if rank == 2:
                dist.barrier(pair)
                return
            dist.barrier(pair)
        time.sleep(0.2)
        report = timed_error(pair)
        check(report, 0)


@on_device.cpu_only
def test_subgroups_and_ranks_outside_of_them():
    ranks.run_processes(3, construct_on_a_subgroup, timeout=40)


def construct_on_meshes(group):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(ValueError, match=r"DeviceMesh of 2 dimensions \('dp', 'ep'\); .* mesh\['ep'\]"):
        moe_a2a.ExpertParallel(mesh, **CONFIG)
    with moe_a2a.ExpertParallel(mesh["ep"], **CONFIG) as ep:
        assert ep.num_ranks == 2
        good_call(ep)
        dist.barrier()
    if dist.get_rank() == 3:
        return
    if dist.get_rank() == 2:  # its partner along "ep" does not arrive
        check(timed_error(mesh["ep"]), 0)


@on_device.cpu_only
def test_device_meshes():
    ranks.run_processes(4, construct_on_meshes, timeout=40)


def interrupt_the_meeting(group):
    ranks.receive_interrupts()
    group = moe_a2a.as_group(group)
    group.all_gather(None)
    start = time.monotonic()
    if group.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            moe_a2a.ExpertParallel(group, **CONFIG)
    elif group.rank == 1:
        with pytest.raises(moe_a2a.PeerTimeoutError, match="rank 0 was interrupted"):
            moe_a2a.ExpertParallel(group, **CONFIG)
    else:
        time.sleep(1)
        start = time.monotonic()
        with pytest.raises(moe_a2a.PeerTimeoutError, match="rank 0 was interrupted"):
            moe_a2a.ExpertParallel(group, **CONFIG)
    assert time.monotonic() - start < ranks.slack(1.3)
    with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
        good_call(ep)


@on_device.cpu_only
def test_an_interrupted_rank_is_not_waited_for():
    ranks.run_processes(3, interrupt_the_meeting, timeout=40)


def make_wrongly(group):
    """What rank 1 does wrong before it meets the others: they waited for it until their deadline."""
    comm = moe_a2a.Communicator(group, timeout=20)
    for kind, how, wrong, error in (
        (moe_a2a.Communicator, {}, {"devise": "cpu"}, "unexpected keyword argument .*devise"),
        (moe_a2a.Collectives, {}, {"max_bytes": 1}, "unexpected keyword argument .*max_bytes"),
        (moe_a2a.ExpertParallel, {**CONFIG}, {"num_expert": 1}, "unexpected keyword argument .*num_expert"),
        (moe_a2a.ExpertParallel, {**CONFIG}, {"group": None}, "multiple values for argument 'group'"),
        (moe_a2a.Collectives, {}, {"device": "cuda:70"}, "cuda:70"),
        (moe_a2a.Collectives, {}, {"device": "meta"}, "meta"),
    ):
        for given in (group, comm):
            if kind is moe_a2a.Communicator and given is comm:
                continue
            start = time.monotonic()
            if group.rank == 1:
                with pytest.raises((TypeError, ValueError), match=error):
                    kind(given, **how, **wrong)
            else:
                with pytest.raises(RuntimeError, match=rf"^rank 1 could not make its {kind.__name__}: .*{error}"):
                    kind(given, **{"timeout": 20, **how})
            assert time.monotonic() - start < ranks.slack(10)
            with kind(given, **how):  # the group stays usable
                pass


@on_device.cpu_only
def test_arguments_that_a_constructor_does_not_take():
    ranks.run_threads(3, make_wrongly, timeout=150)
