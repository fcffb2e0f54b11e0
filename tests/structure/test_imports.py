"""The import graph of the Python package: no cycle, and no import from a lower layer to a higher one.

Imports for type checkers and inside functions count like any other: they too are dependencies.
"""

import ast
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "moe_a2a"

# From the top down. A module may import its own layer and lower ones.
LAYERS = {
    "entry": ["__main__"],
    "commands": ["bench", "demo", "leaderboard", "tune", "doctor", "tracing.command"],
    "parts of commands": [
        "commands",
        "samples",
        "rank_processes",
    ],
    "integrations": ["integrations"],
    "interface": [""],  # moe_a2a/__init__.py
    "MoE layer": ["moe_layer", "reference", "replicas", "two_level"],
    "on collectives": [
        "ddp",
        "default_collectives",
        "quickreduce",
        "token_dispatcher",
        "torch_backend",
        "two_level.collectives",
        "two_level.handle",
        "two_level.passage",
        "two_level.rail",
    ],
    "clients": ["collectives", "expert_parallel", "shrinking"],
    "communicator": ["communicator"],
    "tracing": ["tracing"],
    "client": ["client"],
    "operators": ["operators"],
    "experts": ["experts", "expert_weights", "grouped_gemm"],
    "parts": [
        "arguments",
        "block_scales",
        "calls",
        "capabilities",
        "codecs",
        "devices",
        "environment",
        "errors",
        "files",
        "graph_tracing",
        "group_objects",
        "groups",
        "handle",
        "installation",
        "row_routes",
        "set_up",
        "tables",
        "untraced",
    ],
    "extension": ["_core", "_build_info"],
}
# Among the layers above the interface, those whose internals others must not use.
APART = ["bench", "demo", "leaderboard"]
MAY_USE = {"tune": ["bench"]}  # it measures with the bench's code


def name_of(path: Path) -> str:
    """ "bench.cases"; "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}
EXTENSIONS = set(LAYERS["extension"])


def imports_of(text: str) -> set[str]:
    """The modules of this package that a source imports, anywhere."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if _module(name) is not None else node.module for name in names}
    return {module for name in found if (module := _module(name)) is not None}


def _module(name: str) -> str | None:
    inside = name.removeprefix("moe_a2a").removeprefix(".")
    is_ours = name == "moe_a2a" or name.startswith("moe_a2a.")
    return inside if is_ours and (inside in MODULES or inside in EXTENSIONS) else None


def layer_of(module: str) -> int | None:
    """The layer that lists the module, or else its folder."""
    while True:
        for depth, members in enumerate(LAYERS.values()):
            if module in members:
                return depth
        if "." not in module:
            return None
        module = module.rpartition(".")[0]


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def upward_arrows(graph: dict[str, set[str]]) -> list[str]:
    names = list(LAYERS)
    depths = {module: layer_of(module) for arrow in graph.items() for module in (arrow[0], *arrow[1])}
    return [
        f"{module} ({names[depths[module]]}) imports {other} ({names[depths[other]]})"
        for module, others in graph.items()
        for other in others
        if None not in (depths[module], depths[other]) and depths[module] > depths[other]
    ]


@pytest.fixture(scope="module")
def graph():
    # A package's own __init__ is not an import of its neighbours.
    return {module: imports_of(path.read_text()) - {module} for module, path in MODULES.items()}


def test_every_module_has_a_layer():
    assert [module for module in MODULES if layer_of(module) is None] == [], "add them to LAYERS"


def test_no_circle(graph):
    assert " -> ".join(circle_in(graph)) == ""


def test_no_arrow_points_upwards(graph):
    assert "\n".join(upward_arrows(graph)) == ""


def test_bench_demo_and_leaderboard_are_apart(graph):
    wrong = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        for folder in APART
        if other.split(".")[0] == folder
        and module.split(".")[0] not in ["__main__", folder, *(user for user in MAY_USE if folder in MAY_USE[user])]
    ]
    assert "\n".join(wrong) == ""


# ---- the rules themselves: each must be able to fail


@pytest.mark.parametrize(
    "text",
    [
        "from moe_a2a import devices",
        "from moe_a2a.devices import default_device",
        "import moe_a2a.devices",
        "def f():\n    from moe_a2a import devices",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moe_a2a.devices import default_device",
    ],
)
def test_imports_are_found(text):
    assert imports_of(text) == {"devices"}


def test_names_of_the_package_are_its_own():
    assert imports_of(
        "from moe_a2a import ExpertParallel\nimport moe_a2a\nimport torch\nfrom moe_a2a import _core"
    ) == {
        "",
        "_core",
    }


def test_a_circle_is_found():
    assert set(circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_an_upward_arrow_is_found():
    assert upward_arrows({"devices": {"expert_parallel"}, "tune": {"devices"}}) == [
        "devices (parts) imports expert_parallel (clients)"
    ]
