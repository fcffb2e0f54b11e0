"""The programs of examples/ run; each checks its own result and says so."""

import re
import subprocess
import sys
from pathlib import Path

import on_device
import pytest
import torchrun
from torchrun import environment_of_a_user

pytestmark = [on_device.TESTS, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"
ON_TWO_RANKS = ["one_rank_per_gpu.py", "generate.py", "overlap.py", "quickreduce.py", "ddp_codecs.py"]


def run(*command: str) -> str:
    environment = environment_of_a_user()
    result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("example", ON_TWO_RANKS)
def test_on_two_ranks(example, capfd):
    on_device.needs_own_gpus(2)
    if on_device.IS_GPU or example == "one_rank_per_gpu.py":
        said = torchrun.run(EXAMPLES / example, 2)
    else:
        torchrun.run_forked(EXAMPLES / example, 2)
        said = capfd.readouterr().out
    assert all(f"rank {rank}" in said for rank in range(2)), said


@on_device.cpu_only  # each node numbers its GPUs from 0
def test_two_nodes(capfd):
    torchrun.run_forked(EXAMPLES / "two_nodes.py", 4, num_nodes=2)
    said = capfd.readouterr().out
    assert all(f"rank {rank} on cpu of node {rank // 2}" in said for rank in range(4)), said


def test_dead_rank():
    on_device.needs(4)
    said = run(str(EXAMPLES / "dead_rank.py"))
    for rank, new_rank in [(0, 0), (1, 1), (3, 2)]:
        assert f"rank {rank}: now rank {new_rank} of 3, lost ranks (2,), experts [8, 9, 10, 11]" in said, said


@pytest.mark.parametrize(
    ("example", "says"),
    [("ray_actors.py", r"2 actors, largest difference \d"), ("quickreduce.py", r"rank 1: FP16, .*, Q4 gave 2")],
)
def test_under_ray(example, says):
    pytest.importorskip(
        "ray", reason="ray is not installed: it is not a test dependency, since it is larger than PyTorch's CPU build"
    )
    on_device.needs(2)
    assert re.search(says, run(str(EXAMPLES / example)))


@on_device.cpu_only
def test_notebook():
    import nbclient
    import nbformat

    notebook = nbformat.read(EXAMPLES / "threads.ipynb", as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "committed with outputs"
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "rank 3: routes of its experts" in said and "PeerRefusedError: " in said, said


def test_every_example_is_in_the_list_and_in_a_test():
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert programs == {*ON_TWO_RANKS, "two_nodes.py", "dead_rank.py", "ray_actors.py", "threads.ipynb"}
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == programs
