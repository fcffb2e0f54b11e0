"""The grouped GEMM on one GPU beside torch._grouped_mm, a plain product of the same operations, and reading the weights.

    python profiling/measure_grouped_gemm.py [--experts 64] [--hidden 7168] [--intermediate 2048] [--rows 16,512,1024]

`rows` is the mean per expert: "balanced" gives each exactly that many, "random" those of tokens that choose 8 of four
times as many experts. Mean over --milliseconds of back-to-back calls, after as long a warm-up: large products are limited by
power, so a single call would run at another clock. _grouped_mm gets its rows gathered; ours gathers them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import moe_a2a

NUM_TOPK = 8


def microseconds(call: Callable[[], object], milliseconds: float) -> float:
    def run(num_calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / num_calls

    call()
    num_calls = max(3, int(milliseconds * 1000 / run(1)))
    run(num_calls)
    return run(num_calls)


def counts_of(rows: int, num_experts: int, routing: str) -> list[int]:
    if routing == "balanced":
        return [rows] * num_experts
    num_tokens = rows * 4 * num_experts // NUM_TOPK
    choices = torch.rand(num_tokens, 4 * num_experts).topk(NUM_TOPK, dim=1).indices
    return torch.bincount(choices.flatten(), minlength=4 * num_experts)[:num_experts].tolist()


def random_weights(num_experts: int, columns: int, hidden: int) -> torch.Tensor:
    w = torch.empty(num_experts, columns, hidden, dtype=torch.bfloat16, device="cuda")
    for expert in w:
        expert.copy_(torch.randn(columns, hidden, device="cuda") * hidden**-0.5)
    return w


def measure(w: torch.Tensor, activation: str | None, counts: list[int], milliseconds: float) -> dict[str, float]:
    num_experts, columns, hidden = w.shape
    num_routes = sum(counts)
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    x = torch.randn(max(num_routes // 2, max(counts)), hidden, device="cuda").bfloat16()
    row_index = torch.cat([torch.randperm(x.shape[0], device="cuda")[:count] for count in counts]).int()
    gathered, first, read = x[row_index.long()], w[0].t(), w.view(torch.int32)
    calls = {
        "ours, gathers": lambda: moe_a2a.grouped_gemm(x, row_index, offsets, w, activation),
        "ours, in place": lambda: moe_a2a.grouped_gemm(gathered, None, offsets, w, activation),
        "_grouped_mm": lambda: torch._grouped_mm(gathered, w.transpose(1, 2), offs=offsets[1:]),
        "plain product": lambda: torch.mm(gathered, first),
        "reading w": lambda: read.amax(),
    }
    return {name: microseconds(call, milliseconds) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--rows", default="16,512,1024", help="mean rows per expert, separated by commas")
    parser.add_argument("--milliseconds", type=float, default=150)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, {args.experts} experts, bf16; us (TFLOP/s)")
    products = {
        "1, SwiGLU": (2 * args.intermediate, args.hidden, "swiglu"),
        "2": (args.hidden, args.intermediate, None),
    }
    for product, (columns, hidden, activation) in products.items():
        w = random_weights(args.experts, columns, hidden)
        for rows in map(int, args.rows.split(",")):
            for routing in ("balanced", "random"):
                counts = counts_of(rows, args.experts, routing)
                measured = measure(w, activation, counts, args.milliseconds)
                work = 2 * sum(counts) * columns * hidden
                shown = ", ".join(f"{name} {us:.0f} ({work / us / 1e6:.0f})" for name, us in measured.items())
                print(f"product {product}, {rows} rows {routing}: {shown}", flush=True)
        del w


if __name__ == "__main__":
    main()
