"""How the ranks that are left agree on who they are: one decision, whoever dies, is late or decides at the same time."""

import random
import threading
import time

import pytest
import ranks
import torch.distributed as dist
from fake_groups import Member, mpi_world

import moe_a2a
from moe_a2a.groups import agreement, boards

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]

LATE = "late"


class Boards:
    """Boards of new groups: one per rank."""

    def __init__(self, kind):
        self._kind, self._number = kind, 0
        if kind == "tcp":
            self._host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._clients = [dist.TCPStore("127.0.0.1", self._host.port, is_master=False) for _ in range(6)]

    def of_group(self, num_ranks):
        self._number += 1
        if self._kind == "threads":
            return [boards.ThreadBoard()] * num_ranks
        if self._kind == "hash":
            return [boards.StoreBoard(dist.HashStore())] * num_ranks
        stores = [dist.PrefixStore(f"{self._number}", client) for client in self._clients[:num_ranks]]
        return [boards.StoreBoard(store) for store in stores]


def outcome(group, **how):
    """The survivors, LATE if they do not include this rank."""
    try:
        found = moe_a2a.survivors(group, **how)
    except moe_a2a.LeftOutError as error:
        assert error.rank == group.rank and error.rank not in error.survivors
        assert f"rank {error.rank} was left out" in str(error)
        return LATE, error.survivors
    assert found.ranks[found.rank] == group.rank
    assert sorted(found.ranks + found.lost) == list(range(group.num_ranks))
    return "member", found.ranks


def run(members, program, who=None):
    """program(member) of each of `who`, in threads; the results by rank."""
    results = {}

    def note(member):
        results[member.rank] = program(member)

    threads = [threading.Thread(target=note, args=(members[r],), daemon=True) for r in who or range(len(members))]
    [thread.start() for thread in threads]
    deadline = time.monotonic() + 60
    [thread.join(max(0.0, deadline - time.monotonic())) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    return results


def check_one_decision(results):
    decisions = {ranks for _, ranks in results.values()}
    assert len(decisions) == 1, results
    decision = decisions.pop()
    assert decision
    for rank, (how, _) in results.items():
        assert (how == "member") == (rank in decision), results
    return decision


@pytest.mark.parametrize("kind", ["threads", "hash", "tcp"])
def test_ranks_that_decide_at_once_make_one_decision(kind, session_seed):
    """Deadlines and arrivals so close that most rounds leave somebody out, and several ranks propose."""
    draw = random.Random(session_seed)
    num_rounds, boards_of = 200, Boards(kind)
    sizes = []
    for _ in range(num_rounds):
        num_ranks = draw.randint(2, 6)
        members = [Member(rank, num_ranks, board) for rank, board in enumerate(boards_of.of_group(num_ranks))]
        delays = [draw.random() * 0.006 for _ in members]

        def come(member, delays=delays):
            time.sleep(delays[member.rank])
            return outcome(member, timeout=0.003)

        sizes.append(num_ranks - len(check_one_decision(run(members, come))))
    print(f"{num_rounds} rounds, {sum(size > 0 for size in sizes)} left somebody out")


class Proposing:
    """A board on which a rank sees only itself, and proposes when the other one does."""

    def __init__(self, board, rank, both_propose):
        self.post, self.wait = board.post, board.wait
        self._board, self._mine, self._both_propose = board, f"survivors/here/{rank}", both_propose

    def look(self, keys):
        return self._board.look([key for key in keys if key == self._mine])

    def settle(self, key, value):
        self._both_propose.wait(30)
        return self._board.settle(key, value)


@pytest.mark.parametrize("kind", ["threads", "hash", "tcp"])
def test_one_of_two_proposals_wins(kind):
    boards_of = Boards(kind)
    for _ in range(20):
        both_propose = threading.Barrier(2)
        pair = boards_of.of_group(2)
        members = [Member(rank, 2, Proposing(board, rank, both_propose)) for rank, board in enumerate(pair)]
        assert len(check_one_decision(run(members, lambda member: outcome(member, timeout=0.001)))) == 1


@pytest.mark.parametrize("kind", ["threads", "tcp"])
def test_nobody_is_waited_for_once_all_are_there(kind):
    boards_of = Boards(kind)
    members = [Member(rank, 4, board) for rank, board in enumerate(boards_of.of_group(4))]
    start = time.monotonic()
    assert check_one_decision(run(members, lambda member: outcome(member, timeout=60))) == (0, 1, 2, 3)
    assert time.monotonic() - start < ranks.slack(5)


def test_a_rank_that_is_said_to_be_lost_gets_less_time():
    members = moe_a2a.thread_group(4)
    start = time.monotonic()
    results = run(members, lambda member: outcome(member, lost=[1, 3], timeout=60), who=(0, 2))
    elapsed = time.monotonic() - start
    assert check_one_decision(results) == (0, 2)
    assert agreement.SECONDS_FOR_THE_LOST <= elapsed < agreement.SECONDS_FOR_THE_LOST + ranks.slack(5)
    start = time.monotonic()
    for _ in range(2):  # at once, although rank 3 is not here either
        assert outcome(members[1], timeout=60) == (LATE, (0, 2))
    assert time.monotonic() - start < ranks.slack(1)


def test_a_rank_that_was_said_to_be_lost_and_comes_in_time_is_a_member(monkeypatch):
    monkeypatch.setattr(agreement, "SECONDS_FOR_THE_LOST", 60.0)
    members = moe_a2a.thread_group(3)
    board = members[0].meetings.board

    def come(member):
        while member.rank == 1 and len(board.look(["survivors/here/0", "survivors/here/2"])) < 2:
            board.wait(1.0)
        return outcome(member, lost=[1], timeout=60)

    assert check_one_decision(run(members, come)) == (0, 1, 2)


# ---- a rank that dies during the agreement


class MortalBoard(boards.PartOfBoard):
    """Its rank dies before or after its first call of this kind: the call never returns, and nothing follows it."""

    def __init__(self, board, call, moment):
        super().__init__(board, "")
        self.is_dead, self.end = threading.Event(), threading.Event()

        def die(*args):
            if moment == "after":
                getattr(board, call)(*args)
            self.is_dead.set()
            self.end.wait()
            raise RuntimeError("this rank is dead")

        setattr(self, call, die)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("call", ["post", "look", "settle"])
def test_a_rank_that_dies_in_the_agreement_hinders_nobody(call, moment):
    """The dead rank may be in the list, but the lists are the same; the survivors of that group agree without it."""
    board = boards.ThreadBoard()
    mortal = MortalBoard(board, call, moment)
    members = [Member(rank, 3, mortal if rank == 1 else board) for rank in range(3)]

    def look_once_it_is_dead(keys):
        mortal.is_dead.wait()
        return boards.ThreadBoard.look(board, keys)

    if call == "settle":  # the dead rank is the one that decides, with all ranks
        mortal.look = lambda keys: boards.ThreadBoard.look(board, keys)
        board.look = look_once_it_is_dead

    def come_and_die():
        with pytest.raises(moe_a2a.PeerTimeoutError, match="this rank is dead"):
            moe_a2a.survivors(members[1], timeout=20.0)

    def come(member):
        if call != "settle":
            mortal.is_dead.wait()
        group = moe_a2a.survivors(member, timeout=0.5)
        again = moe_a2a.survivors(group, timeout=0.5) if 1 in group.ranks else group
        return group.ranks, again.ranks, again.lost

    dying = threading.Thread(target=come_and_die, daemon=True)
    dying.start()
    try:
        results = run(members, come, who=(0, 2))
    finally:
        mortal.end.set()
        dying.join(10)
    first = (0, 2) if (call, moment) == ("post", "before") else (0, 1, 2)
    assert results == dict.fromkeys((0, 2), (first, (0, 2), (1,)))


def test_an_interrupted_rank_withdraws(monkeypatch):
    members = moe_a2a.thread_group(2)

    class Interrupted:
        def put(self, value):
            pass

        def get(self, timeout):
            while not members[0].meetings.board.look(["survivors/here/0"]):
                time.sleep(0.001)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(agreement.queue, "SimpleQueue", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            moe_a2a.survivors(members[0], timeout=60)
    deadline = time.monotonic() + 10
    while members[0].meetings.board.look(["survivors/here/0"])["survivors/here/0"] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert outcome(members[1], timeout=0.05) == ("member", (1,))
    assert outcome(members[0], timeout=60) == (LATE, (1,))


# ---- generations


def test_generations_follow_each_other(session_seed):
    """5 -> 4 -> 3 -> 2 -> 1; a rank that missed a generation is told so whenever it comes."""
    draw = random.Random(session_seed)
    order = draw.sample(range(5), 4)  # of deaths
    groups = moe_a2a.thread_group(5)
    newest, left_behind = dict(enumerate(groups)), {}
    for number, victim in enumerate(order):
        left_behind[victim] = newest.pop(victim)

        def go_on(group):
            return moe_a2a.survivors(group, timeout=0.3)

        found = run({g.rank: g for g in newest.values()}, go_on, who=[g.rank for g in newest.values()])
        newest = {group.ranks[group.rank]: group for group in found.values()}
        expected = tuple(rank for rank in range(5) if rank not in order[: number + 1])
        for group in newest.values():
            assert group.ranks == expected and group.lost == tuple(sorted(order[: number + 1]))
            assert "SurvivorGroup(rank" in repr(group)
    (last,) = newest
    assert moe_a2a.survivors(groups[last]) is newest[last]  # the first group leads to the last
    for number, victim in enumerate(order):
        with pytest.raises(moe_a2a.LeftOutError) as raised:
            moe_a2a.survivors(left_behind[victim], timeout=60)
        expected = tuple(rank for rank in range(5) if rank not in order[: number + 1])
        assert (raised.value.rank, raised.value.survivors) == (victim, expected)


# ---- groups that cannot agree, a board that is gone


class Silent:
    """A user's group, with a collective only."""

    rank, num_ranks = 0, 2

    def all_gather(self, value):
        return [value, value]


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (moe_a2a.HandleExchange(0, 2), r"a HandleExchange has no channel, .*moe_a2a\.expert_map\(\)"),
        (mpi_world(2)[0], r"an MPI communicator has no store, .*communicator\.Shrink\(\)"),
        (Silent(), "a Silent without a store: .*use a torch.distributed group"),
    ],
    ids=["carried", "mpi", "collective only"],
)
def test_groups_that_cannot_agree_are_refused(group, says):
    with pytest.raises(RuntimeError, match=says):
        moe_a2a.survivors(group)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"lost": 1}, TypeError, "lost=1 is a int on rank 0; pass a list of ranks"),
        ({"lost": "1"}, TypeError, "lost='1' is a str"),
        ({"lost": [2]}, ValueError, r"lost=2 is not in \[0, 1\] on rank 0"),
        ({"lost": [-1]}, ValueError, r"lost=-1 is not in"),
        ({"lost": [0.5]}, TypeError, "lost=0.5 is a float"),
        ({"timeout": 0}, ValueError, r"timeout=0 is not in \(0"),
        ({"timeout": "1"}, TypeError, "timeout='1' is a str"),
    ],
)
def test_wrong_arguments_agree_on_nothing(arguments, error, says):
    group = moe_a2a.thread_group(2)[0]
    with pytest.raises(error, match=says):
        moe_a2a.survivors(group, **arguments)
    assert group.meetings.board.look(["survivors/here/0", agreement.DECISION]) == {}


class BrokenBoard(boards.ThreadBoard):
    def look(self, keys):
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_is_named():
    with pytest.raises(
        moe_a2a.PeerTimeoutError, match=r"rank 1 lost the store .*rank 0 .*ended \(Connection reset.*outlives"
    ) as raised:
        moe_a2a.survivors(Member(1, 2, BrokenBoard()), timeout=60)
    assert (raised.value.operation, raised.value.phase, raised.value.rank) == ("survivors", "store", 1)
