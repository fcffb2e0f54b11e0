"""The tables of measurements on the pages match the committed files: bench/tables.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).parents[2]


def check(root: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, root / "bench/tables.py", "--check"], capture_output=True, text=True, timeout=60
    )


def test_the_pages_say_what_the_files_say():
    done = check(ROOT)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nrun python bench/tables.py"


def test_every_record_is_named_by_a_page():
    """Or by a table: so that a reader finds it, and one that is superseded goes."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = "".join(path.read_text() for path in (*pages, ROOT / "bench/tables.py"))
    records = {path.relative_to(ROOT / "bench/results") for path in (ROOT / "bench/results").glob("*/*")}
    lost = [record for record in records if record.as_posix().removesuffix(".json") not in named]
    assert records and lost == []


def test_a_wrong_figure_is_found(tmp_path):
    for folder in ("bench", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "README.md", tmp_path)
    assert check(tmp_path).returncode == 0
    page = tmp_path / "docs/collectives.md"
    right = page.read_text()
    begin = right.index("| NCCL |")
    digit = next(i for i in range(begin, len(right)) if right[i].isdigit())
    page.write_text(right[:digit] + str((int(right[digit]) + 1) % 10) + right[digit + 1 :])
    done = check(tmp_path)
    assert done.returncode == 1 and "-| NCCL |" in done.stdout, done.stdout
    assert subprocess.run([sys.executable, tmp_path / "bench/tables.py"], timeout=60).returncode == 0
    assert page.read_text() == right
