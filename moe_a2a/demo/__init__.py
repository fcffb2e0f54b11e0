"""`python -m moe_a2a demo`: real MoE models and the contest's shapes through dispatch and combine.

Every rank is a process of this machine. It runs its own part of one text through the models and
holds only its own experts; every logit is compared with the untouched model in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_a2a.arguments import MAX_RANKS
from moe_a2a.commands.command_line import UsageError, integer, output_folder, seconds

HELP = "run MoE models over several ranks of this machine and check every logit"
MODEL_NAMES = ("mixtral", "qwen3_moe", "deepseek_v3")
SECONDS_OF_REFERENCE = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=integer(1, MAX_RANKS), default=4, help="processes to start (default: 4)")
    parser.add_argument("--seed", type=integer(0), default=0, help="seed of weights and data (default: 0)")
    parser.add_argument("--models", nargs="+", choices=MODEL_NAMES, default=MODEL_NAMES, metavar="MODEL",
                        help=f"{', '.join(MODEL_NAMES)} (default: all)")  # fmt: skip
    parser.add_argument(
        "--output",
        type=output_folder,
        default="moe_a2a_demo",
        metavar="DIR",
        help="folder of the plot (default: moe_a2a_demo)",
    )
    parser.add_argument("--timeout", type=seconds, default=300, help="seconds that the ranks may take (default: 300)")


def run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("transformers") is None:
        return _failed("transformers is not installed (pip install 'moe_a2a[demo]')")
    from moe_a2a.rank_processes import RankError

    try:
        return _run(options)
    except RankError as error:
        print(error.details, file=sys.stderr)
        return _failed(str(error))


def _run(options: argparse.Namespace) -> int:
    from moe_a2a.demo import report
    from moe_a2a.demo.shapes import SHAPES
    from moe_a2a.rank_processes import preload, run_on_ranks
    from moe_a2a.samples import text

    num_sequences, length = text.batch().shape
    if options.ranks > num_sequences:
        raise UsageError(f"--ranks {options.ranks}: the text has {num_sequences} sequences, one or more for each rank")
    print(
        f"{options.ranks} ranks as processes, seed {options.seed}, {num_sequences * length} bytes of "
        "text, fp32 models with random weights"
    )
    preload("moe_a2a.demo.models")  # by name: the import takes seconds, and only the ranks need it
    num_units = 2 * len(options.models) + len(SHAPES)
    with _progress_bar(num_units) as advance:
        what = (tuple(options.models), options.seed)
        [whole] = run_on_ranks(1, _reference_main, *what, timeout=SECONDS_OF_REFERENCE, on_progress=advance)
        ranks = run_on_ranks(options.ranks, _rank_main, *what, timeout=options.timeout, on_progress=advance)

    of_models, of_shapes = zip(*ranks, strict=True)
    model_results = [
        report.model_result(name, runs, of_whole)
        for name, runs, of_whole in zip(options.models, zip(*of_models, strict=True), whole, strict=True)
    ]
    shape_results = [
        report.shape_result(shape, runs) for shape, runs in zip(SHAPES, zip(*of_shapes, strict=True), strict=True)
    ]
    return _reported(options.output / "demo.png", model_results, shape_results)


def _reported(picture: Path, model_results: list[Any], shape_results: list[Any]) -> int:
    """Prints and plots the results; returns the exit code."""
    from moe_a2a.demo import plot, report

    report.print_models(model_results)
    report.print_shapes(shape_results)

    counts = {result.name: result.tokens_per_expert for result in model_results}
    no_picture = plot.save(picture, counts, shape_results)
    print(f"\nno plot: {no_picture}" if no_picture else f"\nplot: {picture}")

    failed = [r.name for r in model_results if not r.passed]
    failed += [r.label for r in shape_results if not r.passed]
    if failed:
        return _failed(", ".join(failed))
    worst = max(result.difference for result in model_results)
    models = f"{len(model_results)} model" + "s" * (len(model_results) > 1)
    print(f"demo: {models}, max |logit difference| {worst:.2e}, all checks passed")
    return 0


def _reference_main(report: Callable[[str], None], model_names: tuple[str, ...], seed: int) -> list:
    """Runs in a process of its own: the untouched models."""
    from moe_a2a.demo import models
    from moe_a2a.samples import text

    whole = []
    for name in model_names:
        whole.append(models.run_in_one_process(name, seed, text.batch()))
        report(f"{name} in one process")
    return whole


def _rank_main(report: Callable[[str], None], model_names: tuple[str, ...], seed: int) -> tuple:
    """Runs on every rank: the models, then the shapes."""
    import torch.distributed as dist

    from moe_a2a.demo import models, shapes
    from moe_a2a.samples import text

    def done(what: str) -> None:
        if dist.get_rank() == 0:
            report(what)

    of_models, of_shapes = [], []
    for name in model_names:
        of_models.append(models.run_on_this_rank(name, seed, text.batch()))
        done(name)
    for shape in shapes.SHAPES:
        of_shapes.append(shapes.run_on_this_rank(shape, seed))
        done(f"shape {shape}")
    return of_models, of_shapes


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that advances the bar; without tqdm or a terminal, it does nothing."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        yield lambda what: None
        return
    with tqdm(total=total, leave=False) as bar:

        def advance(what: str) -> None:
            bar.set_description(what)
            bar.update()

        yield advance


def _failed(why: str) -> int:
    print(f"demo: FAILED {why}")
    return 1
