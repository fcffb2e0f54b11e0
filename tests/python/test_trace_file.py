"""The files and their checker: it accepts what is written, and rejects each way to break it."""

import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import synthetic_trace as synthetic

from moe_a2a.__main__ import main
from moe_a2a.tracing import export
from moe_a2a.tracing.check import check_file
from moe_a2a.tracing.file_timeline import to_timeline
from moe_a2a.tracing.merge import merge
from moe_a2a.tracing.overview import WAITING, phases
from moe_a2a.tracing.plot import ENDINGS as PICTURES
from moe_a2a.tracing.reading import read
from moe_a2a.tracing.summary import summarize
from moe_a2a.tracing.timeline import SLICE, busy, merged

pytestmark = pytest.mark.cpu

ENDINGS = [".json", ".json.gz", ".pftrace", ".perfetto-trace"]
PLAN = synthetic.Plan(late_ns=[0, 0, 100_000, 0], slow_send=[1, 4, 1, 1])


@pytest.fixture(scope="module")
def timeline():
    return merge(synthetic.simulate(PLAN), synthetic.configuration(PLAN), combine_row_bytes=128)


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_written_holds_together_and_says_the_same(timeline, tmp_path, ending):
    path = export.save(timeline, tmp_path / f"trace{ending}")
    file = read(path)
    assert check_file(file) == []
    assert len(file.sources) == len(timeline.arrows) > 0
    assert len(file.slices) == len(timeline.slices) + len(timeline.arrows) + len(phases(timeline))
    assert str(summarize(to_timeline(file))) == str(summarize(timeline))
    assert file.about == json.loads(json.dumps(timeline.about))


@pytest.mark.parametrize("ending", ENDINGS[1:3])
def test_the_first_screen_has_the_phases_of_each_rank_and_the_share_of_its_warps_that_wait(timeline, tmp_path, ending):
    file, expected = read(export.save(timeline, tmp_path / f"trace{ending}")), summarize(timeline)
    phase_ns = Counter()
    for s in file.slices:
        if s.track in file.phase_tracks():
            phase_ns[s.name, file.rank_of(s.track)] += s.end_ns - s.begin_ns
    assert phase_ns == {
        (name, rank): ns for name, (times, _) in expected.operation_ns.items() for rank, ns in enumerate(times)
    }
    shares = {file.processes[process]: line for (process, name), line in file.counters.items() if name == WAITING}
    assert sorted(shares) == [f"rank {r}" for r in range(PLAN.num_ranks)]
    kernels = timeline.slices[timeline.kernels()]
    for rank in range(PLAN.num_ranks):
        times, values = (np.array(column) for column in shares[f"rank {rank}"])
        assert values.min() == values[-1] == 0
        # On average over the warps' time in launches, what the summary says.
        own = kernels[kernels["rank"] == rank]
        _, begins, ends = merged(own["block"], own["begin_ns"], own["end_ns"])
        edges = np.append(times, max(times[-1] + 1, ends.max()))
        inside = busy(begins, ends, edges) * np.diff(edges)
        assert (inside * values).sum() / inside.sum() == pytest.approx(100 * expected.wait_share[rank], abs=1)


def test_the_command(timeline, tmp_path, capsys):
    path = str(export.save(timeline, tmp_path / "trace.json.gz"))
    assert main(["trace", path]) == 0
    assert capsys.readouterr().out.strip() == str(summarize(timeline))
    assert main(["trace", path, "--check"]) == 0
    assert "all good" in capsys.readouterr().out
    broken = tmp_path / "broken.json"
    broken.write_bytes(gzip.decompress(Path(path).read_bytes()).replace(b'"ph":"f"', b'"ph":"s"', 1))
    assert main(["trace", str(broken), "--check"]) == 1
    assert "2 sources and 0 sinks" in capsys.readouterr().out
    assert main(["trace", str(tmp_path / "none.json"), "--check"]) == 2
    broken.write_bytes(b"not a trace")
    assert main(["trace", str(broken)]) == 2


def test_output_that_nobody_reads(timeline, tmp_path):
    """`trace FILE | head` ended with "FILE: Broken pipe"."""
    path = export.save(timeline, tmp_path / "trace.json")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "moe_a2a", "trace", str(path)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=240)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_without_slices_is_called_empty(timeline, tmp_path, capsys, ending):
    """Regression: the command took it for a damaged one."""
    empty = dataclasses.replace(timeline, slices=timeline.slices[:0], arrows=timeline.arrows[:0])
    path = str(export.save(empty, tmp_path / f"empty{ending}"))
    for arguments in ([path], [path, "--check"], [path, "--plot", str(tmp_path / "trace.png")]):
        assert main(["trace", *arguments]) == 2
        assert f"{path}: it is empty: it has no slices; pass a complete file" in capsys.readouterr().err


@pytest.mark.parametrize("ending", PICTURES)
def test_the_plot(timeline, tmp_path, ending):
    pytest.importorskip("matplotlib")
    path, picture = export.save(timeline, tmp_path / "trace.pftrace"), tmp_path / f"trace{ending}"
    assert main(["trace", str(path), "--plot", str(picture)]) == 0
    head = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".jpg": b"\xff\xd8\xff"}[ending]
    assert picture.read_bytes().startswith(head)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_rank_of_a_file_stands_before_its_ending(ending):
    """Regression: it stood before the first dot."""
    assert export.path_of_rank(f"a.b/two.v2{ending}", 1) == Path(f"a.b/two.v2.rank1{ending}")


def test_the_folder_is_made(timeline, tmp_path):
    """Regression: rank 0 alone raised FileNotFoundError, and the others waited for its next call."""
    path = tmp_path / "of" / "this run" / "trace.json"
    assert export.save(timeline, path) == path and read(path).slices


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_is_not_finished_does_not_replace_the_one_before(timeline, tmp_path, ending, monkeypatch):
    """A process that died while it saved, or had no space left, had emptied the file; two that saved at once mixed theirs."""
    path = export.save(timeline, tmp_path / f"trace{ending}")
    before = path.read_bytes()

    def fails(write, *parts):
        write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(export, "_writer_for", lambda path: fails)
    with pytest.raises(OSError, match="no space left"):
        export.save(timeline, path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


def test_an_ending_of_no_format_is_refused(timeline, tmp_path):
    with pytest.raises(ValueError, match="json.gz"):
        export.save(timeline, tmp_path / "trace.csv")


def test_waits_of_one_warp_that_end_across_each_other_get_tracks_of_their_own(timeline, tmp_path):
    begins_and_ends = [(0, 100), (10, 60), (20, 80), (20, 90), (60, 70), (80, 100)]
    few = timeline.slices[: len(begins_and_ends)].copy()
    few["rank"] = few["block"] = few["warp"] = few["instant"] = 0
    few["begin_ns"], few["end_ns"] = zip(*begins_and_ends, strict=True)
    for ending in ENDINGS[1:3]:
        path = tmp_path / f"trace{ending}"
        export.save(type(timeline)(few, timeline.arrows[:0], timeline.names, timeline.about), path)
        file = read(path)
        names = {file.tracks[s.track][1] for s in file.slices}
        assert sorted(name for name in names if name.startswith("block"))[:2] == [
            "block 0 warp 0",
            "block 0 warp 0 (2)",
        ]
        assert not [problem for problem in check_file(file) if problem.startswith(("nesting", "times", "names"))]
        assert sorted((s.begin_ns, s.end_ns) for s in file.slices) == sorted(begins_and_ends)


# ---- each way to break a file


@pytest.fixture(scope="module")
def events(timeline, tmp_path_factory):
    path = export.save(timeline, tmp_path_factory.mktemp("trace") / "trace.json")
    return path.read_text()


def first(content, **wanted):
    events = content["traceEvents"]
    return next(e for e in events if all(e.get(k) == v for k, v in wanted.items()))


def overlap(content):
    signal = first(content, ph="X", name="send")
    signal["dur"] += 1000


def drop_a_sink(content):
    content["traceEvents"].remove(first(content, ph="f"))


def double_a_source(content):
    content["traceEvents"].append(dict(first(content, ph="s")))


def shift_a_clock(content):
    for event in content["traceEvents"]:
        if event["pid"] == 1002 and "ts" in event:
            event["ts"] += 5000  # delays rank 2, which the others wait for, by 5 ms


def cross_two_arrows(content):
    one = first(content, ph="s")
    other = next(e for e in content["traceEvents"] if e["ph"] == "s" and e["id"] != one["id"])
    one["id"], other["id"] = other["id"], one["id"]


def lose_a_slice(content):
    content["traceEvents"].remove(first(content, ph="X", name="lists"))


def lose_a_drop(content):
    first(content, ph="i")["args"]["ranks"][1]["records_dropped"] += 1


def unname_a_track(content):
    content["traceEvents"].remove(first(content, ph="M", name="thread_name"))


def unname_a_rank(content):
    content["traceEvents"].remove(first(content, ph="M", name="process_name"))


def turn_a_slice_around(content):
    first(content, ph="X", name="reduce")["dur"] = -1


def leave_a_counter_up(content):
    last = [e for e in content["traceEvents"] if e["ph"] == "C"][-1]
    last["args"] = {key: value + 1 for key, value in last["args"].items()}


def lose_the_metadata(content):
    content["traceEvents"].remove(first(content, ph="i"))


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (overlap, "nesting"),
        (drop_a_sink, "flows"),
        (double_a_source, "flows"),
        (shift_a_clock, "flows"),
        (cross_two_arrows, "flows"),
        (lose_a_slice, "counts"),
        (lose_a_drop, "counts"),
        (unname_a_track, "names"),
        (unname_a_rank, "names"),
        (turn_a_slice_around, "times"),
        (leave_a_counter_up, "counters"),
        (lose_the_metadata, "metadata"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_checker_goes_red(events, tmp_path, harm, kind):
    content = json.loads(events)
    harm(content)
    path = tmp_path / "broken.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    problems = check_file(read(path))
    assert any(problem.startswith(kind) for problem in problems), problems


def test_a_protobuf_with_an_end_too_few_is_red(timeline, tmp_path):
    path = export.save(timeline, tmp_path / "trace.pftrace")
    data = path.read_bytes()
    # The last SLICE_END (TrackEvent.type 9 = 2) becomes a SLICE_BEGIN.
    at = data.rindex(b"\x48\x02")
    path.write_bytes(data[: at + 1] + b"\x01" + data[at + 2 :])
    assert any("never ends" in problem for problem in check_file(read(path)))


def test_a_file_that_is_cut_is_refused(timeline, tmp_path):
    path = export.save(timeline, tmp_path / "trace.pftrace")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="cut"):
        check_file(read(path))


def test_the_record_is_the_exporters():
    assert SLICE.itemsize == 64  # no padding: _core refuses any other layout
