"""Rules that keep the source readable and portable. They read files and build nothing."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

# From the top down: a file includes its own folder and those of lower layers. The clients of the communicator must not
# depend on each other.
LAYERS = [["bindings"], ["trace_export"], ["moe", "collectives"], ["rows"], ["comm"], ["arch"]]

VENDOR_WORDS = re.compile(
    r"""\b(
      hip[A-Z]\w+ | cuda[A-Z]\w+ | __HIP\w* | __CUDA\w* | __AMDGCN\w* | __gfx\w+ | __NVCC__
    | threadIdx | blockIdx | blockDim | gridDim | warpSize | __launch_bounds__ | __grid_constant__
    | __global__ | __device__ | __host__ | __shared__ | __constant__ | __forceinline__
    | __shfl\w* | __ballot\w* | __any\w* | __all\w* | __syncthreads\w* | __syncwarp | __threadfence\w*
    | __nanosleep | __nv_\w+ | __builtin_amdgcn\w* | __hip_atomic\w* | wall_clock64 | asm | __asm\w*
    )\b
    | [#]\s*include\s*<(hip|cuda|cub|nv|rocprim|hipcub)\w*/? """,
    re.VERBOSE,
)
# In two pieces each, so that this file does not break its own rule.
LEFTOVERS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error"]) + r")\b")
MAX_LINES = 400

sources = sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp"})


written = sorted(
    path
    for folder in ["csrc", "moe_a2a", "tests", "bench", "profiling", "cmake", ".ci"]
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".h", ".cpp", ".py", ".sh", ".cmake", ".txt", ""} and path.is_file()
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_comments(text: str) -> str:
    """Comments may mention a vendor's machine; code must not depend on it."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def vendor_words(text: str) -> list[str]:
    return sorted({match.group(0) for match in VENDOR_WORDS.finditer(without_comments(text))})


def upward_includes(layer: str, text: str) -> list[str]:
    included = re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M)
    depth = next(i for i, folders in enumerate(LAYERS) if layer in folders)
    allowed = [layer, *(folder for folders in LAYERS[depth + 1 :] for folder in folders)]
    return [path for path in included if path.split("/")[0] not in allowed]


def broken(files: list[Path], rule: Callable[[Path], list[str]]) -> str:
    """Every violation, one per line, so that all are visible at once."""
    return "\n".join(f"{name(path)}: {what}" for path in files for what in rule(path))


def layer_of(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def test_there_is_something_to_read():
    assert sources and written


def test_only_the_arch_layer_names_a_vendor():
    rest = [path for path in sources if layer_of(path) != "arch"]
    assert broken(rest, lambda path: vendor_words(path.read_text())) == ""


def test_includes_point_downwards():
    assert broken(sources, lambda path: upward_includes(layer_of(path), path.read_text())) == ""


def test_each_file_is_short_enough():
    def too_long(path: Path) -> list[str]:
        num_lines = path.read_text().count("\n")
        return [f"{num_lines} lines, {MAX_LINES - 1} at most"] if num_lines >= MAX_LINES else []

    assert broken(written, too_long) == ""


def test_nothing_is_left_unfinished():
    assert broken(written, lambda path: LEFTOVERS.findall(path.read_text())) == ""


# ---- the rules themselves: each must be able to fail


@pytest.mark.parametrize(
    "text",
    [
        "hipMalloc(&p, 4);",
        "cudaStream_t s;",
        "int lane = threadIdx.x % 32;",
        "#include <cuda_runtime.h>",
        "#include <rocprim/block/block_scan.hpp>",
        'asm volatile("nop");',
        "v = __shfl_xor(v, 1);",
        "#if defined(__CUDA_ARCH__)",
        "__device__ void f();",
    ],
)
def test_vendor_words_are_found(text):
    assert vendor_words(text)


@pytest.mark.parametrize("text", ["// cudaMalloc is slow here", "int chip = 1;", "#include <cstdint>", "basm();"])
def test_other_words_are_not(text):
    assert vendor_words(text) == []


def test_an_upward_include_is_found():
    assert upward_includes("collectives", '#include "moe/args.h"\n#include "comm/wait.h"\n') == ["moe/args.h"]
    assert upward_includes("comm", '#include "moe/route/route.h"\n#include "arch/arch.h"\n') == ["moe/route/route.h"]


def test_every_violation_is_listed():
    files = [ROOT / "README.md", ROOT / "Makefile"]
    assert (
        broken(files, lambda path: ["one", "two"][: len(path.name) - 7])
        == "README.md: one\nREADME.md: two\nMakefile: one"
    )
