"""What commands write replaces the file before it once it is complete.

A command that empties the file first leaves a part of it in place of earlier results if it is killed or the disk is full.
"""

import contextlib
import functools
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic_trace

from moe_a2a.bench.options import is_written
from moe_a2a.demo import plot
from moe_a2a.demo.report import ShapeResult
from moe_a2a.demo.shapes import Traffic
from moe_a2a.files import replaced_files
from moe_a2a.leaderboard.record import Board
from moe_a2a.tracing import export
from moe_a2a.tracing.merge import merge
from moe_a2a.tracing.plot import save_plot

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


@pytest.fixture(scope="module")
def timeline():
    plan = synthetic_trace.Plan()
    return merge(synthetic_trace.simulate(plan), synthetic_trace.configuration(plan), combine_row_bytes=128)


@pytest.mark.parametrize("name", ["text", "trace.json", "trace.json.gz", "trace.pftrace", "picture.png", "picture.svg"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, timeline, name):
    """Regression: 'No space left on device', and nobody knew where. Of a picture the first bytes stayed."""
    path = tmp_path / name
    if path.suffix in (".png", ".svg"):
        pytest.importorskip("matplotlib")
        save = functools.partial(save_plot, path, timeline)
    else:
        text = functools.partial(replaced_files.write_text, path, TEXT)
        save = text if name == "text" else functools.partial(export.save, timeline, path)
    with full_disk(), pytest.raises(OSError) as raised:
        save()
    assert raised.value.filename == str(path) and not list(tmp_path.iterdir())


def test_a_demo_without_room_for_its_plot_has_its_verdict(tmp_path):
    """Regression: the error of the plot ended the demo before the line that says whether its checks passed."""
    pytest.importorskip("matplotlib")
    shape = ShapeResult("shape", np.ones(3), np.ones(3), Traffic(1, 1, 1), equal=True, baseline_close=True)
    with full_disk():
        reason = plot.save(tmp_path / "demo.png", {"model": np.ones((2, 4))}, [shape])
    assert reason == f"{tmp_path}/demo.png cannot be written: File too large" and not list(tmp_path.iterdir())


def test_links_and_devices_are_written_to(tmp_path):
    (tmp_path / "link").symlink_to("file")
    replaced_files.write_text(tmp_path / "link", "words")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "words"
    replaced_files.write_text(Path("/dev/null"), "words")
    assert Path("/dev/null").is_char_device()


def test_stdout_that_is_a_file(tmp_path):
    """Its path is a link on another file system."""
    code = "import pathlib; from moe_a2a.files import replaced_files as f; f.write_text(pathlib.Path('/dev/stdout'), 'words')"
    with open(tmp_path / "file", "w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True, timeout=120)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "words")]
