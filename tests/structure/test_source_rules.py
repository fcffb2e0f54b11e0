"""Rules that keep the source readable and portable. They read files and build nothing."""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

# From the top down: a file includes its own layer and those after it.
LAYERS = ["bindings", "trace_export", "moe", "rows", "comm", "arch"]

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


def is_part_of_a_target(path: Path) -> bool:
    """Included by a target's header in its midst, over words that it has defined before (or only a GPU compiler has)."""
    text = path.read_text()
    speaks_for_a_target = "MOE_A2A_TARGET " in text and "#define MOE_A2A_TARGET" not in text
    return path.parent.name == "arch" and (speaks_for_a_target or path.stem in {"cuda", "hip"})


headers = [p for p in sources if p.suffix == ".h" and not is_part_of_a_target(p)]
written = sorted(
    path
    for folder in ["csrc", "moe_a2a", "tests", "bench", "profiling", "cmake", ".ci"]
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".h", ".cpp", ".py", ".sh", ".cmake", ".txt", ""} and path.is_file()
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_comments(text: str) -> str:
    """Comments may say what a vendor's machine does; code may not depend on it."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def vendor_words(text: str) -> list[str]:
    return sorted({match.group(0) for match in VENDOR_WORDS.finditer(without_comments(text))})


def upward_includes(layer: str, text: str) -> list[str]:
    included = re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M)
    allowed = LAYERS[LAYERS.index(layer) :]
    return [path for path in included if path.split("/")[0] not in allowed]


def test_there_is_something_to_read():
    assert sources and headers and written


@pytest.mark.parametrize("path", sources, ids=name)
def test_only_the_target_layer_names_a_vendor(path):
    if path.relative_to(CSRC).parts[0] != "arch":
        assert vendor_words(path.read_text()) == []


@pytest.mark.parametrize("path", sources, ids=name)
def test_includes_point_downwards(path):
    assert upward_includes(path.relative_to(CSRC).parts[0], path.read_text()) == []


@pytest.mark.parametrize("path", headers, ids=name)
def test_header_compiles_alone(path):
    flags = ["-fsyntax-only", "-std=c++20", f"-I{CSRC}"]
    if path.relative_to(CSRC).parts[0] == "bindings":
        torch = Path(pytest.importorskip("torch").__file__).parent
        places = [
            torch / "include",
            torch / "include/torch/csrc/api/include",
            sysconfig.get_path("include"),
        ]
        flags += [f"-isystem{place}" for place in places]
    include = f'#include "{path.relative_to(CSRC).as_posix()}"\n'
    compiler = os.environ.get("CXX", "g++")
    done = subprocess.run(
        [compiler, *flags, "-x", "c++", "-"],
        input=include,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", written, ids=name)
def test_file_is_one_room(path):
    text = path.read_text()
    assert text.count("\n") < MAX_LINES
    assert LEFTOVERS.findall(text) == []


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
    assert upward_includes("comm", '#include "moe/route/route.h"\n#include "arch/arch.h"\n') == ["moe/route/route.h"]
