"""Dispatches and combines, collectives and products of tests/python on a few GPUs, for compute-sanitizer:
gpu_ranks.py <number of ranks>

Starts each rank as a program of its own (a tool that follows processes loses those that are only forked), on a GPU of
its own; MOE_A2A_DEVICE=cpu runs them without. Small, since a checked kernel takes many times as long.
"""

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

SEEDS = range(100, 112)
NUM_COLLECTIVES = 200
LIMIT = 280  # seconds


def main(num_ranks):
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        arguments = [sys.executable, __file__, str(num_ranks), f"{folder}/store"]
        processes = [subprocess.Popen([*arguments, str(rank)]) for rank in range(num_ranks)]
        deadline = time.monotonic() + LIMIT
        try:
            while time.monotonic() < deadline:
                codes = [process.poll() for process in processes]
                if any(codes):  # the others wait for it
                    return 1
                if None not in codes:
                    return 0
                time.sleep(0.1)
            print(f"gpu_ranks: not done in {LIMIT} s", file=sys.stderr)
            return 1
        finally:
            for process in processes:
                process.kill()  # no effect on one that has ended


def run_rank(num_ranks, store, rank):
    sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["MOE_A2A_TEST_DEVICE"] = os.environ.get("MOE_A2A_DEVICE", "cuda")
    import collective_soak
    import ranks
    import test_dispatch_combine
    import test_grouped_gemm
    import torch.distributed as dist

    ranks.take_device(rank)
    test_dispatch_combine.TIMEOUT = collective_soak.TIMEOUT = float(LIMIT)
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=limit)
    test_dispatch_combine.run_cases(dist.group.WORLD, SEEDS, num_ranks)
    collective_soak.run(dist.group.WORLD, SEEDS[0], NUM_COLLECTIVES)
    for size in test_grouped_gemm.SIZES:
        test_grouped_gemm.test_any_size(size, "swiglu", SEEDS[0])
    dist.barrier()
    print(f"gpu_ranks: rank {rank} of {num_ranks}: all results right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(main(int(sys.argv[1])))
    run_rank(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
