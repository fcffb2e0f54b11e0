"""Groups that need no launcher: on a board of the test's choice, and of an MPI communicator between threads."""

import threading

from moe_a2a.groups.rendezvous import Meetings


class Member:
    """A rank of a group on a board of its own choice."""

    def __init__(self, rank, num_ranks, board):
        self.rank, self.num_ranks = rank, num_ranks
        self.meetings = Meetings(rank, num_ranks, board)

    def all_gather(self, value):
        raise AssertionError("a collective cannot be left")


class Request:
    def test(self):
        return True, None


class Communicator:
    """The part of an mpi4py communicator that we use, between threads."""

    def __init__(self, rank, mailboxes, lock):
        self._rank, self._mailboxes, self._lock = rank, mailboxes, lock

    def Get_rank(self):  # noqa: N802
        return self._rank

    def Get_size(self):  # noqa: N802
        return len(self._mailboxes)

    def isend(self, value, dest, tag):
        with self._lock:
            self._mailboxes[dest].setdefault((self._rank, tag), []).append(value)
        return Request()

    def iprobe(self, source, tag):
        with self._lock:
            return bool(self._mailboxes[self._rank].get((source, tag)))

    def recv(self, source, tag):
        with self._lock:
            return self._mailboxes[self._rank][source, tag].pop(0)

    def allgather(self, value):
        raise AssertionError("a collective cannot be left")


def mpi_world(num_ranks):
    mailboxes, lock = [{} for _ in range(num_ranks)], threading.Lock()
    return [Communicator(rank, mailboxes, lock) for rank in range(num_ranks)]
