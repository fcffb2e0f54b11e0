"""Tables of Collectives: which step a call uses, files edited by hand, and `tune collectives` itself."""

import json

import pytest
import ranks
import torch

import moe_a2a
from moe_a2a.__main__ import main
from moe_a2a.tables import collective_tables, launch_tables, tuned_files
from moe_a2a.tables.collective_tables import LARGEST, CollectiveStep, CollectiveTable, Tables
from moe_a2a.tune import collectives

pytestmark = pytest.mark.cpu

STEPS = (CollectiveStep(100, "one_shot", 2), CollectiveStep(1000, "two_shot", 0), CollectiveStep(4000, "ring", 1))


def content(kind="all_reduce", dtype="float32", steps=((8, "one_shot", 1),), codecs=None, most_in_words=0, **others):
    table = {"kind": kind, "dtype": dtype, "steps": steps, "codecs": codecs or {}, "most_in_words": most_in_words}
    return {"tables": [table | others]}


def test_the_step_of_a_size():
    table = CollectiveTable("all_reduce", "float32", STEPS)
    for nbytes, step in [(0, 0), (100, 0), (101, 1), (1000, 1), (1001, 2), (4000, 2), (1 << 40, 2)]:
        assert table.step(nbytes) is STEPS[step]


def test_the_table_of_a_dtype():
    """Its own, else that of a dtype of the same size, else any of the kind."""
    tables = [CollectiveTable("all_reduce", dtype, STEPS) for dtype in ("float16", "float32")]
    tables += [CollectiveTable("all_gather", "float32", STEPS)]
    chosen = Tables(tables, "here")
    assert chosen.of("all_reduce", "float32") is tables[1]
    assert chosen.of("all_reduce", "bfloat16") is tables[0]
    assert chosen.of("all_gather", "float16") is tables[2]


@pytest.mark.parametrize(("device", "num_ranks", "most"), [
    ("cpu", 2, 8 << 10), ("cpu", 8, 8 << 10), ("cuda", 1, LARGEST), ("cuda", 2, 6 << 20),
    ("cuda", 3, 3 * 1_900_000 // 2),
    ("cuda", 4, 4 * 1_900_000 // 6), ("cuda", 8, 8 * 1_900_000 // 42),
])  # fmt: skip
def test_the_model_of_untuned_machines(device, num_ranks, most):
    tables = Tables(collective_tables.model(device, num_ranks), "model")
    table = tables.of("all_reduce", "float16")
    assert table.step(most).algorithm == "one_shot"
    assert most == LARGEST or table.step(most + 1).algorithm == "two_shot"
    assert (table.codecs == {}) == (device == "cpu")
    assert table.most_in_words == (0 if device == "cpu" else (32 << 10) // max(num_ranks - 1, 1))
    assert all(tables.of(kind, "float32").step(5).num_blocks == 0 for kind in collective_tables.KINDS)


@pytest.mark.parametrize(("written", "place"), [
    (content(kind="broadcast"), r"tables\[0\]\.kind is 'broadcast', not one of all_reduce"),
    (content(dtype="int8"), r"tables\[0\]\.dtype is 'int8'"),
    (content(steps=[]), r"tables\[0\]\.steps is \[\], not an array of steps"),
    (content(steps=[[8, "one_shot"]]), r"steps\[0\] is .*, not \[max_nbytes, algorithm, num_blocks\]"),
    (content(steps=[[8, "auto", 1]]), r"steps\[0\]\[1\] is 'auto', not one of one_shot"),
    (content(steps=[[8, "one_shot", -1]]), r"steps\[0\]\[2\] is -1"),
    (content(steps=[[8, "one_shot", 1], [8, "two_shot", 1]]), r"steps\[1\] is .*, not a step for more than 8 bytes"),
    (content(codecs={"q5": 1}), r"codecs is \{'q5': 1\}, not an object with some of fp8"),
    (content(codecs={"q4": -1}), r"codecs\.q4 is -1"),
    (content(most_in_words=32769), r"most_in_words is 32769, not an integer from 0 to 32768"),
    (content(symmetric=[[8, "direct", -1]]), r"symmetric\[0\]\[2\] is -1"),
    (content(symmetric=[[8, "indirect", 0]]), r"symmetric\[0\]\[1\] is 'indirect', not one of one_shot, .*, direct"),
    (content(steps=[[8, "direct", 0]]), r"steps\[0\]\[1\] is 'direct', not one of one_shot"),
    ({"tables": []}, "it holds no table"),
    ({}, "tables is missing"),
])  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(tmp_path, written, place):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=rf"table of collectives .*table\.json: .*{place}.*tune collectives"):
        collective_tables.in_effect(torch.device("cpu"), 2, path)
    (group,) = moe_a2a.thread_group(1)
    with pytest.raises(ValueError, match=place):
        moe_a2a.Collectives(group, table=path, device="cpu")


def test_writing_adds_to_a_file(tmp_path):
    path = tmp_path / "new" / "table.json"
    tables = [CollectiveTable("all_reduce", dtype, STEPS, {"q4": 7}, 9, STEPS[:2]) for dtype in ("float32", "float16")]
    collective_tables.write(path, {"machine": "none"}, tables[:1])
    collective_tables.write(path, {"machine": "none"}, tables[1:])
    assert collective_tables.read(path) == tables
    newer = CollectiveTable("all_reduce", "float32", STEPS[:1])
    collective_tables.write(path, {}, [newer])
    assert collective_tables.read(path) == [newer, tables[1]]


def test_a_file_from_before_ll_words_and_symmetric_tensors(tmp_path):
    """Its figures were measured without them."""
    path, written = tmp_path / "table.json", content()
    del written["tables"][0]["most_in_words"]
    path.write_text(json.dumps(written))
    (table,) = collective_tables.read(path)
    assert (table.most_in_words, table.symmetric) == (0, ())


def test_where_tables_come_from(tmp_path, monkeypatch):
    """The file that is named, this machine's own, the shipped one, the model; the model supplies what a file lacks."""
    monkeypatch.setattr(tuned_files, "OWN", tmp_path / "own")
    monkeypatch.setattr(tuned_files, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tuned_files.devices, "short_name", lambda device: "h200")
    monkeypatch.delenv("MOE_A2A_COLLECTIVE_TABLE", raising=False)
    gpu = torch.device("cuda", 0)
    table = CollectiveTable("all_reduce", "float32", STEPS)
    origins = [collective_tables.in_effect(gpu, 4).origin]
    for folder in ("shipped", "own"):
        collective_tables.write(tmp_path / folder / "collectives_h200_4.json", {}, [table])
        origins.append(collective_tables.in_effect(gpu, 4).origin)
    for file in ("environment", "argument"):
        collective_tables.write(tmp_path / file, {}, [table])
    monkeypatch.setenv("MOE_A2A_COLLECTIVE_TABLE", str(tmp_path / "environment"))
    origins.append(collective_tables.in_effect(gpu, 4).origin)
    tables = collective_tables.in_effect(gpu, 4, tmp_path / "argument")
    origins.append(tables.origin)
    names = ["shipped/collectives_h200_4.json", "own/collectives_h200_4.json", "environment", "argument"]
    assert origins == ["no table, the model", *(str(tmp_path / name) for name in names)]
    assert tables.of("all_reduce", "bfloat16") == table
    assert tables.of("all_gather", "bfloat16").steps == (CollectiveStep(LARGEST, "two_shot", 0),)


class Spy:
    """Wraps the core and records what a call has requested."""

    def __init__(self, core, asked):
        self._core, self._asked = core, asked

    def __getattr__(self, name):
        real = getattr(self._core, name)
        if name not in collective_tables.KINDS:
            return real
        return lambda *arguments: (self._asked.append((name, *arguments[1:-1])), real(*arguments))[1]


def calls_program(group, path, seed: int) -> None:
    """The table decides if the caller does not; results do not depend on it."""
    with moe_a2a.Collectives(group, table=path, device="cpu", timeout=20) as coll:
        asked: list[tuple] = []
        core, coll._core = coll._core, Spy(coll._core, asked)
        generator = torch.Generator().manual_seed(seed + coll.rank)

        def call(count, **how):
            x = torch.randint(-9, 9, (count,), generator=generator).float()
            out = coll.all_reduce(x, **how)
            assert torch.equal(out, coll.all_reduce(x, algorithm="recursive_doubling"))
            algorithm, codec, as_words, num_blocks = asked[-2][2:]
            return moe_a2a.collectives.ALGORITHMS[algorithm], codec, as_words, num_blocks

        assert call(25) == ("one_shot", 0, False, 2)
        assert call(15) == ("one_shot", 0, True, 2) and call(16) == ("one_shot", 0, False, 2)
        assert call(26) == ("two_shot", 0, False, 0)
        assert call(1000) == call(5000) == ("ring", 0, False, 1)
        assert call(15, algorithm="two_shot") == ("two_shot", 0, False, 0)  # the table's blocks are one_shot's
        assert call(25, algorithm="one_shot") == ("one_shot", 0, False, 2)
        assert call(15, algorithm="one_shot") == ("one_shot", 0, True, 2)
        x = torch.full((64,), 2.0)
        coll.all_reduce(x, codec="auto")
        assert asked[-1][2:] == (2, 4, False, 0)  # q4, from 100 bytes on
        coll.all_reduce(x[:20], codec="auto")
        assert asked[-1][2:] == (1, 0, False, 2)
        coll.reduce_scatter(x)
        assert asked[-1] == ("reduce_scatter", 0, None, 0)  # of the model
        coll.all_gather(x[:7])
        assert asked[-1] == ("all_gather", None, 3)
        coll._core = core


def test_shipped_tables():
    """A table that cannot be read would refuse every object on its machine."""
    files = sorted(tuned_files.SHIPPED.glob("*.json"))
    assert any(file.name.startswith(collective_tables.PREFIX) for file in files) and len(files) > 1
    for file in files:
        of_collectives = file.name.startswith(collective_tables.PREFIX)
        tables = collective_tables.read(file) if of_collectives else launch_tables.read(file)
        assert tables
        about = json.loads(file.read_text())["about"]
        assert file.stem.removeprefix(collective_tables.PREFIX) == about["name"]
        assert about["versions"]["commit"] and about["ranks"] == int(file.stem.rpartition("_")[2])


def test_calls_go_by_the_table(tmp_path, session_seed):
    path = tmp_path / "table.json"
    all_gather = CollectiveTable("all_gather", "float16", (CollectiveStep(1000, "two_shot", 3),))
    all_reduce = CollectiveTable("all_reduce", "float32", STEPS, {"q4": 100}, most_in_words=60)
    collective_tables.write(path, {}, [all_reduce, all_gather])
    ranks.run_threads(2, calls_program, path, session_seed)


def test_one_shot_beyond_the_workspace_is_two_shot():
    (group,) = moe_a2a.thread_group(1)
    with moe_a2a.Collectives(group, 4096, device="cpu") as coll:
        table = CollectiveTable("all_reduce", "bfloat16", (CollectiveStep(LARGEST, "one_shot", 0),))
        x = torch.empty(coll._core.share_nbytes + 1, dtype=torch.uint8)
        assert coll._step_of(table, x[:-1], None).algorithm == "one_shot"
        assert coll._step_of(table, x, None).algorithm == "two_shot"


def test_symmetric_tensors_have_steps_of_their_own():
    """Without such, they go direct where the table says two_shot. Both tensors must be symmetric."""
    (group,) = moe_a2a.thread_group(1)
    with moe_a2a.Collectives(group, symmetric_nbytes=5000, device="cpu") as coll:
        x, other = coll.empty(5000, dtype=torch.uint8), torch.empty(5000, dtype=torch.uint8)
        steps = (
            CollectiveStep(1000, "one_shot", 0),
            CollectiveStep(2000, "two_shot", 0),
            CollectiveStep(LARGEST, "ring", 0),
        )
        own = (
            CollectiveStep(1500, "direct", 3),
            CollectiveStep(2500, "two_shot", 2),
            CollectiveStep(LARGEST, "one_shot", 0),
        )
        for symmetric, expected in [
            ((), [("one_shot", 0), ("direct", 0), ("ring", 0)]),
            (own, [("direct", 3), ("two_shot", 2), ("one_shot", 0)]),
        ]:
            table = CollectiveTable("all_reduce", "bfloat16", steps, symmetric=symmetric)
            assert [coll._step_of(table, x[:n], x[:n])[1:] for n in (1000, 2000, 3000)] == expected
            for one, out in [(x, other), (other, x), (x, None), (other, other)]:
                one, out = one[:2000], None if out is None else out[:2000]
                assert coll._step_of(table, one, out) == steps[1]


def test_one_shot_of_symmetric_tensors_beyond_the_workspace_is_direct():
    (group,) = moe_a2a.thread_group(1)
    with moe_a2a.Collectives(group, 4096, symmetric_nbytes=1 << 20, device="cpu") as coll:
        x = coll.empty(coll._core.share_nbytes + 1, dtype=torch.uint8)
        steps = (CollectiveStep(LARGEST, "one_shot", 7),)
        table = CollectiveTable("all_reduce", "bfloat16", steps, symmetric=steps)
        assert coll._step_of(table, x[:-1], x[:-1])[1:] == ("one_shot", 7)
        assert coll._step_of(table, x, x)[1:] == ("direct", 0)


def test_what_is_best():
    times = {
        ("one_shot", 0): 10.0,
        ("one_shot", 16): 10.1,
        ("one_shot", 8): 10.3,
        ("two_shot", 0): 9.5,
        ("two_shot", 4): 11.0,
    }
    assert collectives.best(times) == ("two_shot", 0)
    times["one_shot", 32] = 9.4
    assert collectives.best(times) == ("one_shot", 32)
    times["one_shot", 16] = 9.5
    assert collectives.best(times) == ("one_shot", 16)
    steps = [CollectiveStep(1, "one_shot", 0), CollectiveStep(2, "one_shot", 0), CollectiveStep(4, "two_shot", 0)]
    assert tuned_files.merged(steps) == steps[1:]
    faster = [{"fp8": False, "q8": True, "q6": False, "q4": True}, {"fp8": False, "q8": False, "q6": False, "q4": True},
              {"fp8": False, "q8": True, "q6": False, "q4": True}]  # fmt: skip
    assert collectives.worth_it([1, 2, 4], faster) == {"q8": 4, "q4": 1}
    assert collectives.worth_it([1, 2, 4], []) == {}
    assert collectives.most_in_words([1, 2, 4, 8], [True, True, False, True]) == 2
    assert collectives.most_in_words([1, 2], [False, True]) == 0


def test_the_command(tmp_path, capfd):
    path = tmp_path / "table.json"
    how = ["--ranks", "2", "--device", "cpu", "--dtype", "float32", "--output", str(path)]
    assert main(["tune", "collectives", *how, "--sizes", "1024,1048576", "--iterations", "2", "--warm-up", "0"]) == 0
    tables = collective_tables.read(path)
    assert [table.kind for table in tables] == list(collective_tables.KINDS)
    assert all(table.steps[-1].max_nbytes == 1 << 20 for table in tables)
    assert tables[0].steps[-1].algorithm == "two_shot"  # one-shot would need slices
    assert f"tune: {path}" in capfd.readouterr().out
    assert main(["tune", "collectives", *how, "--print"]) == 0
    assert str(path) in capfd.readouterr().out
    path.write_text("{")
    assert main(["tune", "collectives", *how, "--print"]) == 2
    assert "table of collectives" in capfd.readouterr().err


def test_the_device_of_a_table():
    assert tuned_files.chosen_file(None, collective_tables.PREFIX, torch.device("cpu"), 2) is None
