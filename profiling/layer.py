"""An MoE layer to trace, shared by the scripts beside this file.

Started by torchrun, on the CPU (MOE_A2A_DEVICE=cpu) or with one GPU per rank:

    MOE_A2A_DEVICE=cpu torchrun --nproc-per-node 4 profiling/trace_one_layer.py --output layer.json.gz
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

import moe_a2a


class Layer:
    """Random tokens, a random router and SwiGLU experts by kernels, whose tiles a trace shows; a call runs the whole layer once.

    `before_dispatch` and `before_combine` are called between the steps: places to plant a cause.
    """

    def __init__(self, options: argparse.Namespace):
        if not os.environ.get("MOE_A2A_DEVICE") and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_num_threads(1)  # ranks share the cores
        self.ep = moe_a2a.ExpertParallel(
            None,
            num_experts=options.experts,
            num_topk=options.topk,
            hidden=options.hidden,
            num_max_tokens_per_rank=options.tokens,
            num_blocks=options.blocks,
        )
        device, dtype = self.ep.device, self.ep.dtype
        generator = torch.Generator(device).manual_seed(self.ep.rank)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

        self.x = random(options.tokens, options.hidden).to(dtype)
        scores = random(options.tokens, options.experts).softmax(dim=-1)
        self.topk_weights, self.topk_idx = scores.topk(options.topk)
        inner = options.hidden // 8
        self._w_gate_up = random(self.ep.num_local_experts, 2 * inner, options.hidden).to(dtype) / options.hidden**0.5
        self._w_down = random(self.ep.num_local_experts, options.hidden, inner).to(dtype) / inner**0.5
        self.before_dispatch: Callable[[], None] = lambda: None
        self.before_combine: Callable[[], None] = lambda: None

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        self.before_dispatch()
        handle = self.ep.dispatch(self.x, self.topk_idx, self.topk_weights)
        offsets, rows = handle.expert_offsets, handle.expert_row_index
        inner = moe_a2a.grouped_gemm(handle.recv_x, rows, offsets, self._w_gate_up, "swiglu")
        y = moe_a2a.grouped_gemm(inner, None, offsets, self._w_down)
        self.before_combine()
        return self.ep.combine(y, handle)


def main(prepare: Callable[[Layer], None], what: str) -> None:
    """Warms up, traces `--calls` calls, saves the file, prints the summary."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output",
        default="trace.json.gz",
        help="a path ending in .json.gz, .json or .pftrace (default: trace.json.gz)",
    )
    parser.add_argument("--tokens", type=int, default=128, help="tokens per rank (default: 128)")
    parser.add_argument("--hidden", type=int, default=1024, help="values per row (default: 1024)")
    parser.add_argument("--topk", type=int, default=4, help="experts per token (default: 4)")
    parser.add_argument("--experts", type=int, default=32, help="experts of all ranks (default: 32)")
    parser.add_argument(
        "--blocks", type=int, default=0, help="blocks (on the CPU: threads) per call; 0: the library chooses (default)"
    )
    parser.add_argument("--calls", type=int, default=3, help="layers in the trace (default: 3)")
    options = parser.parse_args()
    dist.init_process_group()
    layer = Layer(options)
    prepare(layer)
    for _ in range(2):
        layer()
    with moe_a2a.trace(layer.ep) as trace:
        for _ in range(options.calls):
            layer()
    trace.save(options.output)
    if layer.ep.rank == 0:
        print(trace.summary())
        print(f"\nwrote {options.output}; open it in https://ui.perfetto.dev")
    dist.destroy_process_group()
