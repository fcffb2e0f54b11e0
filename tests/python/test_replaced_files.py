"""What commands write replaces the file before it once it is complete.

Before, `bench --json` and the leaderboard emptied the file first: a run that was killed, or whose disk was full, left a part of it
in place of earlier results.
"""

import contextlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from moe_a2a import replaced_files
from moe_a2a.bench.options import is_written
from moe_a2a.leaderboard.record import Board

pytestmark = pytest.mark.cpu
TEXT = "x" * 10_000


@contextlib.contextmanager
def full_disk():
    """Files cannot grow past 4096 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def board(path):
    fields = dict.fromkeys(Board.__dataclass_fields__, "") | {"problem": TEXT, "entries": [], "null": []}
    try:
        Board(**fields).write(path)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("write", [lambda path: is_written(path, TEXT), board], ids=["bench", "leaderboard"])
def test_a_file_that_is_not_finished_does_not_replace_the_one_before(tmp_path, write, capsys):
    path = tmp_path / "results.json"
    path.write_text("before")
    with full_disk():
        assert not write(path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("results.json", "before")]
    assert write(path) and TEXT in path.read_text()
    capsys.readouterr()


@pytest.mark.parametrize("name", ["/proc/results.json", "a_file/results.json", "no_folder/results.json"])
def test_an_error_names_the_file_of_the_caller(tmp_path, name):
    """Regression: it named the file beside it, as in '/proc/results.json.15125.15125'."""
    (tmp_path / "a_file").touch()
    with pytest.raises(OSError) as raised:
        replaced_files.write_text(tmp_path / name, TEXT)
    assert raised.value.filename == str(tmp_path / name)


def test_links_and_devices_are_written_to(tmp_path):
    (tmp_path / "link").symlink_to("file")
    replaced_files.write_text(tmp_path / "link", "words")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "words"
    replaced_files.write_text(Path("/dev/null"), "words")
    assert Path("/dev/null").is_char_device()


def test_stdout_that_is_a_file(tmp_path):
    """Its path is a link on another file system."""
    code = "import pathlib; from moe_a2a import replaced_files as f; f.write_text(pathlib.Path('/dev/stdout'), 'words')"
    with open(tmp_path / "file", "w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True, timeout=120)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "words")]
