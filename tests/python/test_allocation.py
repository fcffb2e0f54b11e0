"""In steady state a step allocates only what it returns: in the core, in PyTorch and in Python.

A child process is started with a counting allocator (count_allocations.c) in front of glibc's. Over 1000 steps of dispatch and
combine on two ranks it counts calls of malloc, operator new and similar functions by the compiled core, tensors made by
PyTorch, bytes that the core clears with memset, and started threads. The interpreter counts Python's
own objects.
"""

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("count_allocations.c")
NUM_STEPS = 1000


def measure(num_tokens, hidden, num_blocks, give_out, num_max_ll_tokens=0, read_view=False, experts=False):
    """Runs in the child. Returns the counts per step of one rank. Both ranks are threads of this process."""
    import ranks
    import torch

    import moe_a2a

    torch.set_num_threads(1)
    counter = ctypes.CDLL(os.environ["LD_PRELOAD"])
    assert counter.watch(b"_core.cpython") == 1
    names = ("allocations", "tensors", "memset_bytes", "threads_started")

    def program(group):
        with moe_a2a.ExpertParallel(
            group, num_experts=16, num_topk=4, hidden=hidden, num_max_tokens_per_rank=128, dtype=torch.bfloat16,
            num_max_ll_tokens=num_max_ll_tokens,
        ) as ep:  # fmt: skip
            x = torch.randn(num_tokens, hidden).bfloat16()
            topk_idx = torch.randint(0, 16, (num_tokens, 4))
            weights = torch.rand(num_tokens, 4)
            y = torch.randn(2 * 128 * 4, hidden).bfloat16()
            w_gate_up, w_down = torch.randn(8, 32, hidden).bfloat16(), torch.randn(8, hidden, 16).bfloat16()
            out = x.new_empty(num_tokens, hidden) if give_out else None

            def steps(number):
                for _ in range(number):
                    handle = ep.dispatch(x, topk_idx, weights, num_blocks=num_blocks)
                    if read_view:
                        handle.recv_x  # noqa: B018
                    if experts:
                        ep.experts(handle, w_gate_up, w_down, fused=True, num_blocks=num_blocks, out=out)
                    else:
                        ep.combine(y, handle, num_blocks=num_blocks, out=out)

            steps(200)
            group.all_gather(None)
            if group.rank == 0:
                gc.collect()
                counter.count(1)
            group.all_gather(None)
            blocks = sys.getallocatedblocks()
            steps(NUM_STEPS)
            group.all_gather(None)
            if group.rank == 0:
                counter.count(0)
            return sys.getallocatedblocks() - blocks

    before = {name: getattr(counter, name)() for name in names}
    python_blocks = max(ranks.run_threads(2, program))
    figures = {name: (getattr(counter, name)() - before[name]) / (2 * NUM_STEPS) for name in names}
    return {**figures, "python_blocks": python_blocks / NUM_STEPS}


@pytest.fixture(scope="module")
def preload(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and glibc to count allocations")
    library = tmp_path_factory.mktemp("allocation") / "count_allocations.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-fno-builtin", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return library


@pytest.fixture(scope="module")
def all_figures(preload):
    """name -> counts of one step; all in one child, since importing PyTorch takes longest."""
    cases = {
        f"{size}, {num_blocks} blocks, {result} result": {
            "num_tokens": num_tokens,
            "hidden": hidden,
            "num_blocks": num_blocks,
            "give_out": result == "given",
        }
        for size, num_tokens, hidden in (("small", 2, 64), ("large", 128, 200))
        for num_blocks in (1, 2)
        for result in ("new", "given")
    }
    cases["LL words, new result"] = {
        "num_tokens": 2,
        "hidden": 64,
        "num_blocks": 2,
        "give_out": False,
        "num_max_ll_tokens": 2,
    }
    cases["experts"] = {**cases["small, 1 blocks, new result"], "experts": True}
    cases["control"] = {**cases["small, 1 blocks, new result"], "read_view": True}
    child = subprocess.run(
        [sys.executable, __file__, json.dumps(cases)],
        env={**os.environ, "LD_PRELOAD": str(preload)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def figures(all_figures):
    return {name: step for name, step in all_figures.items() if name not in ("control", "experts")}


def test_the_counter_sees_one_more_allocation(all_figures):
    """A view of the heap is a tensor object that the core makes, without memory of its own."""
    more = all_figures["control"]["allocations"] - all_figures["small, 1 blocks, new result"]["allocations"]
    assert round(more, 1) >= 1


def test_the_core_allocates_nothing_that_grows(figures):
    # The handle that dispatch returns (its C++ object and its Python holder), and the lists in which pybind11 passes
    # the more than six arguments of dispatch and of combine: four small blocks per step, whatever the sizes.
    assert {name: round(step["allocations"], 1) for name, step in figures.items()} == dict.fromkeys(figures, 4)


def test_no_thread_is_started(figures):
    assert {name: step["threads_started"] for name, step in figures.items()} == dict.fromkeys(figures, 0)


def test_nothing_is_cleared_but_the_counters_of_the_experts(figures):
    """Receivers count LL words, with another counter for each segment and token."""
    cleared = {name: round(step["memset_bytes"]) for name, step in figures.items()}
    assert cleared.pop("LL words, new result") <= 1024
    assert len(set(cleared.values())) == 1 and set(cleared.values()).pop() <= 1024


def test_pytorch_makes_the_result_and_nothing_else(figures):
    made = {name: step["tensors"] for name, step in figures.items()}
    assert made == {name: int(name.endswith("new result")) for name in figures}


def test_experts_allocate_their_results_and_views_of_the_handle(all_figures):
    # Tensors: the results of both products, their counters, and the sums. The core: the handle's two blocks, the argument
    # lists of three calls (one checks the weights), and what keeps the memory behind each of three views.
    step = all_figures["experts"]
    assert (round(step["allocations"], 1), step["tensors"]) == (8, 4)


def test_python_keeps_nothing(all_figures):
    assert max(step["python_blocks"] for step in all_figures.values()) < 0.2


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps({name: measure(**case) for name, case in json.loads(sys.argv[1]).items()}))
