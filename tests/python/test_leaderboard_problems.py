"""The other problems of the leaderboard: their entries are right, and their checks detect what a tolerance alone misses."""

import contest_cases
import pytest
import torch
from contest_cases import contest

from moe_a2a.leaderboard import loading, problems
from moe_a2a.leaderboard.cases import Case, shrunk

pytestmark = pytest.mark.cpu

SHAPES = {
    "moe_layer": contest_cases.LAYER.values,
    "all_reduce": {"num_elements": 1816, "seed": 6},
    "all_reduce_quantised": {"num_elements": 1816, "seed": 7},
    "gemm_reduce_scatter": {"m": 64, "n": 96, "k": 128, "seed": 8},
    "all_gather_gemm": {"m": 64, "n": 96, "k": 128, "seed": 9},
}  # fmt: skip


@pytest.mark.parametrize(
    "problem, name", [(problem, name) for problem in SHAPES for name in loading.entry_names(problem)]
)
def test_the_entries_of_the_tree_are_right(problem, name, session_seed, tmp_path):
    """And moe_a2a's own are traced by moe_a2a, not by PyTorch's profiler."""
    entry, cases = loading.entry_path(problem, name), (Case(SHAPES[problem]),)
    made = contest(problem, seed=session_seed, tests=cases, benchmarks=cases)
    with made.ranks_of(entry) as ranks:
        result = made.run_on(ranks, "test", nulls=[])
        assert result.passed, result.cases
        if name in ("collectives", "expert_parallel"):
            profiled = made.profile(ranks, made.cases_of("profile"), tmp_path, name)
            assert profiled.passed and "us in each operation" in profiled.cases[0].summary


@pytest.mark.parametrize("problem", problems.PROBLEMS)
def test_every_problem_has_a_file_shapes_and_entries(problem):
    file = problems.file_of(problem)
    assert file.name == problem and file.tests and file.benchmarks and file.summary
    assert "reference" in loading.entry_names(file.entries or problem)
    for case in (*file.tests, *file.benchmarks):
        for num_ranks in (1, 2, 4, 8):
            problems.make(problem).check_case(case.with_values(world_size=num_ranks))
    assert len(file.speed_of_light_us) in (0, len(file.benchmarks))


def drawn(problem, num_ranks, seed):
    made, case = problems.make(problem), Case(SHAPES[problem]).with_values(world_size=num_ranks)
    generators = [torch.Generator().manual_seed(seed + rank) for rank in range(num_ranks)]
    tensors = [
        {**made.make_weights(case, rank, generators[rank]), **made.make_inputs(case, rank, generators[rank])}
        for rank in range(num_ranks)
    ]
    return made, case, tensors


def test_bytes_that_have_to_move():
    """Two ranks with experts 0, 1 and 2, 3: rank 0's first token goes to both, its second to rank 1 alone, rank 1's stays."""
    case = Case({"num_experts": 4, "hidden_dim": 10, "world_size": 2})
    rows = [
        {"x": torch.zeros(len(idx), 10).half(), "indices": torch.tensor(idx)} for idx in ([[0, 2], [2, 3]], [[2, 3]])
    ]
    for name in ("all2all", "all2all_experts", "moe_layer"):
        # Two rows of 20 bytes, and two sums back.
        assert problems.make(name).bytes_to_move(case, rows) == 2 * (2 * 10 * 2)
    of_ranks = [{"x": torch.zeros(8).bfloat16()}] * 4
    assert problems.make("all_reduce").bytes_to_move(Case({}), of_ranks) == 2 * 3 / 4 * 16
    least = problems.make("all_reduce_quantised").bytes_to_move(Case({}), of_ranks)
    assert least == pytest.approx(2 * 3 / 4 * 8 * 4.65 / 8, rel=1e-3)  # 6.02 dB per bit
    sizes = Case({"m": 8, "n": 6, "k": 4, "world_size": 4})
    assert problems.make("gemm_reduce_scatter").bytes_to_move(sizes, of_ranks) == 3 * 2 * 6 * 2  # three ranks' rows
    assert problems.make("all_gather_gemm").bytes_to_move(sizes, of_ranks) == 3 * 2 * 4 * 2


@pytest.mark.parametrize("problem", ["gemm_reduce_scatter", "all_gather_gemm"])
def test_an_output_without_its_product_is_wrong(problem, session_seed):
    """The published tolerance accepts it."""
    made, case, tensors = drawn(problem, 8, session_seed)
    for rank, expected in enumerate(made.expected(case, tensors)):
        biases = [of_rank["bias"].float() for of_rank in tensors]
        bias = sum(biases) if problem == "gemm_reduce_scatter" else biases[rank]
        output = bias.bfloat16().expand_as(expected)
        assert torch.allclose(output.float(), expected.float(), rtol=1e-2, atol=1e-2)
        assert "the error's norm is" in made.mismatch(output, expected)


@pytest.mark.parametrize("bits, is_right", [(4, False), (6, True), (8, True)])
def test_how_coarse_a_quantised_sum_may_be(bits, is_right, session_seed):
    made, case, tensors = drawn("all_reduce_quantised", 4, session_seed)
    steps = 2 ** (bits - 1) - 1
    total = torch.zeros(case["num_elements"])
    for of_rank in tensors:
        blocks = torch.nn.functional.pad(of_rank["x"].float(), (0, -case["num_elements"] % 32)).view(-1, 32)
        scales = blocks.abs().amax(1, keepdim=True) / steps
        total += ((blocks / scales).round() * scales).view(-1)[: case["num_elements"]]
    wrong = made.mismatch(total.bfloat16(), made.expected(case, tensors)[0])
    assert (wrong == "") == is_right and (is_right or "dB of signal" in wrong)
    assert made.mismatch(torch.full_like(total, float("nan")).bfloat16(), made.expected(case, tensors)[0])


def test_replicas_of_a_quantised_sum_must_have_the_same_bits():
    made, output = problems.make("all_reduce_quantised"), torch.ones(4)
    other = output.clone()
    other[2] += 1e-6
    assert made.disagreement([output, output.clone()]) == ""
    assert made.disagreement([output, output, other]) == "rank 2: other bits than rank 0's"


def test_shrunk_shapes():
    case = Case({"m": 8192, "n": 2880, "k": 512, "seed": 3})
    assert shrunk(case, ["m", "n", "k"], 16).label == "512 128 64"
    assert shrunk(case, ["m", "n", "k"], 1) == case
