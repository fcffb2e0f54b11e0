"""The programs of a rank's process, run one after another as ranks.py asks.

The submission runs in this process and could tamper with anything here. Therefore the harness's process draws inputs, checks
outputs and compares clocks, and no seed is known here.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a.leaderboard import link, problems
from moe_a2a.leaderboard.barrier import Barrier
from moe_a2a.leaderboard.cases import Case
from moe_a2a.leaderboard.device import RankDevice
from moe_a2a.leaderboard.guards import CollectiveBytes, GuardedInputs, poison
from moe_a2a.leaderboard.loading import Submission
from moe_a2a.leaderboard.problems.base import Problem, Tensors
from moe_a2a.rank_processes.server import this_process_store

Report = Callable[[str], None]

# Kept before a submission can replace them: it may put its work off until the harness copies its output.
_DETACH, _AS_SUBCLASS, _CPU, _CLONE = (
    torch.Tensor.detach,
    torch.Tensor.as_subclass,
    torch.Tensor.cpu,
    torch.Tensor.clone,
)


@dataclass
class CallResult:
    """One call on one rank. nanoseconds: from after the first barrier to after the second, as the contract requires.

    output: a copy on the CPU, of PyTorch's own class. returned: a description of the output if it is not a dense tensor on
    the rank's device, else "".
    """

    output: torch.Tensor | None = None
    returned: str = ""
    nanoseconds: int = 0
    mutated: list[str] = field(default_factory=list)
    overrun: list[str] = field(default_factory=list)
    remote_bytes: float = 0.0


@dataclass
class _CaseState:
    """The state between begin_case() and end_case()."""

    case: Case
    rank: int
    device: RankDevice
    barrier: Barrier
    weights: GuardedInputs
    inputs: GuardedInputs | None = None
    data: Any = None
    output: Any = None  # of the previous call

    def take(self, problem: Problem, inputs: Tensors | None) -> None:
        """None: the previous inputs again."""
        if is_dense(self.output) and not any(kept.holds(self.output) for kept in (self.weights, self.inputs) if kept):
            poison(self.output)
        self.output = None
        if inputs is not None:
            self.inputs, self.data = self.guarded(problem, inputs)

    def guarded(self, problem: Problem, inputs: Tensors) -> tuple[GuardedInputs, Any]:
        guarded = GuardedInputs(inputs, self.device.device)
        return guarded, problem.as_data(self.case, {**self.weights.tensors, **guarded.tensors}, self.rank)


_problem: list[Problem] = []
_submission: list[Submission] = []
_case: list[_CaseState] = []


def load(report: Report, problem_name: str, submission: Path) -> None:
    from moe_a2a.leaderboard import preloaded  # noqa: F401 (a spawned process has not inherited it)

    if not _submission:
        _problem.append(problems.make(problem_name))
        _submission.append(Submission(submission))


def begin_case(
    report: Report, key: str, case: Case, device_type: str, timeout: float, rank: int, weights: Tensors
) -> None:
    """Joins the case's own process group. `key` is new for each case."""
    device = RankDevice(device_type, rank)
    world_size = case["world_size"]
    barrier = Barrier(rank, world_size)
    # Through the module and with keywords: submissions may have replaced the function.
    dist.init_process_group(
        device.backend,
        store=dist.PrefixStore(key, this_process_store()),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
        **device.group_options,
    )
    _case.append(_CaseState(case, rank, device, barrier, GuardedInputs(weights, device.device)))
    barrier()


def end_case(report: Report) -> None:
    state = _case.pop()
    state.barrier()
    state.data = state.output = state.inputs = None
    if dist.is_initialized():
        dist.destroy_process_group()
    del state
    gc.collect()


def call(report: Report, counted: bool, inputs: Tensors | None) -> CallResult:
    """A timed call between two barriers. counted: counts torch.distributed's traffic, which slows the call down."""
    state = _case[0]
    state.take(_problem[0], inputs)
    device, kernel = state.device, _submission[0].kernel
    counter = CollectiveBytes(state.case["world_size"])
    device.clear_cache()
    device.wake_links()
    device.synchronize()
    report("start")
    state.barrier()
    begin = perf_counter_ns()
    if counted:
        with counter:
            output = _plain(kernel(state.data))
    else:
        output = _plain(kernel(state.data))
    device.synchronize()
    state.barrier()
    end = perf_counter_ns()
    report("end")
    state.output = output
    return _result(state.inputs, _copied(output, device.device), end - begin, counter.nbytes)


def link_rate(report: Report) -> float:
    """Rate of the link between the ranks of the case, in bytes per second."""
    return link.bytes_per_second(_case[0].device)


def call_in_a_row(report: Report, all_inputs: list[Tensors]) -> list[CallResult]:
    """Calls with no barrier between them."""
    state = _case[0]
    guarded = [state.guarded(_problem[0], inputs) for inputs in all_inputs]
    state.device.synchronize()
    state.barrier()
    outputs = []
    for _, data in guarded:
        output = _submission[0].kernel(data)
        # Copied at once: a submission may reuse its memory in the next call.
        outputs.append(output.clone() if isinstance(output, torch.Tensor) else output)
    state.device.synchronize()
    state.barrier()
    copies = [_copied(output, state.device.device) for output in outputs]
    return [_result(inputs, copied, 0, 0.0) for (inputs, _), copied in zip(guarded, copies, strict=True)]


def call_alone(report: Report, takes_part: bool, inputs: Tensors) -> CallResult:
    """A call made by only one rank: the others have left and do not answer."""
    state = _case[0]
    if not takes_part:
        return CallResult()
    state.take(_problem[0], inputs)
    output = _submission[0].kernel(state.data)
    state.device.synchronize()
    return _result(state.inputs, _copied(output, state.device.device), 0, 0.0)


def profile(report: Report, num_calls: int, path: Path, all_inputs: list[Tensors]) -> str:
    """Calls under a recorder: moe_a2a's own if the submission names an object to trace, else PyTorch's profiler on rank 0.
    Rank 0 writes the trace to `path` and returns its summary."""
    state = _case[0]
    prepared = [state.guarded(_problem[0], inputs)[1] for inputs in all_inputs]  # kept out of the trace
    for data in prepared[:-num_calls]:  # the first calls allocate and load kernels
        _profiled_call(state, data)
    target = _submission[0].traced()
    if target is not None:
        with moe_a2a.trace(target) as trace:
            for data in prepared[-num_calls:]:
                _profiled_call(state, data)
        trace.save(path)
        return str(trace.summary()) if state.rank == 0 else ""
    with torch.profiler.profile() if state.rank == 0 else contextlib.nullcontext() as profiler:
        for data in prepared[-num_calls:]:
            _profiled_call(state, data)
    if profiler is None:
        return ""
    profiler.export_chrome_trace(str(path))
    sort_by = "self_device_time_total" if state.device.is_gpu else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=sort_by, row_limit=12, max_name_column_width=40)


def _profiled_call(state: _CaseState, data: Any) -> None:
    state.barrier()
    with torch.profiler.record_function("custom_kernel"):
        _submission[0].kernel(data)
        state.device.synchronize()


def _plain(output: Any) -> Any:
    """The output as a tensor of PyTorch's own class. Called while the clock runs: a class of the submission's own may compute its
    values only when they are asked for."""
    if not isinstance(output, torch.Tensor) or type(output) is torch.Tensor:
        return output
    return output.detach().as_subclass(torch.Tensor)


def is_dense(output: Any) -> bool:
    """Whether it is a tensor with elements in memory, and not sparse, nested or quantised."""
    return (
        isinstance(output, torch.Tensor)
        and output.layout is torch.strided
        and not (output.is_nested or output.is_quantized)
    )


def _copied(output: Any, device: torch.device) -> tuple[torch.Tensor | None, str]:
    """CallResult.output and CallResult.returned."""
    if not isinstance(output, torch.Tensor):
        return None, f"{type(output).__name__}, not a tensor"
    if not is_dense(output):
        kind = "nested tensor" if output.is_nested else "quantised tensor" if output.is_quantized else "tensor"
        return None, f"a {kind} of layout {output.layout}, not a dense one"
    if output.device != device:
        return None, f"a tensor on {output.device}, not on {device}"
    if not _can_be_sent(output.dtype):
        return None, f"a tensor of {output.dtype}"
    return _CLONE(_CPU(_AS_SUBCLASS(_DETACH(output), torch.Tensor))), ""


@functools.cache
def _can_be_sent(dtype: torch.dtype) -> bool:
    """Whether pickle restores such a tensor; not so float8 and the unsigned integers of several bytes."""
    try:
        pickle.loads(pickle.dumps(torch.empty(0, dtype=dtype, device="cpu")))
    except AttributeError:
        return False
    return True


def _result(
    inputs: GuardedInputs | None, copied: tuple[torch.Tensor | None, str], nanoseconds: int, remote_bytes: float
) -> CallResult:
    assert inputs is not None
    weights = _case[0].weights
    mutated, overrun = inputs.mutated() + weights.mutated(), inputs.overrun() + weights.overrun()
    return CallResult(*copied, nanoseconds, mutated, overrun, remote_bytes)
