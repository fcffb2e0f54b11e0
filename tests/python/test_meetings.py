"""How ranks meet without torch.distributed: threads and MPI; what a meeting leaves behind, and memory that is freed."""

import gc
import threading

import pytest
from construction_errors import SHORT, check, timed_error
from fake_groups import mpi_world
from lost_ranks import TIMEOUT, VICTIM
from shrunk_layer import mappings
from small_calls import CONFIG, good_call

import moe_a2a
from moe_a2a.groups.boards import MpiBoard, ThreadBoard
from moe_a2a.groups.rendezvous import Meetings

# ---- groups of threads, and of MPI


def in_threads(program, ranks, seconds):
    """Runs program(rank) for each of the ranks, and waits at most this long for each."""
    threads = [threading.Thread(target=program, args=(rank,)) for rank in ranks]
    [thread.start() for thread in threads]
    [thread.join(seconds) for thread in threads]


def check_that_who_does_not_come_is_named(groups):
    """And that the groups stay usable. groups: of three ranks, which are threads."""
    reports = {}

    def come(rank):
        reports[rank] = timed_error(groups[rank])

    in_threads(come, (0, 2), TIMEOUT + 5)
    for rank in (0, 2):
        check(reports[rank], rank)
    with pytest.raises(moe_a2a.PeerTimeoutError, match="gave up waiting"):  # at once
        moe_a2a.ExpertParallel(groups[VICTIM], **CONFIG)

    def all_come(rank):
        for _ in range(2):
            with moe_a2a.ExpertParallel(groups[rank], **CONFIG) as ep:
                good_call(ep)
        reports[rank] = "good"

    in_threads(all_come, range(3), 20)
    assert reports == dict.fromkeys(range(3), "good")


def test_threads_that_do_not_come_are_named_and_the_group_stays_usable():
    check_that_who_does_not_come_is_named(moe_a2a.thread_group(3))


def test_mpi_communicators_name_who_does_not_come():
    check_that_who_does_not_come_is_named(mpi_world(3))


# ---- the meeting itself


def test_a_board_keeps_nothing_of_old_meetings():
    board = ThreadBoard()
    meetings = [Meetings(rank, 2, board) for rank in range(2)]
    for number in range(20):
        values = [None, None]

        def meet(rank):
            with meetings[rank].begin("meet") as meeting:
                values[rank] = meeting.all_gather((number, rank), 10.0)  # noqa: B023

        in_threads(meet, range(2), 10)
        assert values == [[(number, 0), (number, 1)]] * 2
        assert len(board._values) <= 4


def test_threads_of_a_rank_meet_one_after_the_other():
    """A meeting removes what its rank posted in the one before. When two threads of a rank were in two meetings, that was still to
    be read: a rank then waited until its deadline, or in a torch group's store forever."""
    num_ranks, board = 3, ThreadBoard()
    meetings = [Meetings(rank, num_ranks, board) for rank in range(num_ranks)]
    values = []

    def meet_often(rank):
        for _ in range(100):
            with meetings[rank].begin("meet") as meeting:
                values.extend(meeting.all_gather((step, rank), 5.0) for step in range(2))

    in_threads(meet_often, 2 * list(range(num_ranks)), 60)
    expected = [[(step, rank) for rank in range(num_ranks)] for step in range(2)]
    assert len(values) == 2 * num_ranks * 200 and all(value in expected for value in values)


class BrokenBoard(ThreadBoard):
    """The store of a group whose host process has ended."""

    def look(self, keys):
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_names_its_host():
    with pytest.raises(moe_a2a.PeerTimeoutError, match=r"rank 1 lost the store .* rank 0 .*Connection reset") as raised:
        with Meetings(1, 2, BrokenBoard()).begin("make the ExpertParallel") as meeting:
            meeting.all_gather(None, 1.0)
    assert raised.value.peer == 0
    assert MpiBoard.TAG > 0


# ---- memory


class Recorded:
    """A core that records how it is released."""

    def __init__(self, core, notes):
        self._core, self._notes = core, notes

    def __getattr__(self, name):
        if name in ("disconnect", "give_back", "close"):
            self._notes.append(name)
        return getattr(self._core, name)


@pytest.mark.parametrize("failing", ["allocation", "mapping", "nobody comes"])
def test_memory_is_given_back_when_and_only_when_no_peer_can_map_it(failing, monkeypatch):
    """Otherwise, on a GPU, it stays until the process ends: 65 to 86 GiB were lost after three attempts."""
    make = moe_a2a.expert_parallel._core.ExpertParallel
    notes = {0: [], 1: []}

    class Core:
        def __new__(cls, comm, *args):
            rank = comm.rank
            if failing == "allocation" and rank == 1:
                raise RuntimeError("out of memory")
            return Recorded(make(comm, *args), notes[rank])

    class Module:
        ExpertParallel = Core
        nbytes_for = staticmethod(moe_a2a.expert_parallel._core.nbytes_for)

    monkeypatch.setattr(moe_a2a.expert_parallel, "_core", Module)
    connect = moe_a2a.ExpertParallel.set_comm_handles

    def fail_to_map(ep, handles):
        if failing == "mapping" and ep.rank == 1:
            raise RuntimeError("no peer access")
        connect(ep, handles)

    monkeypatch.setattr(moe_a2a.ExpertParallel, "set_comm_handles", fail_to_map)
    groups = moe_a2a.thread_group(2)
    texts = {}

    def make_one(rank):
        with pytest.raises(RuntimeError) as raised:
            moe_a2a.ExpertParallel(groups[rank], **SHORT)
        texts[rank] = str(raised.value)

    come = [0] if failing == "nobody comes" else [0, 1]
    in_threads(make_one, come, 10)
    assert sorted(texts) == come
    if failing == "allocation":
        assert "rank 1 could not make its ExpertParallel" in texts[0] and "out of memory" in texts[0]
        assert notes == {0: ["give_back", "close"], 1: []}
    elif failing == "mapping":
        assert notes == {rank: ["disconnect", "give_back", "close"] for rank in range(2)}
    else:
        assert notes[0] == ["give_back", "close"]


def test_a_failed_object_leaves_no_memory():
    """Visible on the CPU: the mapping goes with the object."""
    gc.collect()  # a traceback may keep an earlier test's object alive
    before = mappings()
    group = moe_a2a.thread_group(2)[0]
    for _ in range(3):
        timed_error(group, timeout=0.05)
    assert mappings() == before
