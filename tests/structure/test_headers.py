"""Every header compiles on its own. Takes a minute and a half of one core: `make headers`, not part of `make test`."""

import os
import re
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def is_part_of_a_target(path: Path) -> bool:
    """A target includes it midway, after defining names that it needs (or only a GPU compiler has them)."""
    text = path.read_text()
    speaks_for_a_target = "MOE_A2A_TARGET " in text and "#define MOE_A2A_TARGET" not in text
    return path.parent.name == "arch" and (speaks_for_a_target or path.stem in {"cuda", "hip"})


headers = sorted(path for path in CSRC.rglob("*.h") if not is_part_of_a_target(path))


def is_of_bindings(path: Path) -> bool:
    return path.parent == CSRC / "bindings"


def comes_first_in_its_source(header: Path) -> bool:
    """If so, the build has compiled it with nothing before it (in bindings, only the precompiled header)."""
    source = header.with_suffix(".cpp")
    first = re.search(r'^#include [<"](.+)[>"]', source.read_text(), re.M) if source.exists() else None
    return first is not None and (header.parents[0] / Path(first.group(1)).name) == header


def compile_errors(files: list[Path], include_folders: list[Path], system_folders: list[Path]) -> str:
    """The compiler's errors when headers are translation units of their own; two calls, for two cores."""
    folders = [*(f"-I{place}" for place in include_folders), *(f"-isystem{place}" for place in system_folders)]
    command = [os.environ.get("CXX", "g++"), "-fsyntax-only", "-w", "-std=c++20", *folders, "-x", "c++"]

    def errors_of(half: list[Path]) -> str:
        done = subprocess.run([*command, *map(str, half)], text=True, capture_output=True, timeout=800)
        assert done.returncode == 0 or done.stderr
        return done.stderr

    with ThreadPoolExecutor(2) as pool:
        return "".join(pool.map(errors_of, [half for half in (files[::2], files[1::2]) if half]))


@pytest.mark.timeout(900)
def test_headers_compile_alone():
    alone = [path for path in headers if not is_of_bindings(path) and not comes_first_in_its_source(path)]
    assert alone and compile_errors(alone, [CSRC], []) == ""


@pytest.mark.timeout(900)
def test_headers_of_bindings_compile_alone():
    torch = Path(pytest.importorskip("torch").__file__).parent
    places = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    alone = [path for path in headers if is_of_bindings(path) and not comes_first_in_its_source(path)]
    assert compile_errors(alone, [CSRC], places) == ""


# ---- the rules themselves: each must be able to fail


def test_a_header_that_its_source_includes_first_is_known(tmp_path):
    header = tmp_path / "part.h"
    assert not comes_first_in_its_source(header)
    for text, expected in [
        ('#include "x/part.h"\n#include <vector>\n', True),
        ('#include <vector>\n#include "part.h"\n', False),
    ]:
        header.with_suffix(".cpp").write_text(text)
        assert comes_first_in_its_source(header) is expected


def test_a_header_that_needs_another_is_found(tmp_path):
    whole, lacking = tmp_path / "whole.h", tmp_path / "lacking.h"
    whole.write_text("#pragma once\n#include <vector>\nstd::vector<int> whole();\n")
    lacking.write_text("#pragma once\nstd::vector<int> lacking();\n")
    assert compile_errors([whole], [], []) == ""
    assert "lacking.h:2" in compile_errors([whole, lacking], [], [])
