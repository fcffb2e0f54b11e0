"""`python -m moe_a2a bench`: measures and plots dispatch, experts, combine and the collectives. See docs/tuning.md."""

from __future__ import annotations

import argparse
from importlib import import_module

HELP = "measure dispatch, experts, combine, layers and collectives on this machine; draw results"
BENCHES = {
    "dispatch_combine": "time dispatch and combine beside the floor and the baselines",
    "experts": "time the two products of the experts beside baselines and the limits of the device",
    "layer": "time a whole MoE layer beside compositions with the baselines' products",
    "training": "time a layer's forward and backward pass beside sort + all_to_all",
    "micro_batches": "time a product on the remaining SMs beside dispatch and combine of another micro-batch",
    "data_parallel": "time training steps of DDP and FSDP2 on the torch.distributed backend beside NCCL or gloo",
    "all_reduce": "time all_reduce beside gloo or NCCL",
    "reduce_scatter": "time reduce_scatter beside gloo or NCCL",
    "all_gather": "time all_gather beside gloo or NCCL",
    "plot": "draw results",
}
MODULES = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), "collectives")  # others: the module's own name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(required=True, metavar="what")
    for name, text in BENCHES.items():
        bench = import_module(f"moe_a2a.bench.{MODULES.get(name, name)}")
        subparser = benches.add_parser(name, help=text, description=text)
        bench.add_arguments(subparser)
        subparser.set_defaults(run_bench=bench.run, kind=name)


def run(options: argparse.Namespace) -> int:
    return options.run_bench(options)
