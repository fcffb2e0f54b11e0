"""docs/environment.md lists every environment variable that the sources read, and no others."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
FOLDERS = ("moe_a2a", "csrc", "cmake", "profiling", "tests", "build_backend", ".ci")
READS = [
    r"environ(?:ment)?(?:\.get\(|\.setdefault\(|\.is_on\(|\.seconds\(|\[)\s*\"(\w+)\"",  # Python
    r"\"(\w+)\" in os\.environ",
    r"\bgetenv\(\"(\w+)\"\)",  # C++
    r"\$ENV\{(\w+)\}",  # CMake
    r"\$\{([A-Z]\w+):-",  # shell
    r"ENVIRONMENT_VARIABLE = \"(\w+)\"",
    r"\"(MOE_A2A_BACKEND_\w+)\"",  # named in a table of options
]
# Set for other programs rather than read, or in general use.
NOT_OURS = {"DEBIAN_FRONTEND", "PYTHONPATH", "PATH", "OMP_NUM_THREADS"}


def names_in_sources() -> set[str]:
    files = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and path.suffix in (".py", ".h", ".cpp", ".cmake", ".sh", "")
        and path.name != Path(__file__).name
    ]
    names = {
        name for path in files for pattern in READS for name in re.findall(pattern, path.read_text(errors="ignore"))
    }
    return names - NOT_OURS


def test_the_table_is_complete():
    documented = {
        name
        for row in re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    # CI is exported by .ci/run for the tools that it calls.
    assert names_in_sources() | {"CI"} == documented


@pytest.mark.parametrize("name", ["MOE_A2A_DEVICE", "MOE_A2A_SEED", "MOE_A2A_SCHEDULES", "CUDA_HOME", "PYTHON"])
def test_the_patterns_see_each_language(name):
    assert name in names_in_sources()
