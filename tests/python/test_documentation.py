"""The examples of README and docs run: a page's Python blocks, in order, form one program of two ranks. On GPUs, and
for README, torchrun starts them; on the CPU they are forked with torchrun's environment, which saves three imports of PyTorch.

What a page assumes (a model, for example) is in a hidden comment before the block:
<!-- hidden
model = ...
-->
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import on_device
import programs
import pytest
import torch
import torch.distributed as dist

from moe_a2a.rank_processes import RankProcesses

pytestmark = on_device.TESTS

ROOT = Path(__file__).parents[2]
NUM_RANKS = 2
UNDER_TORCHRUN = {"README.md", "faults.md"}  # a rank of the second ends without a result
PAGES = sorted(
    page for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")) if page.exists()
)
BLOCK = re.compile(r"^```python\n(.*?)^```$|^<!-- hidden\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
SHELL_BLOCK = re.compile(r"^```(?:sh|bash|console)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SOURCE_FILE = re.compile(r"`([\w/.]+\.(?:h|cpp|py))`")
WRITTEN_BY_THE_READER = {"submission.py", "example.py"}
ATTRIBUTE = re.compile(r"(?<![\w./])(?<!from )(?<!import )moe_a2a\.(\w+)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def program_of(page: Path) -> str:
    return "\n".join(shown or hidden for shown, hidden in BLOCK.findall(page.read_text()))


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("page", [page for page in PAGES if program_of(page)], ids=relative)
def test_the_examples_of_a_page_run(page, tmp_path):
    on_device.needs(NUM_RANKS)
    example = tmp_path / "example.py"
    example.write_text(program_of(page))
    if on_device.IS_GPU or page.name in UNDER_TORCHRUN:
        run_under_torchrun(example)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with RankProcesses(NUM_RANKS, timeout=180, method="forkserver", backend=None, dumps=programs.to_bytes) as ranks:
            ranks.run(as_a_rank_of_torchrun, str(example), store.port, own=[(0,), (1,)], timeout=180)


def run_under_torchrun(example: Path) -> None:
    environment = dict(os.environ)
    if on_device.IS_GPU:
        del environment["MOE_A2A_DEVICE"]  # as a user runs it: the rank finds its GPU
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS))
    command = [sys.executable, *torchrun, example.name]
    result = subprocess.run(command, cwd=example.parent, env=environment, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stdout + result.stderr


def as_a_rank_of_torchrun(report, example, port, rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.chdir(Path(example).parent)
    runpy.run_path(example, run_name="__main__")


def test_readme_has_examples():
    shown = [block for block, _ in BLOCK.findall((ROOT / "README.md").read_text()) if block]
    assert len(shown) >= 3 and "ExpertParallel" in shown[0]


@on_device.cpu_only
@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_of_a_page_lead_somewhere(page):
    lost = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert lost == []


@on_device.cpu_only
@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_source_files_that_a_page_names_exist(page):
    named = set(SOURCE_FILE.findall(page.read_text())) - WRITTEN_BY_THE_READER
    folders = ("csrc", "moe_a2a", "tests", "bench", "examples", "profiling", ".ci")
    lost = [name for name in named if not any(any((ROOT / folder).glob(f"**/{name}")) for folder in folders)]
    assert [name for name in lost if not (ROOT / name).exists()] == []


@on_device.cpu_only
def test_what_a_page_calls_an_attribute_of_the_package_is_one():
    """After `import moe_a2a` in a process of its own; the modules of `integrations` are imported by name."""
    command = [sys.executable, "-c", "import moe_a2a; print(*dir(moe_a2a))"]
    attributes = set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=180).stdout.split())
    named = {(relative(page), name) for page in PAGES for name in ATTRIBUTE.findall(page.read_text())}
    assert {(page, name) for page, name in named if name not in attributes | {"integrations"}} == set()


@on_device.cpu_only
@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_of_a_page_exist(page):
    """`make x` is a target of the Makefile, `python -m moe_a2a x` a command."""
    from moe_a2a.__main__ import COMMANDS

    text = page.read_text()
    commands = "\n".join(SHELL_BLOCK.findall(text)) + "\n".join(re.findall(r"`([^`\n]+)`", text))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", commands)) <= targets
    assert set(re.findall(r"(?:python -m moe_a2a|moe-a2a) ([a-z]\w*)", commands)) <= set(COMMANDS)
