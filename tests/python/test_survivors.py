"""Ranks that die are survived: the others agree on who is left, and go on with the experts that they own, with the bits of the
reference. Nothing remains of what they leave behind.
"""

import gc
import os
import signal
import time

import on_device
import pytest
import ranks
import torch
import torch.distributed as dist
from fake_groups import Member
from lost_ranks import WAYS, gather_pids, shared_memory_of
from shrunk_layer import (
    CONFIG,
    NUM_EXPERTS,
    TIMEOUT,
    check_layer,
    check_map,
    die_during_calls,
    lose,
    mappings,
    original_ranks,
)

import moe_a2a
from moe_a2a.groups import agreement, boards

pytestmark = [on_device.TESTS, pytest.mark.timeout(200)]


# ---- processes


def survive(group, victims, seed, num_max_ll_tokens):
    pids = gather_pids(group)
    num_ranks = len(pids)
    ep = moe_a2a.ExpertParallel(group, **CONFIG, num_max_ll_tokens=num_max_ll_tokens)
    me = ep.rank
    check_layer(ep, seed, num_ranks)
    for number, victim in enumerate(victims):
        if me == victim:
            die_during_calls(ep, seed, num_ranks)
        error = lose(ep, seed, num_ranks)
        old, start = ep, time.monotonic()
        ep = moe_a2a.shrink(ep, lost=[error.peer])
        # error.peer may be a live rank that itself waited for the dead one, which then gets the whole timeout.
        assert time.monotonic() - start < TIMEOUT + agreement.SECONDS_FOR_THE_LOST + ranks.slack(3) + START
        assert old.is_closed
        del error, old  # the traceback keeps views of the old memory
        assert ep.group.lost == tuple(sorted(victims[: number + 1]))
        assert ep.num_experts == ep.num_ranks * NUM_EXPERTS // num_ranks
        check_map(ep, num_ranks)
        for call in range(10):
            check_layer(ep, seed + call, num_ranks)
    names = shared_memory_of(pids)
    ep.close()
    assert on_device.IS_GPU or mappings() == 0
    return ep.group.ranks, names + shared_memory_of(pids)


START = 40 if on_device.IS_GPU else 0
FAULTS = [(3, [1]), (3, [0]), (4, [2]), (4, [3, 0]), (4, [1, 2, 0])]
if on_device.IS_GPU:
    FAULTS = [(3, [1]), (4, [3, 0])]


@WAYS
@pytest.mark.parametrize(("num_ranks", "victims"), FAULTS, ids=str)
def test_killed_ranks_are_survived(num_ranks, victims, num_max_ll_tokens, session_seed):
    on_device.needs(num_ranks)
    how = (victims, session_seed % 2**20, num_max_ll_tokens)
    results = ranks.run_processes(num_ranks, survive, *how, timeout=60 + START, mortal=set(victims))
    left = tuple(rank for rank in range(num_ranks) if rank not in victims)
    expected = [ranks.DIED if rank in victims else (left, []) for rank in range(num_ranks)]
    assert results == expected


def die_at(moment):
    """This process dies in its agreement."""
    name, when = moment
    place = boards.StoreBoard if name == "post" else agreement._Attempt
    call = getattr(place, name)

    def made(self, *args):
        if when == "after":
            call(self, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(place, name, made)


def survive_a_death_in_the_agreement(group, moment, seed):
    pids = gather_pids(group)
    ep = moe_a2a.ExpertParallel(group, **CONFIG)
    me = ep.rank
    check_layer(ep, seed, 4)
    if me == 3:
        die_during_calls(ep, seed, 4)
    error = lose(ep, seed, 4)
    if me == 1:
        die_at(moment)
    ep = moe_a2a.shrink(ep, lost=[error.peer])
    check_layer(ep, seed, 4)
    check_map(ep, 4)
    ep.close()
    return ep.group.ranks, ep.group.lost, shared_memory_of(pids)


@on_device.cpu_only
@pytest.mark.parametrize("moment", [("post", "before"), ("post", "after"), ("_decision", "after")], ids="-".join)
def test_a_rank_that_dies_in_the_agreement_is_survived(moment, session_seed):
    how = (moment, session_seed % 2**20)
    results = ranks.run_processes(4, survive_a_death_in_the_agreement, *how, timeout=60, mortal={1, 3})
    left = ((0, 2), (1, 3), [])
    assert results == [left, ranks.DIED, left, ranks.DIED]


def go_on_without_a_late_rank(group, seed):
    store = dist.distributed_c10d._get_default_store()
    pids = gather_pids(group)
    ep = moe_a2a.ExpertParallel(group, **CONFIG)
    check_layer(ep, seed, 3)
    if ep.rank == 1:
        store.wait(["they went on"])
        with pytest.raises(moe_a2a.PeerTimeoutError):
            for _ in range(3):
                check_layer(ep, seed, 3)
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(moe_a2a.LeftOutError, match=r"rank 1 was left out: ranks 0, 2 had already") as raised:
                moe_a2a.shrink(ep, lost=[0])
            assert time.monotonic() - start < ranks.slack(1)
            assert (raised.value.rank, raised.value.survivors) == (1, (0, 2))
            assert ep.is_closed
        store.set("it was told", "")
        return shared_memory_of(pids)
    error = lose(ep, seed, 3)
    ep = moe_a2a.shrink(ep, lost=[error.peer])
    store.set("they went on", "")
    store.wait(["it was told"])
    for call in range(5):  # the late rank has disturbed nothing
        check_layer(ep, seed + call, 3)
    ep.close()
    return shared_memory_of(pids)


@on_device.cpu_only
def test_a_late_rank_is_told_that_it_was_left_out(session_seed):
    assert ranks.run_processes(3, go_on_without_a_late_rank, session_seed % 2**20, timeout=40) == [[], [], []]


# ---- TCP stores, which a process hosts


def group_on(world, host):
    """The world's ranks, meeting in a TCP store: `host` is its port, or the rank whose process hosts it."""
    world = moe_a2a.as_group(world)
    store = None
    if isinstance(host, tuple):
        if world.rank == host[0]:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = world.all_gather(store.port if store else None)[host[0]]
    else:
        port = host
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    return Member(world.rank, world.num_ranks, boards.StoreBoard(store))


def survive_on_a_store(world, port, seed):
    group = group_on(world, port)
    ep = moe_a2a.ExpertParallel(group, **CONFIG)
    if ep.rank == 0:
        die_during_calls(ep, seed, 3)
    ep = moe_a2a.shrink(ep, lost=[lose(ep, seed, 3).peer])
    check_layer(ep, seed, 3)
    ep.close()
    return ep.group.ranks


@on_device.cpu_only
def test_a_store_of_another_process_is_survived_with(session_seed):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    how = (store.port, session_seed % 2**20)
    results = ranks.run_processes(3, survive_on_a_store, *how, timeout=40, mortal={0})
    assert results == [ranks.DIED, (1, 2), (1, 2)]


def lose_the_store(world, kill_signal):
    pids = gather_pids(world)
    group = group_on(world, (0,))
    moe_a2a.as_group(world).all_gather(None)  # all are connected
    if group.rank == 0:
        os.kill(os.getpid(), kill_signal)
    start = time.monotonic()
    with pytest.raises(moe_a2a.PeerTimeoutError, match="lost the store of the group .* rank 0 unless a launcher"):
        moe_a2a.survivors(group, timeout=TIMEOUT)
    elapsed = time.monotonic() - start
    assert elapsed < TIMEOUT + agreement.SECONDS_TO_ANSWER + ranks.slack(1)
    if kill_signal == signal.SIGSTOP and group.rank == 1:
        time.sleep(1)  # the other has raised by now
        os.kill(pids[0], signal.SIGKILL)
    return "told"


@on_device.cpu_only
@pytest.mark.parametrize("kill_signal", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_store_that_is_lost_with_its_host_is_an_error(kill_signal):
    results = ranks.run_processes(3, lose_the_store, kill_signal, timeout=40, mortal={0})
    assert results == [ranks.DIED, "told", "told"]


# ---- threads; several objects, other clients


def survive_as_a_thread(group, seed):
    ep = moe_a2a.ExpertParallel(group, **CONFIG)
    check_layer(ep, seed, 4)
    for victim in (2, 0):
        if original_ranks(ep)[ep.rank] == victim:
            return None
        error = lose(ep, seed, 4)
        assert original_ranks(ep)[error.peer] == victim, (original_ranks(ep), str(error))
        ep = moe_a2a.shrink(ep, lost=[error.peer])
        check_map(ep, 4)
        check_layer(ep, seed, 4)
    ep.group.all_gather(None)
    ep.close()
    return ep.group.ranks


@on_device.cpu_only
def test_threads_are_survived(session_seed):
    gc.collect()  # a traceback may keep an earlier test's object alive
    before = mappings()
    results = ranks.run_threads(4, survive_as_a_thread, session_seed % 2**20)
    assert results == [None, (1, 3), None, (1, 3)]
    gc.collect()
    assert mappings() == before


def shrink_several(group, seed):
    """Two objects on one group, a layer each: the second finds the group that the first has agreed on."""
    first, second = (moe_a2a.ExpertParallel(group, **CONFIG) for _ in range(2))
    check_layer(first, seed, 3)
    check_layer(second, seed, 3)
    if first.rank == 1:
        return
    peer = lose(first, seed, 3).peer
    first = moe_a2a.shrink(first, lost=[peer])
    start = time.monotonic()
    second = moe_a2a.shrink(second)  # nobody is waited for
    assert time.monotonic() - start < ranks.slack(1)
    assert first.group is second.group is moe_a2a.survivors(group)
    for ep in (second, first):
        check_layer(ep, seed, 3)
    if first.rank == 1:
        return
    second = moe_a2a.shrink(second, lost=[lose(second, seed, 3).peer])
    first = moe_a2a.shrink(first)
    for ep in (second, first):
        assert ep.group.ranks == (0,)
        check_layer(ep, seed, 3)
        ep.close()


@on_device.cpu_only
def test_several_objects_of_a_group_shrink_together(session_seed):
    ranks.run_threads(3, shrink_several, session_seed % 2**20)


def shrink_a_communicator(group):
    comm = moe_a2a.Communicator(group, timeout=TIMEOUT)
    ep, coll = moe_a2a.ExpertParallel(comm, **{**CONFIG, "timeout": 30.0}), moe_a2a.Collectives(comm)
    coll.all_reduce(torch.ones(3))
    if comm.rank == 0:
        return
    with pytest.raises(moe_a2a.PeerTimeoutError) as raised:
        coll.all_reduce(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"on a Communicator, which other objects may share \(rank"):
        moe_a2a.shrink(ep)
    assert not ep.is_closed
    left = moe_a2a.survivors(comm, lost=[raised.value.peer])
    for one in (ep, coll, comm):
        one.close()
    comm = moe_a2a.Communicator(left, timeout=TIMEOUT)
    coll = moe_a2a.Collectives(comm)
    assert coll.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    ep = moe_a2a.ExpertParallel(comm, **{**CONFIG, "num_experts": NUM_EXPERTS // 3 * 2})
    ep.expert_map = moe_a2a.expert_map(left.ranks, num_ranks=3, num_experts=NUM_EXPERTS)
    check_layer(ep, 0, 3)
    left.all_gather(None)
    for one in (ep, coll, comm):
        one.close()


@on_device.cpu_only
def test_clients_of_a_communicator_go_on_together():
    ranks.run_threads(3, shrink_a_communicator)


def shrink_without_a_fault(group, seed):
    """Nobody is lost: all are in the new group. Also a way to leave in good order."""
    ep = moe_a2a.ExpertParallel(group, **CONFIG)
    ep = moe_a2a.shrink(ep, timeout=60)
    assert ep.group.lost == () and ep.group.ranks == (0, 1, 2)
    check_layer(ep, seed, 3)
    if ep.rank == 2:
        ep.close()
        return
    ep = moe_a2a.shrink(ep, lost=[2], timeout=60)
    assert ep.group.lost == (2,)
    check_layer(ep, seed, 3)
    ep.close()


@on_device.cpu_only
def test_ranks_that_leave_in_good_order(session_seed):
    ranks.run_threads(3, shrink_without_a_fault, session_seed % 2**20)


# ---- arguments


def test_wrong_arguments_close_nothing():
    ep = moe_a2a.ExpertParallel(moe_a2a.thread_group(1)[0], **CONFIG)
    for arguments, error in [({"lost": 0}, TypeError), ({"lost": [1]}, ValueError), ({"timeout": -1}, ValueError)]:
        with pytest.raises(error):
            moe_a2a.shrink(ep, **arguments)
    with pytest.raises(TypeError, match="ep is a ThreadGroup; pass an ExpertParallel, or call survivors"):
        moe_a2a.shrink(ep.group)
    check_layer(ep, 0, 1)
    ep = moe_a2a.shrink(ep)
    check_layer(ep, 0, 1)
    ep.close()
    carried = moe_a2a.ExpertParallel(moe_a2a.HandleExchange(0, 1), **CONFIG)
    with pytest.raises(RuntimeError, match="a HandleExchange has no channel"):
        moe_a2a.shrink(carried)
    assert not carried.is_closed
    carried.close()


def test_expert_map():
    table = moe_a2a.expert_map([0, 2], num_ranks=3, num_experts=6)
    assert table.tolist() == [0, 1, -1, -1, 2, 3, -1]
    assert table[torch.tensor([[5, -1, 3]], dtype=torch.int32)].tolist() == [[3, -1, -1]]
    assert moe_a2a.expert_map([2, 0], num_ranks=3, num_experts=3).tolist() == [1, -1, 0, -1]
    with pytest.raises(ValueError, match="num_experts=7 is not a multiple of num_ranks=3"):
        moe_a2a.expert_map([0], num_ranks=3, num_experts=7)
    for wrong, error, text in (
        ([0, 0], ValueError, r"ranks=\[0, 0\] has a rank twice"),
        ([3], ValueError, r"ranks=3 is not in \[0, 2\]; pass"),
        ([-1], ValueError, r"ranks=-1 is not in \[0, 2\]; pass"),
        ([True], TypeError, "ranks=True is a bool; pass an int"),
        (None, TypeError, "ranks=None is a NoneType; pass a list of ranks"),
        ("01", TypeError, "ranks='01' is a str; pass a list of ranks"),
    ):
        with pytest.raises(error, match=text):
            moe_a2a.expert_map(wrong, num_ranks=3, num_experts=6)


@pytest.mark.parametrize("lost", [None, 1, "1", 1.5])
def test_lost_ranks_are_a_list(lost):
    group = moe_a2a.thread_group(1)[0]
    with pytest.raises(TypeError, match=r"lost=.* on rank 0; pass a list of ranks"):
        moe_a2a.survivors(group, lost=lost)
