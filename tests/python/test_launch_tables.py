"""Launch tables are files that people edit: errors name the file and the place in it.

MOE_A2A_FUZZ=2000 damages that many tables instead of a few hundred.
"""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import mutations
import platformdirs
import pytest
import torch
from limits import limits

import moe_a2a
from moe_a2a.tables import launch_tables, tuned_files
from moe_a2a.tables.launch_tables import LaunchStep, TunedTable

pytestmark = pytest.mark.cpu

NUM_TABLES = int(os.environ.get("MOE_A2A_FUZZ") or 300)
TABLES = [
    TunedTable(64, "float32", (LaunchStep(4, 1, 2), LaunchStep(16, 2, 3), LaunchStep(64, 3, 4))),
    TunedTable(7168, "bfloat16", (LaunchStep(8, 2, 2),)),
]


def table(hidden=64, dtype="float32", steps=((8, 1, 1),)):
    return {"tables": [{"hidden": hidden, "dtype": dtype, "steps": steps}]}


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (table(hidden=0), r"tables\[0\]\.hidden is 0"),
        (table(hidden="64"), r"tables\[0\]\.hidden is '64'"),
        (table(hidden=True), r"tables\[0\]\.hidden is True"),
        (table(hidden=64.0), r"tables\[0\]\.hidden is 64\.0"),
        (table(hidden=float("inf")), "Infinity"),
        (table(hidden=10**400), r"tables\[0\]\.hidden is 1000"),
        (table(dtype="nn"), r"tables\[0\]\.dtype is 'nn', not one of float32"),
        (table(dtype=None), r"tables\[0\]\.dtype is None"),
        (table(steps=[]), r"tables\[0\]\.steps is \[\]"),
        (table(steps=[[8, 1]]), r"tables\[0\]\.steps\[0\] is \[8, 1\], not \[max_tokens"),
        (table(steps=[[8, 1, 0]]), r"tables\[0\]\.steps\[0\]\[2\] is 0"),
        (table(steps=[[8, 1, 1], [8, 2, 2]]), r"tables\[0\]\.steps\[1\].*more than 8 tokens"),
        ({"tables": [{**table()["tables"][0], "topk": 0}]}, r"tables\[0\]\.topk is 0"),
        (table(steps={"8": 1}), r"tables\[0\]\.steps is \{'8': 1\}, not an array"),
        ({"tables": [{"dtype": "float32", "steps": []}]}, r"tables\[0\]\.hidden is missing"),
        ({"tables": []}, "no table"),
        ({"tables": 5}, "tables is 5, not an array"),
        ({}, "tables is missing"),
        ([], "the document is"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(tmp_path, content, place):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"launch table {path}: .*{place}"):
        launch_tables.read(path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", mutations.nested(100_000), b'{"tables": [', b"9" * 10_000])
def test_what_is_no_json_is_named(tmp_path, content):
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with limits(), pytest.raises(ValueError, match=rf"launch table {path}: "):
        launch_tables.read(path)


def test_what_is_no_file_is_refused(tmp_path):
    for path, reason in ((tmp_path, "not a regular file"), ("/dev/zero", "not a regular"), ("missing.json", "No such")):
        with pytest.raises(ValueError, match=f"launch table {path}: .*{reason}"):
            launch_tables.in_effect(torch.device("cpu"), 2, 64, torch.float32, 2, path)


def test_damaged_tables_are_used_or_refused(tmp_path, session_seed):
    """By the constructor: the core accepts whatever was read, also scaled to rows of another length."""
    path = tmp_path / "table.json"
    path.unlink(missing_ok=True)
    for tuned in TABLES:
        launch_tables.write(path, {"machine": "none"}, tuned)
    intact = path.read_text()
    (group,) = moe_a2a.thread_group(1)
    num_refused = 0
    for number in range(NUM_TABLES):
        rng = random.Random(f"{session_seed} {number}")
        harm = mutations.damaged_json if rng.random() < 0.7 else mutations.damaged_bytes
        path.write_bytes(harm(intact if harm is mutations.damaged_json else intact.encode(), rng))
        sizes = {"num_experts": 4, "num_topk": 2, "hidden": rng.choice((1, 64, 7168)), "num_max_tokens_per_rank": 8}
        try:
            with limits(), moe_a2a.ExpertParallel(group, **sizes, device="cpu", launch_table=path) as ep:
                assert min(ep.blocks_for(8)) >= 1
        except ValueError as error:
            assert str(error).startswith(f"launch table {path}: ") and len(str(error)) < 1000, str(error)
            num_refused += 1
        except BaseException as error:
            raise AssertionError(f"table {number} of MOE_A2A_SEED={session_seed}: {type(error).__name__}") from error
    assert 0 < num_refused < NUM_TABLES


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The user's folder and the package's, and a GPU named h200."""
    monkeypatch.setattr(tuned_files, "OWN", tmp_path / "cache" / "tuned")
    monkeypatch.setattr(tuned_files, "SHIPPED", tmp_path / "package" / "tuned")
    monkeypatch.setattr(tuned_files.devices, "short_name", lambda device: "h200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.delenv("MOE_A2A_LAUNCH_TABLE", raising=False)


def test_a_table_of_this_machine_comes_before_the_shipped_one(folders):
    def origin(num_ranks):
        return launch_tables.in_effect(torch.device("cuda"), num_ranks, 64, torch.bfloat16, 2)[1]

    assert origin(4) == "no table, the model"
    for folder in (tuned_files.SHIPPED, tuned_files.OWN):
        launch_tables.write(folder / "h200_4.json", {}, TunedTable(64, "bfloat16", (LaunchStep(8, 16, 24),)))
        assert origin(4).startswith(f"{folder / 'h200_4.json'}, hidden 64")
        assert origin(2) == "no table, the model"
    assert launch_tables.in_effect(torch.device("cpu"), 4, 64, torch.bfloat16, 2) == (
        [],
        "no table, one thread per call",
    )


def test_a_cache_that_this_user_may_not_look_into(folders, tmp_path, monkeypatch):
    """Regression: Path.exists() raises if it cannot tell, as below another user's home directory, and no object could be made."""
    monkeypatch.setattr(tuned_files, "OWN", tmp_path / ("n" * 300))  # cannot tell, not even as root
    with pytest.raises(OSError, match="too long"):
        tuned_files.OWN.exists()
    origin = launch_tables.in_effect(torch.device("cuda"), 4, 64, torch.bfloat16, 2)[1]
    assert origin == "no table, the model"


def test_a_damaged_table_of_this_machine_is_to_be_removed(folders):
    """Regression: the error only said to run `tune`, which makes an ExpertParallel and so failed with the same error."""
    path = launch_tables.own_file(torch.device("cuda"), 4)
    path.parent.mkdir(parents=True)
    path.write_text('{"tables": [')
    words = f"{path}: it is not JSON.*; name a file that `python -m moe_a2a tune` has written, or remove this one"
    with pytest.raises(ValueError, match=words):
        launch_tables.in_effect(torch.device("cuda"), 4, 64, torch.bfloat16, 2)


def test_blocks_grow_as_tokens_go_to_fewer_ranks(folders):
    """In batches that go as rows. With 4 ranks and 8 experts per token a token goes to 3.6 ranks, with 1 to one rank."""
    steps = LaunchStep(64, 112, 112), LaunchStep(1024, 32, 48), LaunchStep(8192, 16, 24)
    path = tuned_files.SHIPPED / "h200_4.json"
    launch_tables.write(path, {}, TunedTable(64, "bfloat16", steps))

    def found(num_topk, hidden=64):
        return launch_tables.in_effect(torch.device("cuda"), 4, hidden, torch.bfloat16, num_topk)

    assert found(8) == (list(steps), f"{path}, hidden 64 bfloat16 top-8")
    assert found(16) == (list(steps), f"{path}, hidden 64 bfloat16 top-8, scaled")
    assert found(1)[0] == [steps[0], LaunchStep(1024, 115, 132), LaunchStep(8192, 58, 86)]
    assert found(2, 128)[0] == [LaunchStep(32, 112, 112), LaunchStep(512, 66, 99), LaunchStep(4096, 33, 49)]
    measured = TunedTable(64, "bfloat16", (LaunchStep(8, 5, 6),), topk=1)
    launch_tables.write(path, {}, measured)
    assert launch_tables.read(path) == [TunedTable(64, "bfloat16", steps), measured]
    assert found(1) == ([LaunchStep(8, 5, 6)], f"{path}, hidden 64 bfloat16 top-1")
    assert found(8)[0] == list(steps)


def test_the_model_of_a_gpu_without_a_table():
    """Rows of 14 KiB, from 4 ranks with 8 choices to 3.6 ranks each. Dispatch: 64 blocks; up to 128 tokens a warp of 16 per
    KiB and per token's choices, and 9 blocks. Combine: a block per 4 KiB that arrive, from 129 tokens on per 32 KiB."""
    assert launch_tables.model(4, 8, 14336, 132) == [
        (4, 64, 64),
        (8, 64, 101),  # 8 * 14336 * 3.6 / 4096
        (32, 64, 132),
        (64, 69, 132),  # 64 * (14 + 1) / 16 + 9
        (128, 129, 132),
        (16384, 64, 132),
    ]
    assert launch_tables.model(1, 8, 14336, 132)[-2] == (256, 64, 112)  # 256 * 14336 / 32768


def test_tune_writes_into_the_users_cache():
    cache = platformdirs.user_cache_path("moe_a2a", appauthor=False)
    assert launch_tables.own_file(torch.device("cpu"), 4) == cache / "tuned" / "cpu_4.json"
    assert not cache.is_relative_to(Path(moe_a2a.__file__).parent)
