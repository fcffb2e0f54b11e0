"""Submissions that fail, each in its own way: the harness names each kind of failure, and continues."""

import contest_cases
import pytest
from contest_cases import changed, contest, verdicts

from moe_a2a.leaderboard import modes, run_command
from moe_a2a.leaderboard.modes import CaseResult, check_clock

pytestmark = pytest.mark.cpu

WRONG = """
def custom_kernel(data):
    out = right(data)
    if dist.get_rank() == 1:  # a wrong result must be found on any rank
        out[0, 0] += 1
    return out
"""
WRONG_SHAPE = "custom_kernel = lambda data: right(data)[:, :-1]"
NO_TENSOR = "custom_kernel = lambda data: right(data).tolist()"
FLOAT8 = "custom_kernel = lambda data: right(data).to(torch.float8_e4m3fn)"
RAISING = """
def custom_kernel(data):
    right(data)
    if dist.get_rank() == 1:
        raise ArithmeticError("on purpose")
"""
SPARSE_RESULT = "custom_kernel = lambda data: right(data).to_sparse()"
NESTED_RESULT = "custom_kernel = lambda data: torch.nested.nested_tensor([right(data)])"
NO_TEXT = """
class Mute(Exception):
    def __str__(self):
        raise ValueError
def custom_kernel(data):
    raise Mute
"""
FORKING = """
import os, time
def custom_kernel(data):
    if os.fork() == 0:
        time.sleep(600)
    os._exit(3)
"""
NO_KERNEL = "del custom_kernel"
CRASHING = """
import os
custom_kernel = lambda data: os.abort() if dist.get_rank() == 1 else right(data)
"""
OUT_OF_BOUNDS = """
def custom_kernel(data):
    x = data[1].x
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(3.0)  # the value after the last
    return right(data)
"""
MUTATING = """
def custom_kernel(data):
    out = right(data)
    data[1].weights[-1, -1] += 1
    return out
"""


@pytest.mark.parametrize(
    "verdict, words, snippet",
    [
        ("wrong", "rank 1: 1 of", WRONG),
        ("wrong", "returned [", WRONG_SHAPE),
        ("wrong", "returned list, not a tensor", NO_TENSOR),
        ("wrong", "a tensor of layout torch.sparse_coo, not a dense one", SPARSE_RESULT),
        ("wrong", "a nested tensor of layout torch.strided, not a dense one", NESTED_RESULT),
        ("wrong", "returned a tensor of torch.float8_e4m3fn", FLOAT8),
        ("raised", "rank 1 raised ArithmeticError: on purpose", RAISING),
        ("raised", "raised Mute: (no text: its __str__ raised)", NO_TEXT),
        ("crash", "died with exit code 3", FORKING),  # its child keeps the pipe to the harness open
        ("raised", "has no function custom_kernel", NO_KERNEL),
        ("crash", "rank 1 died with exit code -6", CRASHING),
        ("out_of_bounds", "bytes before or after x were written", OUT_OF_BOUNDS),
        ("mutated_input", "the call has changed weights", MUTATING),
    ],
    ids=[
        "wrong",
        "shape",
        "type",
        "sparse",
        "nested",
        "float8",
        "raising",
        "no text",
        "forking",
        "no kernel",
        "crashing",
        "out of bounds",
        "mutating",
    ],
)
def test_a_failure_has_its_name(tmp_path, verdict, words, snippet):
    result = contest().run("test", changed(tmp_path, snippet))
    assert verdicts(result) == {verdict}, result.cases[0].message
    assert words in result.cases[0].message


RIGHT = {
    "a class of its own": "class T(torch.Tensor): pass\ncustom_kernel = lambda data: right(data).as_subclass(T)",
    "inference mode": "custom_kernel = torch.inference_mode()(right)",
}


@pytest.mark.parametrize("snippet", RIGHT.values(), ids=RIGHT)
def test_what_is_right_in_another_way_passes(tmp_path, snippet):
    result = contest().run("benchmark", changed(tmp_path, snippet))
    assert result.passed, result.cases[0].message


def test_an_input_that_is_returned_is_not_overwritten(tmp_path):
    submission = tmp_path / "submission.py"
    submission.write_text("custom_kernel = lambda data: data[0]")
    case = (contest_cases.Case({"num_elements": 100, "seed": 3}),)
    result = contest("all_reduce", num_ranks=1, tests=case, benchmarks=case).run("benchmark", submission)
    assert result.passed, result.cases[0].message


def test_what_a_submission_has_started_ends_with_it(tmp_path):
    snippet = f"""
import subprocess
def custom_kernel(data):
    process = subprocess.Popen(["sleep", "600"])
    open({str(tmp_path)!r} + f"/{{process.pid}}.pid", "w").close()
    return right(data)
"""
    assert contest().run("test", changed(tmp_path, snippet)).passed
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert contest_cases.left_running(pids) == []


def test_a_hang_shows_where_each_rank_hangs(tmp_path):
    snippet = """
import time
def deepest(n):
    return deepest(n - 1) if n else time.sleep(600)
custom_kernel = lambda data: deepest(20)
"""
    result = contest(limit=0.7).run("test", changed(tmp_path, snippet))
    lines = run_command.line_of(result.cases[0]).splitlines()
    first = [lines[number + 2] for number, line in enumerate(lines) if line.startswith("--- rank")]
    assert len(first) == 2 and all("in deepest" in line for line in first), lines


def test_the_harness_survives_a_crash_and_runs_the_next_case(tmp_path):
    crash_of_one_case = CRASHING.replace("dist.get_rank() == 1", "data[0].hidden_dim == 32")
    result = contest(tests=(contest_cases.SPARSE, contest_cases.SMALL)).run(
        "test", changed(tmp_path, crash_of_one_case)
    )
    assert [case.verdict for case in result.cases] == ["crash", "pass"]


SLEEPING = """
import time
def custom_kernel(data):
    time.sleep({seconds} if dist.get_rank() == 0 else 0)
    return right(data)
"""


def test_slow_is_not_hanging(tmp_path):
    result = contest(limit=2.0).run("test", changed(tmp_path, SLEEPING.format(seconds=2.5)))
    assert verdicts(result) == {"slow"} and "2 s at most" in result.cases[0].message


def test_hanging_is_ended_and_shows_where_it_hangs(tmp_path):
    result = contest(limit=0.7).run("test", changed(tmp_path, SLEEPING.format(seconds=600)))
    assert verdicts(result) == {"hang"}
    assert "submission.py" in result.cases[0].details and "in custom_kernel" in result.cases[0].details


# ---- cheats

NO_COMMUNICATION = """
def custom_kernel(data):
    cfg, rank_data, rank, world_size = data
    factors = 1 + rank_data.indices // (cfg.num_experts // world_size)
    return (rank_data.x.float() * (rank_data.weights * factors).sum(1, keepdim=True)).half()
"""
CACHED_COPY = """
first = []
def custom_kernel(data):
    if not first:
        first.append(right(data))
        return first[0].clone()
    return first[0].clone()
"""
CACHED_TENSOR = CACHED_COPY.replace(".clone()", "")
REPLAYED = f"""
from moe_a2a.leaderboard import problems
from moe_a2a.leaderboard.cases import Case
from moe_a2a.leaderboard.problems.all2all import weighted_sums

def custom_kernel(data):
    case = Case({contest_cases.SMALL.values}).with_values(world_size=data[3])
    problem = problems.make("all2all_experts")
    generators = [torch.Generator().manual_seed(case["seed"] + rank) for rank in range(data[3])]
    guessed = [problem.make_inputs(case, rank, generators[rank]) for rank in range(data[3])]
    scales = torch.cat([of_rank["expert_scales"] for of_rank in guessed]).float()
    return weighted_sums(dict(x=data[1].x, indices=data[1].indices, weights=data[1].weights), scales)
"""


def test_a_submission_that_does_not_communicate_is_right_and_found_out(tmp_path):
    submission = changed(tmp_path, NO_COMMUNICATION)
    tested = contest().run("test", submission)
    assert tested.passed
    assert [(case.collective_bytes, case.shared_bytes) for case in tested.cases] == [(0, 0)]
    assert verdicts(contest().run("lone_call", submission)) == {"no_communication"}


@pytest.mark.parametrize("snippet", [CACHED_COPY, CACHED_TENSOR], ids=["copy", "tensor"])
def test_a_cached_output_is_known_again(tmp_path, snippet):
    assert verdicts(contest().run("leaderboard", changed(tmp_path, snippet))) == {"cached_output"}


NAN = "custom_kernel = lambda data: right(data) * float('nan')"
NAN_AFTER_THE_FIRST_CALL = """
import itertools
number = itertools.count()
custom_kernel = lambda data: right(data) * (float('nan') if next(number) else 1)
"""


@pytest.mark.parametrize(
    "mode, verdict, snippet",
    [("test", "wrong", NAN), ("pressure", "not_back_to_back", NAN_AFTER_THE_FIRST_CALL)],
    ids=["first call", "in a row"],
)
def test_nans_are_no_cached_output_where_none_was_overwritten(tmp_path, monkeypatch, mode, verdict, snippet):
    """Regression: a kernel whose result was all NaN was accused of returning an earlier call's tensor, even in its first call."""
    monkeypatch.setattr(modes, "PRESSURE_SECONDS", 0.0001)  # once
    result = contest().run(mode, changed(tmp_path, snippet))
    assert verdicts(result) == {verdict} and "it is nan" in result.cases[0].message, result.cases[0]


def test_a_replayed_seed_is_right_only_on_published_data(tmp_path):
    submission = changed(tmp_path, REPLAYED)
    assert contest("all2all_experts").run("test", submission).passed
    assert verdicts(contest("all2all_experts").run("leaderboard", submission)) == {"replayed_seed"}


REPLAYED_WEIGHTS = f"""
from moe_a2a.leaderboard import problems
from moe_a2a.leaderboard.cases import Case

def custom_kernel(data):
    cfg, rank_data, rank, world_size = data
    case = Case({contest_cases.LAYER.values}).with_values(world_size=world_size)
    problem = problems.make("moe_layer")
    own = dict(x=rank_data.x, indices=rank_data.indices, weights=rank_data.weights)
    guessed = [problem.make_weights(case, other, torch.Generator().manual_seed(case["seed"] + other))
               for other in range(world_size)]
    return problem.expected(case, [dict(own, **weights) for weights in guessed])[rank]
"""


def test_the_weights_of_a_case_are_secret_too(tmp_path):
    submission, layers = changed(tmp_path, REPLAYED_WEIGHTS), (contest_cases.LAYER,)
    assert contest("moe_layer", tests=layers, benchmarks=layers).run("test", submission).passed
    result = contest("moe_layer", tests=layers, benchmarks=layers).run("leaderboard", submission)
    assert verdicts(result) == {"replayed_seed"}


FAKE_CLOCK = """
import itertools, time
import moe_a2a.leaderboard.rank_program as harness
harness.perf_counter_ns = itertools.count(0, 1000).__next__
def custom_kernel(data):
    time.sleep(0.4)
    return right(data)
"""


def test_a_clock_that_the_submission_has_replaced_is_noticed(tmp_path):
    result = contest().run("leaderboard", changed(tmp_path, FAKE_CLOCK))
    assert verdicts(result) == {"clock"} and "the rank reports 1.0 us" in result.cases[0].message


@pytest.mark.parametrize(
    ("overhead_us", "verdict"),
    [
        ([900] * 6, "clock"),
        ([900, 800, 5, 700, 900], "pass"),
        ([900] * 30 + [5] * 20, "clock"),
        ([5] * 30 + [900] * 20, "pass"),
    ],
    ids=["all of few", "most of few", "most of many", "a minority of many"],
)
def test_a_busy_machine_delays_only_some_of_few_calls(overhead_us, verdict):
    case = contest_cases.SMALL
    null = CaseResult(case, overhead_ns=[10_000] * 20)
    result = CaseResult(case, nanoseconds=[100_000] * len(overhead_us), overhead_ns=[1000 * us for us in overhead_us])
    check_clock(result, null)
    assert result.verdict == verdict


@pytest.mark.parametrize("now", ["itertools.count(0, -1000).__next__", "lambda: 5", "lambda: float('nan')"])
def test_a_clock_that_does_not_go_forward_ends_no_ranking(tmp_path, now):
    snippet = FAKE_CLOCK.replace("itertools.count(0, 1000).__next__", now)
    result = contest().run("leaderboard", changed(tmp_path, snippet))
    assert verdicts(result) == {"clock"} and "the clock of rank 0 shows" in result.cases[0].message


OTHER_RESULTS = """
import moe_a2a.leaderboard.rank_program as harness
copied = harness._copied
harness._copied = lambda *output: (copied(*output)[0].to("meta"), "")
"""


def test_a_result_that_the_harness_cannot_check_ends_no_ranking(tmp_path):
    result = contest().run("test", changed(tmp_path, OTHER_RESULTS))
    assert verdicts(result) == {"wrong"} and "the harness's own code does not make" in result.cases[0].message


OWN_GROUPS = """
dist.barrier = lambda *args, **kwargs: None
dist.get_world_size = lambda *args, **kwargs: 1
"""


def test_the_harness_trusts_no_function_of_the_submission_s_process_group(tmp_path):
    """Its own barrier holds, so a slow rank 1 is part of rank 0's time."""
    sleeping = OWN_GROUPS + SLEEPING.replace("== 0", "== 1").format(seconds=0.2)
    result = contest().run("leaderboard", changed(tmp_path, sleeping))
    assert result.passed and result.cases[0].stats.best > 0.19e9


WORK_PUT_OFF = """
import time
put_off = []
def catch_up():
    while put_off:
        data, out = put_off.pop()
        time.sleep(0.2)
        out.copy_(right(data))
def empty_result(data):
    put_off.append((data, torch.empty_like(data[1].x)))
    return put_off[-1][1]
"""
UNTIL_IT_IS_READ = f"""{WORK_PUT_OFF}
class Late(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            catch_up()
        return super().__torch_function__(function, types, args, kwargs or {{}})
custom_kernel = lambda data: empty_result(data).as_subclass(Late)
"""
UNTIL_IT_IS_COPIED = f"""{WORK_PUT_OFF}
cpu = torch.Tensor.cpu
torch.Tensor.cpu = lambda x: catch_up() or cpu(x)
custom_kernel = empty_result
"""


def test_what_a_class_of_the_submission_s_own_computes_when_it_is_read_is_timed(tmp_path):
    result = contest().run("leaderboard", changed(tmp_path, UNTIL_IT_IS_READ))
    assert result.passed and result.cases[0].stats.best > 0.19e9


def test_work_put_off_until_the_harness_copies_the_output_is_never_done(tmp_path):
    result = contest().run("leaderboard", changed(tmp_path, UNTIL_IT_IS_COPIED))
    assert verdicts(result) <= {"wrong", "replayed_seed"}, result.cases[0].message
