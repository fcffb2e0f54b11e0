"""`leaderboard rank` and its report: the order of entries, the contents of each format, and the location of traces."""

import base64
import dataclasses
import re
import xml.etree.ElementTree
from html.parser import HTMLParser
from pathlib import Path

import contest_cases
import pytest
from contest_cases import changed

from moe_a2a.commands.command_line import UsageError
from moe_a2a.leaderboard import options, plot, rank_command, report
from moe_a2a.leaderboard.record import Board, Entry, Timing, Traffic

pytestmark = pytest.mark.cpu

WRONG = "custom_kernel = lambda data: right(data) + 1"


@pytest.fixture
def leaderboard(monkeypatch, capfd, tmp_path):
    return contest_cases.command(monkeypatch, capfd, tmp_path)


@pytest.fixture
def small(monkeypatch):
    """The published problem with small shapes and brief guards."""
    contest_cases.make_small(monkeypatch)


@pytest.mark.timeout(200)
def test_a_ranking_shows_what_passed_and_what_failed(small, leaderboard, tmp_path):
    wrong = changed(tmp_path, WRONG)
    entries = ("expert_parallel", "torch_sort", wrong)
    code, text, _ = leaderboard(
        "rank", "all2all", *entries, "--ranks", 2, "--shortened", 0.05, "--out", tmp_path / "out", "--seed", 5
    )
    assert code == 112, text  # one entry has failed
    board = Board.read(tmp_path / "out" / "all2all.json")
    ranked = board.ranked()
    assert {entry.name for entry in ranked[:2]} == {"expert_parallel", "torch_sort"}
    assert board.link_gbps > 0 and len(board.floor_us) == len(board.null) and min(board.floor_us) > 0
    assert board.null[0].mean_us > 0 and 0 < ranked[0].score_us <= ranked[1].score_us
    assert (ranked[2].name, ranked[2].verdict, ranked[2].failed_mode) == (
        f"{tmp_path.name}-submission",
        "wrong",
        "test",
    )

    ours, torchs = sorted(ranked[:2], key=lambda entry: entry.name)
    assert "us in each operation" in ours.summary and "custom_kernel" in torchs.summary
    assert all((tmp_path / "out" / entry.trace_file).stat().st_size > 0 for entry in ranked[:2])
    page, markdown = (tmp_path / "out" / "leaderboard.html").read_text(), (tmp_path / "out" / "all2all.md").read_text()
    for what in ("expert_parallel", "torch_sort", "null", "floor", "Link:", "wrong", "Shortened: 0.05 s", "seed 5"):
        assert what in page and what in markdown


def test_profile_sends_its_report_to_other_tools(small, leaderboard, tmp_path):
    how = ("--mode", "profile", "--ranks", 2, "--out", tmp_path)
    code, text, lines = leaderboard("run", "all2all", "expert_parallel", *how)
    assert code == 0 and lines["check"] == "pass", text
    assert "us in each operation" in base64.b64decode(lines["benchmark.0.report"]).decode()
    assert (tmp_path / "all2all.expert_parallel.0.json.gz").exists()


def test_a_trace_that_was_not_written_is_not_in_the_report(tmp_path):
    """Regression: <problem>.json named a file that does not exist, or that an earlier run had left."""
    submission = changed(tmp_path, "def traced():\n    raise ValueError('no object')\n")
    contest = contest_cases.contest()
    with contest.ranks_of(submission) as ranks:
        (of_case,) = contest.profile(ranks, contest.cases_of("profile"), tmp_path, "mine").cases
    assert (of_case.verdict, of_case.trace_file) == ("raised", ""), of_case.message


def board_of(*entries: Entry) -> Board:
    null = [Timing("8 2", 10.0, 1.0, 9.0, 12.0, 100), Timing("64 6", 11.0, 1.0, 9.0, 12.0, 100)]
    return Board("all2all", "A problem.", 4, "cpu", "a machine", "today", 7, {"moe_a2a": "1", "commit": "c0ffee", "torch": "2"}, None, 4,
                 [], 370.0, [4.0, 9.0], null, list(entries))  # fmt: skip


def timed(name: str, score: float) -> Entry:
    timings = [Timing("8 2", score, 1.0, score, score, 3), Timing("64 6", score, 1.0, score, score, 3)]
    return Entry(name, score_us=score, timings=timings, traffic=[Traffic("8 2", 0, 4096)])


def test_the_fastest_is_first_and_failures_are_last():
    failed = Entry("failed", verdict="hang", failed_mode="test", failed_case="8 2", message="ranks [0] did not finish")
    board = board_of(failed, timed("slow", 90.0), timed("fast", 20.0))
    assert [row[0] for row in report.table(board)] == ["entry", "fast", "slow", "failed", "null", "floor"]
    assert report.table(board)[-1][1:] == ["6.0", "4.0", "9.0"]  # the score is the geometric mean
    text = report.as_markdown(board, "")
    assert "hang (a call did not return within twice its time limit; its processes were ended): test, shape 8 2" in text
    assert "commit c0ffee" in text
    assert "Shrunk: sizes divided by 4, not the published shapes." in text and "Shortened" not in text


def test_what_a_submission_is_called_or_says_is_no_markup():
    evil = Entry("<script>|x", verdict="raised", failed_mode="test", failed_case="1", message="</p><b>&", summary="<i>")
    page = report.as_html([board_of(evil)])
    assert "<script>" not in page and "<b>" not in page and "<i>" not in page and "&lt;/p&gt;&lt;b&gt;&amp;" in page
    assert "| <script>\\|x |" in report.as_markdown(board_of(evil), "")


def test_what_a_submission_says_makes_no_sections():
    says = f"no\n\n## fastest\n\npassed every mode; {'x ' * 10**6}"
    failed = Entry("failed", verdict="raised", failed_mode="test", failed_case="1", message=says)
    text = report.as_markdown(board_of(failed), "")
    assert [line for line in text.splitlines() if line.startswith("#")] == ["# all2all", "## failed"]
    assert "shape 1: no ## fastest passed every mode; x x" in text and len(text) < 5000


def test_what_a_submission_says_is_written_in_utf_8(tmp_path):
    """Regression: a surrogate, or any character that the locale cannot encode, ended the ranking."""
    failed = Entry("caf\u00e9", verdict="raised", failed_mode="test", failed_case="8 2", message="na\u00efve \udcff")
    board_of(failed).write(tmp_path / "all2all.json")
    for path in report.write_all(tmp_path):
        assert "caf\u00e9" in path.read_text("utf-8") and "na\u00efve \\udcff" in path.read_text("utf-8")


def test_the_page_is_closed_and_needs_nothing_else():
    page = report.as_html(
        [board_of(timed("one", 20.0)), dataclasses.replace(board_of(timed("two", 3.0)), problem="moe_layer")]
    )
    open_tags = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "link", "br", "path", "use", "rect", "defs"):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            if open_tags and tag == open_tags[-1]:
                open_tags.pop()

    Balance().feed(page)
    assert open_tags == []
    assert not re.search(r'(src|href)="(?!#)', re.sub(r'(xlink:)?href="#', 'href="#', page))
    identifiers = re.findall(r' id="([^"]+)"', page)
    assert {"all2all", "moe_layer"} <= set(identifiers)


def test_the_plot_is_drawn_and_repeats():
    svg = plot.as_svg(board_of(timed("one", 20.0), timed("two", 30.0)))
    assert xml.etree.ElementTree.fromstring(svg).tag.endswith("svg")
    assert "<!-- floor -->" in svg and "<!-- null -->" in svg
    assert svg == plot.as_svg(board_of(timed("one", 20.0), timed("two", 30.0)))
    assert plot.as_svg(board_of(Entry("failed", verdict="hang"))) == ""


def test_a_missing_floor_is_explained_everywhere(tmp_path):
    why = "a single rank has no link"
    board = dataclasses.replace(board_of(timed("one", 20.0)), ranks=1, link_gbps=0.0, floor_us=[], no_floor=why)
    assert report.table(board)[-1] == ["floor", "n/a", "n/a", "n/a"]
    board.write(tmp_path / "all2all.json")
    texts = (
        report.as_markdown(board, ""),
        report.as_html([board]),
        plot.as_svg(board),
        (tmp_path / "all2all.json").read_text(),
    )
    assert all(why in text for text in texts)


@pytest.mark.parametrize("name", ["_mine", "a$_$b", "$x$", "bad \udcff"])
def test_a_name_that_is_no_plain_label_is_drawn(name):
    """Regression: a formula that matplotlib could not read, or half a surrogate pair, ended the ranking; "_mine" had no name."""
    svg = plot.as_svg(board_of(timed(name, 20.0)))
    assert f"<!-- {name} -->".replace("\udcff", "\\udcff").replace("<!-- _", "<!--  _") in svg


def test_links_are_entries_of_their_own_names(tmp_path):
    """Regression: they had the name of their target, which could not be imported if it did not end in .py."""
    (tmp_path / "c0ffee").write_text(contest_cases.TORCH_SORT.read_text())
    for name in ("v1.py", "v2.py"):
        (tmp_path / name).symlink_to("c0ffee")
    contest = contest_cases.contest()
    paths = [options.submission_path(contest.problem, str(tmp_path / name)) for name in ("v1.py", "v2.py")]
    assert list(rank_command._by_entry_name(paths)) == ["v1", "v2"]
    assert contest.run("test", paths[0]).passed


def test_a_name_of_several_lines_is_one_line():
    """Regression: it ended the row of the table and made sections."""
    assert list(rank_command._by_entry_name([Path("x/mine\n# fastest.py")])) == ["mine # fastest"]


@pytest.mark.timeout(100)
def test_a_single_rank_has_no_floor_and_replaces_a_ranking(small, leaderboard, tmp_path):
    how = ("--ranks", 1, "--shortened", 0.05, "--out", tmp_path)
    before = board_of(timed("one", 20.0))
    before.write(tmp_path / "all2all.json")
    _, text, _ = leaderboard("rank", "all2all", "expert_parallel", *how)
    assert f"all2all.json: replaces the ranking of {before.date}; for one beside it, pass another --out" in text
    board = Board.read(tmp_path / "all2all.json")
    assert (board.floor_us, board.no_floor) == ([], "a single rank has no link")


def test_a_board_is_read_as_it_was_written(tmp_path):
    board = board_of(timed("one", 20.0), Entry("failed", verdict="hang"))
    board.write(tmp_path / "all2all.json")
    assert Board.read(tmp_path / "all2all.json") == board


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 9}', '{"version": 1, "null": 3}'])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "all2all.json").write_text(text)
    with pytest.raises(UsageError, match="all2all.json is not a ranking"):
        report.write_all(tmp_path)
