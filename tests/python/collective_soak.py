"""Collectives of alternating kinds, shapes, types, operators, algorithms and codecs, mixed with dispatches and combines,
on one communicator without a barrier. Each result is checked on the device; the host reads the count once per thousand.

Values are equal within a block of 32 and multiplied by 1 + rank on each rank, so each rank knows every result, and the integer
codecs yield it exactly; a stale or misplaced block gives a different number.
"""

from __future__ import annotations

import random

import exact
import soak
import torch

import moe_a2a

COUNTS = (1, 7, 33, 640, 5_000, 20_000)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = ("sum", "max", "min", "avg")
METHODS = [(name, None) for name in ("one_shot", "two_shot", "ring", "recursive_doubling", "auto", "direct")] + [
    ("auto", codec) for codec in ("fp8", "q8", "q6", "q4")
]
FP8_IS_OFF = 0.13  # at most; its range is not a power of two
NUM_VARIANTS = 5
MAX_NBYTES = 16 << 10  # the largest tensors go in slices
SHARE_OF_LAYERS = 0.25
TIMEOUT = 20.0  # seconds
MOE = {"num_topk": 3, "hidden": 256, "num_max_tokens_per_rank": 20, "dtype": torch.bfloat16, "num_max_ll_tokens": 8}


def base_values(shared: random.Random, count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shared.randrange(1 << 30))
    return torch.randint(-6, 7, (-(-count // 32),), generator=generator).repeat_interleave(32)[:count].to(device)


def merged(base: torch.Tensor, op: str, num_ranks: int) -> torch.Tensor:
    """Merges base * (1 + rank) over all ranks."""
    if op == "sum":
        return base * (num_ranks * (num_ranks + 1) / 2)
    if op == "avg":
        return base * ((num_ranks + 1) / 2)
    first, last = base, base * num_ranks
    return torch.maximum(first, last) if op == "max" else torch.minimum(first, last)


class RandomCalls:
    """Calls of Collectives, drawn identically on all ranks."""

    def __init__(self, coll: moe_a2a.Collectives, shared: random.Random):
        self.coll, self.shared = coll, shared
        self.room = coll.empty(max(COUNTS) * coll.num_ranks)
        self.bases = {count: [base_values(shared, count, coll.device) for _ in range(NUM_VARIANTS)] for count in COUNTS}
        self.wrong = torch.zeros((), dtype=torch.int64, device=coll.device)

    def call(self, is_planted: bool = False) -> None:
        """is_planted: rank 0 spoils one value. A minimum could hide it."""
        base = self.shared.choice(self.bases[self.shared.choice(COUNTS)])
        dtype, op = self.shared.choice(DTYPES), "sum" if is_planted else self.shared.choice(OPS)
        x = (base * (1 + self.coll.rank)).to(dtype)
        if is_planted and self.coll.rank == 0:
            x[0] = 100
        kind = self.shared.choice(("all_reduce", "all_reduce", "reduce_scatter", "all_gather"))
        getattr(self, kind)(x, base, op)

    def all_reduce(self, x: torch.Tensor, base: torch.Tensor, op: str) -> None:
        algorithm, codec = self.shared.choice(METHODS)
        if algorithm == "direct":
            x = self.symmetric(x)
        out = x if algorithm == "direct" or self.shared.random() < 0.5 else None
        result = self.coll.all_reduce(x, op, algorithm, codec, out=out)
        self.compare(result, merged(base, op, self.coll.num_ranks), FP8_IS_OFF if codec == "fp8" else 0)

    def reduce_scatter(self, x: torch.Tensor, base: torch.Tensor, op: str) -> None:
        cuts = sorted(self.shared.randint(0, len(x)) for _ in range(self.coll.num_ranks - 1))
        begins, ends = [0, *cuts], [*cuts, len(x)]
        counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
        result = self.coll.reduce_scatter(self.symmetric(x) if self.shared.random() < 0.5 else x, op, counts)
        own = base[begins[self.coll.rank] : ends[self.coll.rank]]
        self.compare(result, merged(own, op, self.coll.num_ranks), 0)

    def all_gather(self, x: torch.Tensor, base: torch.Tensor, op: str) -> None:
        expected = torch.cat([base * (1 + rank) for rank in range(self.coll.num_ranks)])
        out = self.symmetric(expected.to(x.dtype)).fill_(-1) if self.shared.random() < 0.5 else None
        self.compare(self.coll.all_gather(x, out=out), expected, 0)

    def symmetric(self, x: torch.Tensor) -> torch.Tensor:
        """A copy in symmetric memory, always the same."""
        return self.room.view(torch.uint8)[: x.nbytes].view(x.dtype).copy_(x)

    def compare(self, result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
        # Not greater: a NaN is wrong.
        self.wrong += (~((result.float() - expected).abs() <= tolerance * expected.abs())).sum()


def run(group, seed: int, num_iterations: int, plant_at: int = -1) -> int:
    """The total number of wrong values. In iteration `plant_at`, a collective, rank 0 spoils a value."""
    shared, own = random.Random(seed), random.Random(f"{seed} {group.rank}")
    with moe_a2a.Communicator(group, timeout=TIMEOUT) as comm:
        ep = moe_a2a.ExpertParallel(comm, **MOE, num_experts=4 * comm.num_ranks)
        coll = moe_a2a.Collectives(comm, MAX_NBYTES, symmetric_nbytes=4 * max(COUNTS) * comm.num_ranks)
        layers, collectives = soak.Workload(ep, own), RandomCalls(coll, shared)
        for index in range(num_iterations):
            if own.random() < soak.SHARE_OF_DELAYS:
                soak.sleep(comm.device, own.random() * soak.LONGEST_DELAY)
            if index != plant_at and shared.random() < SHARE_OF_LAYERS:
                tokens = own.choice(layers.samples)
                handle = ep.dispatch(tokens.x, tokens.topk_idx)
                exact.count_wrong(
                    collectives.wrong, ep.combine(exact.run_experts(ep, handle, layers.positions), handle), tokens
                )
            else:
                collectives.call(is_planted=index == plant_at)
            if (index + 1) % soak.CHECK_EVERY == 0 or index + 1 == num_iterations:
                ep.check()
                coll.check()
                where = f"seed {seed}, rank {comm.rank}, by iteration {index}"
                assert plant_at >= 0 or collectives.wrong.item() == 0, f"{where}: {collectives.wrong.item()} wrong"
        ep.close()
        coll.close()
        return collectives.wrong.item()
