"""Calls of Collectives whose results are known: values, tensors at any address, and random calls that are checked."""

import random
from dataclasses import replace
from pathlib import Path

import torch
from on_device import settle

import moe_a2a
from moe_a2a.tables.collective_tables import MOST_IN_WORDS, Tables, model

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OPS = ["sum", "max", "min", "avg"]
ALGORITHMS = ["one_shot", "two_shot", "ring", "recursive_doubling"]
WORKSPACE = 16 << 10  # small: most tensors go in several slices
Room = torch.Tensor | None


def values(rank: int, call: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers: exact in every dtype, as are their sums over eight ranks and the quarters of those."""
    return ((torch.arange(count) * 7 + rank * 5 + call * 3) % 31 - 15).to(dtype)


def merged(xs: list[torch.Tensor], op: str) -> torch.Tensor:
    """In fp64, rounded once."""
    stacked = torch.stack([x.double() for x in xs])
    result = {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]
    return result.float().to(xs[0].dtype)


def placed(values: torch.Tensor, device: torch.device, shift: int, room: torch.Tensor | None = None) -> torch.Tensor:
    """The values at an address that is `shift` elements off a multiple of 64 bytes. room: bytes to take; None: new memory."""
    count = values.numel() + shift + 8
    if room is None:
        memory = torch.empty(count, dtype=values.dtype, device=device)
    else:
        memory = room[: count * values.itemsize].view(values.dtype)
    target = memory.fill_(float("nan"))[shift : shift + values.numel()].copy_(values)
    target.neighbours = memory[:shift], memory[shift + values.numel() :]
    return target


def poisoned(count: int, like: torch.Tensor, shift: int, room: torch.Tensor | None = None) -> torch.Tensor:
    return placed(torch.full((count,), float("nan"), dtype=like.dtype), like.device, shift, room)


def check_neighbours(tensor: torch.Tensor) -> None:
    """Nothing was written before or after a tensor that placed() made."""
    assert all(neighbour.isnan().all() for neighbour in tensor.neighbours)


class Calls:
    """The same random calls on every rank, checked. rooms: bytes for x and for out; None: new memory for each call."""

    def __init__(self, coll: moe_a2a.Collectives, seed: int, rooms: tuple[Room, Room] = (None, None)):
        self.coll, self.random, self.number = coll, random.Random(seed), 0
        self.rooms = rooms

    def one(self, kind: str, count: int, dtype: torch.dtype, op: str, algorithm: str) -> None:
        self.number += 1
        in_place, shift, out_shift = (
            self.random.random() < 0.5,
            self.random.choice([0, 0, 1, 3]),
            self.random.choice([0, 2]),
        )
        what = f"call {self.number}: {kind} of {count} {dtype}, {op}, {algorithm}, {in_place=}, {shift=}"
        getattr(self, kind)(what, count, dtype, op, algorithm, in_place, shift, out_shift)

    def all_reduce(self, what, count, dtype, op, algorithm, in_place, shift, out_shift) -> None:
        coll = self.coll
        xs = [values(r, self.number, count, dtype) for r in range(coll.num_ranks)]
        x = placed(xs[coll.rank], coll.device, shift, self.rooms[0])
        out = x if in_place else poisoned(count, x, out_shift, self.rooms[1])
        assert coll.all_reduce(x, op, algorithm, out=out) is out
        assert torch.equal(out.cpu(), merged(xs, op)), what
        check_neighbours(out)
        if not in_place:
            assert torch.equal(x.cpu(), xs[coll.rank]), what

    def counts(self, count: int) -> list[int]:
        """The rows of each rank; some have none."""
        return [self.random.choice([0, count // 3, count]) for _ in range(self.coll.num_ranks)]

    def reduce_scatter(self, what, count, dtype, op, algorithm, in_place, shift, out_shift) -> None:
        coll, counts = self.coll, self.counts(count)
        first, mine = sum(counts[: coll.rank]), counts[coll.rank]
        xs = [values(r, self.number, sum(counts), dtype) for r in range(coll.num_ranks)]
        x = placed(xs[coll.rank], coll.device, shift, self.rooms[0])
        out = x[first : first + mine] if in_place else poisoned(mine, x, out_shift, self.rooms[1])
        coll.reduce_scatter(x, op, counts, out=out)
        assert torch.equal(out.cpu(), merged(xs, op)[first : first + mine]), what
        untouched = xs[coll.rank].clone()
        if in_place:
            untouched[first : first + mine] = merged(xs, op)[first : first + mine]
        assert torch.equal(x.cpu(), untouched), what
        check_neighbours(x)

    def all_gather(self, what, count, dtype, op, algorithm, in_place, shift, out_shift) -> None:
        coll, counts = self.coll, self.counts(count)
        first, mine = sum(counts[: coll.rank]), counts[coll.rank]
        xs = [values(r, self.number, counts[r], dtype) for r in range(coll.num_ranks)]
        out = poisoned(sum(counts), xs[0].to(coll.device), out_shift, self.rooms[1])
        x = placed(xs[coll.rank], coll.device, shift, self.rooms[0])
        if in_place:
            x = out[first : first + mine].copy_(x)
        coll.all_gather(x, counts, out=out)
        assert torch.equal(out.cpu(), torch.cat(xs)), what
        check_neighbours(out)


def check_works(coll: moe_a2a.Collectives) -> None:
    for algorithm in ALGORITHMS:
        x = torch.arange(1000.0) + coll.rank
        expected = torch.arange(1000.0) * coll.num_ranks + sum(range(coll.num_ranks))
        assert torch.equal(coll.all_reduce(x, algorithm=algorithm), expected)


def send_words(coll: moe_a2a.Collectives, most: int = MOST_IN_WORDS) -> moe_a2a.Collectives:
    """One-shot for calls of up to `most` bytes, sent as LL words; 0: rows."""
    tables = model(coll.device.type, coll.num_ranks)
    coll.tables = Tables([replace(table, most_in_words=most) for table in tables], "test")
    return coll


def check_barrier(coll, folder: str, step: int) -> None:
    """No rank passes a barrier that another has not reached, as the files in `folder` say."""
    Path(folder, f"{step} {coll.rank}").touch()
    coll.barrier()
    settle(coll)
    assert all(Path(folder, f"{step} {rank}").exists() for rank in range(coll.num_ranks))
