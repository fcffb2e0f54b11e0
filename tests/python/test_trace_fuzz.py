"""Trace files are untrusted: any contents are either summarised and checked, or refused with a TraceFileError.

MOE_A2A_FUZZ=10000 damages that many files instead of a few hundred.
"""

from __future__ import annotations

import gzip
import json
import os
import random

import mutations
import pytest
import synthetic_trace as synthetic
from limits import limits

import moe_a2a
from moe_a2a.tracing import export
from moe_a2a.tracing.check import check_file
from moe_a2a.tracing.file_timeline import to_timeline
from moe_a2a.tracing.merge import merge
from moe_a2a.tracing.reading import read
from moe_a2a.tracing.summary import summarize

pytestmark = pytest.mark.cpu

NUM_FILES = int(os.environ.get("MOE_A2A_FUZZ") or 400)
PLANS = [
    synthetic.Plan(num_ranks=2, num_tokens=3, num_calls=2, late_ns=[0, 50_000]),
    synthetic.Plan(num_ranks=4, num_tokens=3, num_calls=1, slow_send=[1, 4, 1, 1]),
]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """(ending, bytes) of small traces in each format."""
    folder = tmp_path_factory.mktemp("intact")
    files = []
    for plan in PLANS:
        timeline = merge(synthetic.simulate(plan), synthetic.configuration(plan), combine_row_bytes=128)
        for ending in (".json", ".json.gz", ".pftrace"):
            files.append((ending, export.save(timeline, folder / f"trace{ending}").read_bytes()))
    return files


def damaged(ending, data, rng):
    if ending == ".pftrace":
        return mutations.damaged_bytes(data, rng)
    text = gzip.decompress(data) if ending == ".json.gz" else data
    kind = rng.randrange(4)
    if kind <= 1:
        text = mutations.damaged_json(text.decode(), rng)
    elif kind == 2:
        text = mutations.damaged_bytes(text, rng)
    packed = gzip.compress(text, 1) if ending == ".json.gz" else text
    return mutations.damaged_bytes(packed, rng) if kind == 3 else packed


def look_at(path) -> str | moe_a2a.TraceFileError:
    """Its summary, or the error, which must name the file."""
    with limits():
        try:
            file = read(path)
            check_file(file)
            return str(summarize(to_timeline(file)))
        except moe_a2a.TraceFileError as error:
            assert str(path) in str(error) and len(str(error)) < 1000 and "\n" not in str(error), str(error)
            return error


def test_damaged_files_are_read_or_refused(intact, tmp_path, session_seed):
    num_refused = 0
    for number in range(NUM_FILES):
        rng = random.Random(f"{session_seed} {number}")
        ending, data = rng.choice(intact)
        path = tmp_path / f"damaged{ending}"
        path.write_bytes(damaged(ending, data, rng))
        try:
            num_refused += isinstance(look_at(path), moe_a2a.TraceFileError)
        except BaseException as error:
            raise AssertionError(f"file {number} of MOE_A2A_SEED={session_seed}: {type(error).__name__}") from error
    assert NUM_FILES / 2 < num_refused < NUM_FILES


@pytest.mark.parametrize("number", range(6))
def test_a_file_cut_anywhere_is_refused(intact, tmp_path, number):
    ending, data = intact[number]
    path = tmp_path / f"cut{ending}"
    path.write_bytes(data)
    whole = look_at(path)
    assert isinstance(whole, str)
    num_refused = 0
    cuts = {*range(0, len(data), max(1, len(data) // 60)), *range(len(data) - 12, len(data) - 4)}
    for kept in cuts:
        path.write_bytes(data[:kept])
        found = look_at(path)
        num_refused += found != whole
        # A summary does not include counters, and a .pftrace cut between two of their samples is still complete.
        assert isinstance(found, moe_a2a.TraceFileError) or (found == whole and ending == ".pftrace"), kept
    assert num_refused > 0.8 * len(cuts)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"\x7fELF\x02\x01", "neither JSON nor"),
        (b"\x1f\x8b\x08", "gzip"),
        (b'{"a": 1}', "traceEvents"),
        (b"[]", "it has no slices"),
        (b"\x0a\x00", "it has no slices"),
        (b'[{"ph": "X", "pid": 1, "tid": 1, "name": "", "ts": 1, "dur": 1}]', "about this trace"),
        (b"\x0a" + b"\xff" * 1000, "10 bytes"),
        (mutations.nested(100_000), "nested"),
        (b'[{"ph": "X", "pid": "firefox", "ts": 1, "dur": 1, "name": "", "tid": 1}]', "event 0.*pid"),
        (b'{"traceEvents": [{"ph": "X", "pid": 1, "tid": 1, "name": "", "ts": NaN, "dur": 1}]}', "NaN"),
        (gzip.compress(bytes(300 << 20), 9), "unpacks"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_foreign_and_hostile_files_are_refused_by_name(tmp_path, content, reason):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with limits(), pytest.raises(moe_a2a.TraceFileError, match=reason) as error:
        to_timeline(read(path))
    assert error.value.path == str(path)


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, "/dev/zero"):
        with pytest.raises(moe_a2a.TraceFileError, match="not a regular file"):
            read(path)


@pytest.fixture
def document(intact):
    return json.loads(intact[0][1])


def test_a_rank_too_many_is_refused(document, tmp_path):
    about = next(event for event in document["traceEvents"] if event["ph"] == "i")["args"]
    about["configuration"]["num_ranks"] = 10**9  # matrices of [R, R] would not fit into any memory
    path = tmp_path / "many.json"
    path.write_text(json.dumps(document))
    with limits(), pytest.raises(moe_a2a.TraceFileError, match=r"configuration\.num_ranks is 1000000000"):
        to_timeline(read(path))
