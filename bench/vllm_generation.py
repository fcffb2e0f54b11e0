#!/usr/bin/env python3
"""Seconds of vLLM's generate() with its own all2all and with the plugin of moe_a2a: data parallel, one rank per GPU.

    python bench/vllm_generation.py [--layers 12] [--cases 8,64,96 ...]

Needs vLLM and moe_a2a built for its PyTorch (docs/vllm.md). The model has the sizes of Qwen3-30B-A3B and made-up weights. Each case
is repeated with other prompts; the first turn also compiles Triton kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ALL2ALLS = {"vLLM's own": "0", "moe_a2a": "1"}  # MOE_A2A_VLLM
CASES = ("8,64,96", "64,128,96", "2,600,2", "2,1500,2", "48,1024,8")
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 40960,
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--cases", nargs="+", default=CASES, help="requests per rank, tokens of a prompt, tokens to generate"
    )
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=900, help="limit for one of the two")
    parser.add_argument("--rank", type=int, nargs=3, help=argparse.SUPPRESS)  # rank, number of ranks, port
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_rank(options: argparse.Namespace) -> None:
    rank, num_ranks, port = options.rank
    os.environ |= {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(num_ranks),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
    from vllm import LLM, SamplingParams

    sizes = {"max_model_len": 2048, "max_num_batched_tokens": 8192, "max_num_seqs": 128}
    how = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    llm = LLM(str(options.folder), enable_expert_parallel=True, **sizes, **how)
    seconds = []
    for case in options.cases:
        num_requests, tokens_in, tokens_out = map(int, case.split(","))
        wanted = SamplingParams(temperature=0, max_tokens=tokens_out, ignore_eos=True, detokenize=False)
        turns = []
        for turn in range(options.turns):
            prompts = [
                {"prompt_token_ids": [(17 * i + 5 * j + 11 * rank + 13 * turn) % 30000 for j in range(tokens_in)]}
                for i in range(num_requests)
            ]
            begin = time.perf_counter()
            llm.generate(prompts, wanted, use_tqdm=False)
            turns.append(time.perf_counter() - begin)
        seconds.append(turns)
    unfinished = options.folder / f"{rank}.part"
    unfinished.write_text(json.dumps(seconds))
    unfinished.rename(options.folder / f"{rank}.json")


def run_all(switch: str, num_ranks: int, options: argparse.Namespace) -> list[list[float]]:
    """Seconds of each turn of each case, those of the slowest rank."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as at_end:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": options.layers}))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        files = [folder / f"{rank}.json" for rank in range(num_ranks)]
        logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
        again = [sys.executable, __file__, *sys.argv[1:], "--folder", name, "--rank"]
        processes = []
        for rank, log in enumerate(logs):
            command = [*again, str(rank), str(num_ranks), str(port)]
            out = at_end.enter_context(log.open("w"))
            environment = os.environ | {"MOE_A2A_VLLM": switch}
            how = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
            processes.append(subprocess.Popen(command, env=environment, **how))
            at_end.callback(end, processes[-1])
        deadline = time.monotonic() + options.seconds
        while not all(file.exists() for file in files):
            if time.monotonic() > deadline or any(process.poll() for process in processes):
                sys.exit("\n".join(f"rank {r}: {log.read_text()[-3000:]}" for r, log in enumerate(logs)))
            time.sleep(0.5)
        ranks = [json.loads(file.read_text()) for file in files]
        return [[max(turn) for turn in zip(*case, strict=True)] for case in zip(*ranks, strict=True)]


def end(process: subprocess.Popen) -> None:
    """With its children: vLLM's processes are slow to end by themselves."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    options = parsed()
    if options.rank:
        run_rank(options)
        time.sleep(options.seconds)  # until all ranks have finished: none may leave the others alone
        return
    import torch

    num_ranks = torch.cuda.device_count()
    if num_ranks < 2:
        sys.exit(f"this machine has {num_ranks} GPUs; two or more are needed")
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="moe_a2a"):
        sys.exit("vLLM would not find the plugin: install moe_a2a, a checkout on PYTHONPATH is not enough")
    seconds = {name: run_all(switch, num_ranks, options) for name, switch in ALL2ALLS.items()}
    print(f"{num_ranks} x {torch.cuda.get_device_name()}, {options.layers} layers; seconds, the slowest rank")
    print("requests per rank, tokens in, out", *seconds, "best / best of vLLM's own", sep=" | ")
    for number, case in enumerate(options.cases):
        turns = [times[number] for times in seconds.values()]
        own, ours = (min(times) for times in turns)
        print(case, *(" ".join(f"{t:.3f}" for t in times) for times in turns), f"{ours / own:.2f}", sep=" | ")


if __name__ == "__main__":
    main()
