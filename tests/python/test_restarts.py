"""`torchrun --standalone --max-restarts` keeps its store when it starts the ranks again. What those of an earlier attempt had written
was taken for the peers': an ExpertParallel looked for the memory of processes that had ended, and a group of the backend that had
been made on one rank only waited for the others."""

import subprocess
import sys
from pathlib import Path

import on_device
import pytest
import torchrun

pytestmark = on_device.TESTS

PROGRAM = """
import os, signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import moe_a2a

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 1 and attempt == 0:
    raise RuntimeError("before its group is made")
dist.init_process_group("moe_a2a", timeout=timedelta(seconds=20))
subgroup = dist.new_group()
ep = moe_a2a.ExpertParallel(None, num_experts=8, num_topk=2, hidden=64, num_max_tokens_per_rank=16, timeout=20)
coll = moe_a2a.Collectives(subgroup, timeout=20)
for group in (None, subgroup):
    total = torch.ones(4, device=ep.device)
    dist.all_reduce(total, group=group)
    assert torch.equal(coll.all_reduce(total), torch.full_like(total, 4))
x = torch.randn(3, 64, device=ep.device).to(ep.dtype)
handle = ep.dispatch(x, torch.tensor([[0, 5]] * 3, device=ep.device), torch.full((3, 2), 0.5, device=ep.device))
out = ep.combine(handle.recv_x[handle.expert_row_index[: handle.num_routes]], handle)
assert torch.equal(out, x)
if attempt in (1, 2):
    if rank == attempt - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    signal.pause()
dist.destroy_process_group()
Path(f"ended_{rank}").write_text(str(attempt))
"""


@pytest.mark.timeout(200)
def test_ranks_that_torchrun_starts_again(tmp_path: Path):
    on_device.needs(2)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    how = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    ended = subprocess.run(
        [sys.executable, *how, str(program)], env=torchrun.environment_of_a_user(), cwd=tmp_path, capture_output=True, text=True,
        timeout=torchrun.SECONDS,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [(tmp_path / f"ended_{rank}").read_text() for rank in range(2)] == ["3", "3"]
