"""Every MoE family of the installed transformers: do its logits through moe_a2a equal those of eager?

    python tests/python/transformers_sweep.py                     # all families, a markdown table
    python tests/python/transformers_sweep.py mixtral gpt_oss --ranks 3

The ranks are threads of this process. Each holds its own copy of a tiny model, keeps only its own
experts, and runs its own part of the batch; the other side of the comparison is an untouched copy
with transformers' eager experts on the same part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import transformers
from tiny_models import VOCAB_SIZE, families, tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import moe_a2a
from moe_a2a.integrations import kernel_experts
from moe_a2a.integrations.experts_module import is_experts_module
from moe_a2a.integrations.transformers import register, shard_experts

TOLERANCE = 1e-5  # on fp32 logits of size about 1
SEQUENCE_LENGTH = 17


@dataclass
class Comparison:
    family: str
    model: str = ""
    num_moe_layers: int = 0
    max_difference: float = float("nan")  # between moe_a2a and eager, over all logits
    library_difference: float = 0.0  # between transformers' own grouped_mm and eager
    experts_effect: float = 0.0  # largest change of a logit without the experts
    way: str = ""  # how its experts run in bfloat16: the kernels' epilogue, or "PyTorch: ..."
    problem: str = ""  # why there is no comparison

    @property
    def equal(self) -> bool:
        """Some models amplify rounding: for them the difference between transformers' own two ways is the measure.

        A model whose experts do not affect its logits would prove nothing.
        """
        allowed = max(TOLERANCE, 2 * self.library_difference)
        return self.max_difference <= allowed and self.experts_effect > 1000 * TOLERANCE

    def as_row(self) -> str:
        verdict = "yes" if self.equal else f"no: {self.problem or 'logits differ'}"
        return (
            f"| {self.family} | {self.model} | {self.num_moe_layers} | {verdict} "
            f"| {self.max_difference:.1e} | {self.library_difference:.1e} "
            f"| {self.experts_effect:.2f} | {self.way} |"
        )


TABLE_HEAD = (
    "| family | model | MoE layers | equal to eager | max abs difference "
    "| grouped_mm's difference | effect of the experts | by kernels |\n|---|---|---|---|---|---|---|---|"
)


def compare(family: str, num_ranks: int = 2, seed: int = 0) -> Comparison:
    """Run the family's tiny model both ways; failing to run a model is a result too."""
    comparison = Comparison(family)
    try:
        untouched = tiny_model(family, seed)
        comparison.model = type(untouched).__name__
        comparison.num_moe_layers = sum(map(is_experts_module, untouched.modules()))
        models = [tiny_model(family, seed) for _ in range(num_ranks)]
        batches = parts_of_a_batch(num_ranks, seed)
        expected = [run_with(untouched, "eager", batch) for batch in batches]
        actual = run_on_ranks(models, batches)
        grouped = [run_with(untouched, "grouped_mm", batch) for batch in batches]
        without = [run_with(untouched, LEFT_OUT, batch) for batch in batches]
        comparison.way = way_of(untouched.bfloat16())
    except Exception as error:
        comparison.problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return comparison
    comparison.max_difference = _max_difference(actual, expected)
    comparison.library_difference = _max_difference(grouped, expected)
    comparison.experts_effect = _max_difference(without, expected)
    return comparison


def way_of(model: PreTrainedModel) -> str:
    """How its experts run on a GPU; the same for all layers. Frees half of the experts."""
    modules = [module for module in model.modules() if is_experts_module(module)]
    shard_experts(model, moe_a2a.thread_group(2)[0])
    ways = set()
    for module in modules:
        rows = module.down_proj.new_empty(0, 0)
        why_not = kernel_experts.why_not(module, rows, range(len(module.down_proj)))
        ways.add(str(kernel_experts.epilogue_of(module)) if why_not is None else f"PyTorch: {why_not}")
    return " or ".join(sorted(ways))


def parts_of_a_batch(num_ranks: int, seed: int) -> list[Tensor]:
    """Rank r has r + 1 sequences, so no two ranks have the same number of tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (rank + 1, SEQUENCE_LENGTH), generator=generator) for rank in range(num_ranks)]


def run_with(model: PreTrainedModel, experts_implementation: str, input_ids: Tensor) -> Tensor:
    model.set_experts_implementation(experts_implementation)
    with torch.no_grad():
        return model(input_ids=input_ids)[0]


def run_on_ranks(models: Sequence[PreTrainedModel], batches: Sequence[Tensor]) -> list[Tensor]:
    """Each model on its own thread, as one rank; experts of other ranks are freed first."""
    groups = moe_a2a.thread_group(len(models))

    def rank_main(rank: int) -> Tensor:
        # The registry belongs to the process, so every rank needs its own name.
        with register(groups[rank], timeout=20.0, name=f"moe_a2a:{rank}") as experts:
            shard_experts(models[rank], groups[rank])
            return run_with(models[rank], experts.name, batches[rank])

    return on_threads(len(models), rank_main)


def on_threads(num_ranks: int, rank_main: Callable[[int], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(rank_main, range(num_ranks)))


def _leave_experts_out(module, hidden_states, top_k_index, top_k_weights):
    return torch.zeros_like(hidden_states)


LEFT_OUT = "moe_a2a:left_out"
ALL_EXPERTS_FUNCTIONS[LEFT_OUT] = _leave_experts_out


def _max_difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, {options.ranks} ranks, seed {options.seed}\n")
    print(TABLE_HEAD)
    comparisons = []
    for family in options.families or families():
        comparisons.append(compare(family, options.ranks, options.seed))
        print(comparisons[-1].as_row(), flush=True)
    num_equal = sum(comparison.equal for comparison in comparisons)
    print(
        f"\n{num_equal} of {len(comparisons)} families equal: max abs difference <= {TOLERANCE}, "
        "or twice the difference of transformers' own grouped_mm"
    )
    return 0 if num_equal == len(comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
