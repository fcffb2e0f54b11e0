"""The examples of README and docs run: a page's Python blocks, in order, form one program of two ranks. On GPUs
torchrun starts them.

What a page assumes (a model, for example) is in a hidden comment before the block:
<!-- hidden
model = ...
-->
"""

import re
import subprocess
import sys
from pathlib import Path

import on_device
import pytest
import torchrun

import moe_a2a
from moe_a2a import arguments

pytestmark = on_device.TESTS

ROOT = Path(__file__).parents[2]
NUM_RANKS = 2
DYING_RANKS = {"faults.md": {1}}
PAGES = sorted(
    page for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")) if page.exists()
)
BLOCK = re.compile(r"^```python\n(.*?)^```$|^<!-- hidden\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
FENCED_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SOURCE_FILE = re.compile(r"`([\w/.]+\.(?:h|cpp|py))`")
WRITTEN_BY_THE_READER = {"submission.py", "example.py"}
ATTRIBUTE = re.compile(r"(?<![\w./])(?<!from )(?<!import )moe_a2a\.(\w+)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
SECTION_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
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
    if on_device.IS_GPU:
        torchrun.run(example, NUM_RANKS)
    else:
        torchrun.run_forked(example, NUM_RANKS, mortal=DYING_RANKS.get(page.name, set()))


def test_readme_has_examples():
    shown = [block for block, _ in BLOCK.findall((ROOT / "README.md").read_text()) if block]
    assert len(shown) >= 3 and "ExpertParallel" in shown[0]


@on_device.cpu_only
def test_the_limits_in_readme_are_those_of_the_code():
    text = (ROOT / "README.md").read_text()
    ranks, tokens = (
        int(n.replace(",", "")) for n in re.findall(r"At most (\d+) ranks, ([\d,]+) tokens per rank", text)[0]
    )
    assert ranks == arguments.MAX_RANKS
    with pytest.raises(ValueError, match=f"num_max_tokens_per_rank={tokens + 1} > {tokens};"):
        moe_a2a.ExpertParallel(
            moe_a2a.thread_group(1)[0],
            num_experts=1,
            num_topk=1,
            hidden=16,
            num_max_tokens_per_rank=tokens + 1,
            device="cpu",
        )


@on_device.cpu_only
@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_of_a_page_lead_somewhere(page):
    lost = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert lost == []


def anchors_of(page: Path) -> set[str]:
    """Those that GitHub gives to a page's headings."""
    headings = HEADING.findall(FENCED_BLOCK.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@on_device.cpu_only
@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_to_a_section_find_its_heading(page):
    links = [link for link in SECTION_LINK.findall(page.read_text()) if not link[0] or link[0].endswith(".md")]
    lost = [
        f"{name}#{anchor}" for name, anchor in links if anchor not in anchors_of(page.parent / name if name else page)
    ]
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
    shell = [block for language, block in FENCED_BLOCK.findall(text) if language in ("", "sh", "bash", "console")]
    commands = "\n".join([*shell, *re.findall(r"`([^`\n]+)`", text)])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", commands)) <= targets
    assert set(re.findall(r"(?:python -m moe_a2a|moe-a2a) ([a-z]\w*)", commands)) <= set(COMMANDS)
