"""One case of one submission: its inputs, its calls, and all checks of its outputs."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_a2a.leaderboard import problems, traffic
from moe_a2a.leaderboard.cases import Case
from moe_a2a.leaderboard.problems.base import Tensors
from moe_a2a.leaderboard.rank_program import CallResult
from moe_a2a.leaderboard.ranks import SubmissionRanks
from moe_a2a.leaderboard.verdicts import SubmissionFailedError

NUM_KEPT = 4  # expected outputs of earlier calls, to recognise a cached output


@dataclass
class Call:
    """A correct call.

    nanoseconds: by rank 0's own clock, as the contract requires. observed_ns: by the harness's clock, including
    the pipes between the two processes. collective_bytes: sent by torch.distributed, summed over ranks. shared_bytes: pages
    touched in shared memory; -1: not counted.
    """

    nanoseconds: int
    observed_ns: int
    collective_bytes: int = -1
    shared_bytes: int = -1


class Trial:
    """A case from beginning to end.

    published: the weights come from the published seed, not from a secret one. checked: whether outputs are checked; those
    of the null submission are not.
    """

    def __init__(
        self,
        ranks: SubmissionRanks,
        problem_name: str,
        case: Case,
        secret: int,
        published: bool = False,
        checked: bool = True,
    ):
        self._ranks = ranks
        self._problem = problems.make(problem_name)
        self._problem.check_case(case)
        self.case = case
        self._secret = secret
        self._checked = checked
        self._num_secret_seeds = 0
        self._expected: list[Tensor] = []  # of the last call
        self._earlier: list[list[Tensor]] = []
        self._has_called = False  # with a check of the outputs
        seed = case["seed"] if published else self._secret_seed()
        self._weights = [
            self._problem.make_weights(case, rank, _generator(seed, rank)) for rank in range(ranks.num_ranks)
        ]

    def __enter__(self) -> Trial:
        self._ranks.begin_case(self.case, self._weights)
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self._ranks.end_case()
        elif kind is SubmissionFailedError:
            self._ranks.close()  # after a failure these processes cannot be trusted

    # ---- inputs

    def published_inputs(self) -> list[Tensors]:
        return self._draw(self.case["seed"])

    def secret_inputs(self) -> list[Tensors]:
        """New inputs at each call."""
        return self._draw(self._secret_seed())

    def _secret_seed(self) -> int:
        """A new seed each time, unknown before this run."""
        self._num_secret_seeds += 1
        text = f"{self._secret} {self.case.spec} {self._num_secret_seeds}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    def _draw(self, seed: int) -> list[Tensors]:
        ranks = range(self._ranks.num_ranks)
        return [self._problem.make_inputs(self.case, rank, _generator(seed, rank)) for rank in ranks]

    def expected(self, inputs: list[Tensors]) -> list[Tensor]:
        return self._problem.expected(self.case, [{**w, **own} for w, own in zip(self._weights, inputs, strict=True)])

    # ---- calls

    def call(self, inputs: list[Tensors] | None, limit: float) -> Call:
        """Raises SubmissionFailedError unless everything is right. inputs: None: those of the previous call."""
        if inputs is not None:
            self._take(inputs)
        results = self._ranks.call(inputs, limit)
        self._check_all(results)
        return Call(results[0].nanoseconds, round(self._ranks.seconds_observed * 1e9))

    def counted_call(self, inputs: list[Tensors], limit: float) -> Call:
        """A call with counted traffic; its time is meaningless."""
        self._take(inputs)
        can_count = traffic.forget_touched_pages(self._ranks.pids)
        results = self._ranks.call(inputs, limit, counted=True)
        shared = self._ranks.shared_bytes_touched() if can_count else -1
        self._check_all(results)
        collective = sum(result.remote_bytes for result in results)
        return Call(results[0].nanoseconds, round(self._ranks.seconds_observed * 1e9), round(collective), shared)

    def calls_in_a_row(self, num_calls: int, limit: float, source: random.Random) -> None:
        """Calls without a barrier in between, while ranks are stopped at instants drawn from `source`."""
        inputs = [self.secret_inputs() for _ in range(num_calls)]
        expected = [self.expected(of_call) for of_call in inputs]
        results = self._ranks.call_in_a_row([list(own) for own in zip(*inputs, strict=True)], limit, source)
        for rank, of_rank in enumerate(results):
            for number, result in enumerate(of_rank):
                self._check(result, expected[number][rank], f"rank {rank}, call {number}")

    def profile(self, num_warm_up: int, num_calls: int, path: Path, limit: float) -> str:
        """Returns the summary of a trace of `num_calls` calls, which it writes to `path`."""
        inputs = [self.secret_inputs() for _ in range(num_warm_up + num_calls)]
        return self._ranks.profile(num_calls, path, [list(own) for own in zip(*inputs, strict=True)], limit)

    def is_right_alone(self, rank: int, limit: float) -> bool:
        """Whether the rank has the right output although no other rank takes part. If not, it waits, or raises; the
        submission's processes are ended either way."""
        inputs = self.secret_inputs()
        try:
            result = self._ranks.call_alone(rank, inputs[rank], limit)
        except SubmissionFailedError:
            return False
        finally:
            self._ranks.close()
        return result.output is not None and not self._problem.mismatch(result.output, self.expected(inputs)[rank])

    # ---- checks

    def _take(self, inputs: list[Tensors]) -> None:
        self._earlier = [*self._earlier[-NUM_KEPT:], self._expected] if self._expected else []
        self._expected = self.expected(inputs)

    def _check_all(self, results: list[CallResult]) -> None:
        for rank, result in enumerate(results):
            earlier = [outputs[rank] for outputs in self._earlier] if self._has_called else None
            self._check(result, self._expected[rank], f"rank {rank}", earlier)
        self._has_called = True
        if self._checked:
            problem = self._problem.disagreement([result.output for result in results if result.output is not None])
            if problem:
                raise SubmissionFailedError("wrong", problem)

    def _check(self, result: CallResult, expected: Tensor, where: str, earlier: list[Tensor] | None = None) -> None:
        """The worst failure first: a write out of bounds may be the cause of the others. earlier: the expected outputs of earlier
        calls; None: there was none whose output was poisoned."""
        if not self._checked:
            return
        if result.overrun:
            names = ", ".join(result.overrun)
            raise SubmissionFailedError("out_of_bounds", f"{where}: bytes before or after {names} were written")
        if result.mutated:
            raise SubmissionFailedError("mutated_input", f"{where}: the call has changed {', '.join(result.mutated)}")
        if result.output is None:
            raise SubmissionFailedError("wrong", f"{where}: custom_kernel() returned {result.returned}")
        problem = self._problem.mismatch(result.output, expected)
        if not problem:
            return
        if earlier is not None and _is_poison(result.output):
            raise SubmissionFailedError("cached_output", f"{where}: the tensor of an earlier call, not written again")
        if any(not self._problem.mismatch(result.output, old) for old in earlier or []):
            raise SubmissionFailedError("cached_output", f"{where}: the output of an earlier call, with other inputs")
        raise SubmissionFailedError("wrong", f"{where}: {problem}")


def _is_poison(output: Tensor) -> bool:
    return output.numel() > 0 and output.is_floating_point() and bool(output.isnan().all())


def _generator(seed: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + rank)
