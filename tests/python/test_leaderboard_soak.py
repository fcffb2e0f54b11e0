"""Case after case in the same processes, each with its own process group: nothing remains of them.

`make soak` runs 100 cases, the test suite a few.
"""

import os
import re

import on_device
import pytest
import rank_programs
from contest_cases import SMALL, SPARSE

from moe_a2a.leaderboard import loading
from moe_a2a.leaderboard.ranks import SubmissionRanks
from moe_a2a.leaderboard.trial import Trial

pytestmark = on_device.TESTS

NUM_CASES = 100 if "MOE_A2A_SOAK_SECONDS" in os.environ else 12
WARM_UP = 6  # cases: every shape twice, each rank in each process
NUM_RANKS = 2
SHAPES = [SPARSE, SMALL, SMALL.with_values(hidden_dim=2880, max_num_tokens=64)]
SLACK_BYTES, BYTES_PER_CASE = 8 << 20, 50_000  # the allocators' arenas; a case's keys in the store
SLACK_GPU_BYTES = 4 << 20  # two of the driver's pages; a heap takes at least one, in every case


@pytest.mark.timeout(600)
def test_cases_leave_nothing_behind(session_seed):
    on_device.needs_own_gpus(NUM_RANKS)
    entry = loading.entry_path("all2all", "expert_parallel")
    shared_files = set(os.listdir("/dev/shm"))
    with SubmissionRanks("all2all", entry, NUM_RANKS, on_device.NAME) as ranks:
        for number in range(NUM_CASES):
            if number == WARM_UP:
                before, own_files = resources_by_pid(ranks), len(os.listdir("/proc/self/fd"))
            case = SHAPES[number % len(SHAPES)].with_values(world_size=NUM_RANKS)
            with Trial(ranks, "all2all", case, session_seed) as trial:
                trial.call(trial.published_inputs(), 60)
                trial.call(trial.secret_inputs(), 60)
        after = resources_by_pid(ranks)
        assert len(os.listdir("/proc/self/fd")) == own_files
    for pid, held in after.items():
        grown = {name: held[name] - before[pid][name] for name in held}
        assert grown["files"] == 0 and grown["threads"] == 0, (grown, before[pid])
        assert grown["gpu_bytes"] <= SLACK_GPU_BYTES, grown
        assert grown["mappings"] <= 4, grown
        assert grown["bytes"] <= SLACK_BYTES + BYTES_PER_CASE * (NUM_CASES - WARM_UP), grown
        print(f"process {pid}: {grown} after {NUM_CASES} cases")
    # Other processes of a test session create files there too; names of ours contain their owner's pid.
    made = set(os.listdir("/dev/shm")) - shared_files
    assert [name for name in made if {str(pid) for pid in after} & set(re.split(r"\D+", name))] == []


def resources_by_pid(ranks: SubmissionRanks) -> dict[int, dict[str, int]]:
    return dict(zip(ranks.pids, ranks.run(rank_programs.resources, limit=30), strict=True))
