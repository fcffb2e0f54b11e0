"""The errors of `import moe_a2a` if the extension is missing or was built for another PyTorch, and what the build checks."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import moe_a2a
from moe_a2a import _core, installation
from moe_a2a.tracing import export

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def import_copy(folder: Path) -> str:
    """Runs `import moe_a2a` from a copy of the Python files in `folder`; returns the last line of stderr."""
    # -S: without the editable installation's finder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(torch.__file__).parents[1])])}
    command = [sys.executable, "-S", "-c", "import moe_a2a; print('imported')"]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stdout
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "moe_a2a", tmp_path / "moe_a2a", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_a_checkout_without_the_extension_says_how_to_build_it(copy):
    shutil.copy(ROOT / "CMakeLists.txt", copy)
    text = import_copy(copy)
    assert text.startswith("ImportError: the compiled extension moe_a2a._core is missing"), text
    assert f"make -C {copy} setup" in text and f"pip install {copy}" in text
    assert "circular" not in text


def test_an_installation_without_the_extension_says_how_to_build_it(copy):
    text = import_copy(copy)
    assert text.startswith("ImportError: the compiled extension moe_a2a._core is missing"), text
    assert "pip install --force-reinstall" in text


def test_an_extension_for_another_pytorch_is_not_loaded(copy):
    (copy / "moe_a2a" / "_core.py").write_text("raise AssertionError('loaded')")
    (copy / "moe_a2a" / "_build_info.py").write_text("TORCH, TORCH_CXX11_ABI = '2.1.0', True")
    text = import_copy(copy)
    assert f"built for PyTorch 2.1.0, this is PyTorch {torch.__version__}" in text, text
    assert "pip install" in text


def test_an_extension_that_does_not_load_names_both_versions(copy):
    (copy / "moe_a2a" / "_core.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    (copy / "moe_a2a" / "_build_info.py").write_text(
        f"PYTHON, TORCH, TORCH_CXX11_ABI, CUDA, HIP = '3.11', {torch.__version__!r}, "
        f"{bool(torch._C._GLIBCXX_USE_CXX11_ABI)}, '', ''"
    )
    text = import_copy(copy)
    assert f"built for Python 3.11, PyTorch {torch.__version__}, does not load" in text, text
    assert "undefined symbol: _ZN3c10" in text


def built(torch="2.9.1+cu130", abi=True, cuda="13.0", hip=""):
    return types.SimpleNamespace(PYTHON="3.12", TORCH=torch, TORCH_CXX11_ABI=abi, CUDA=cuda, HIP=hip)


def running(version="2.9.1+cu130", cuda="13.0", hip=None):
    return types.SimpleNamespace(
        __version__=version,
        _C=types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True),
        version=types.SimpleNamespace(cuda=cuda, hip=hip),
    )


@pytest.mark.parametrize(
    ("build_info", "torch_", "words"),
    [
        (built(), running(), None),
        (built(), running("2.9.0"), None),
        (built(), running(cuda="13.2"), None),  # the CUDA runtime is compatible within a major version
        (built(cuda=""), running(cuda="12.8"), None),  # no CUDA target
        (built(), running(cuda=None), None),
        (built(), running("2.10.0a0+git12"), ("2.9.1+cu130", "2.10.0a0+git12")),
        (built("2.10.0"), running("2.1.0"), ("2.10.0", "2.1.0")),
        (built(abi=False), running(), ("_GLIBCXX_USE_CXX11_ABI=0", "has 1")),
        (built(cuda="12.8"), running(), ("nvcc 12.8", "CUDA 13.0")),
        (built(cuda="", hip="7.0.70002"), running(cuda=None, hip="7.2.53211-e1a6bc5663"), None),
        (
            built(cuda="", hip="7.0.70002"),
            running(cuda=None, hip="6.4.43484-123eb5128"),
            ("runtime 7.0.70002", "HIP 6.4.43484"),
        ),
    ],
)
def test_builds_that_fit_the_installed_torch(build_info, torch_, words):
    text = installation.mismatch(build_info, torch_)
    if words is None:
        assert text is None
    else:
        assert all(word in text for word in words), text


def test_this_extension_fits_this_pytorch():
    from moe_a2a import _build_info

    assert _build_info.TORCH == torch.__version__
    assert bool(_build_info.CUDA) == ("cuda" in _core.built_targets())


def run_cmake(tmp_path, *lines):
    script = tmp_path / "check.cmake"
    script.write_text("\n".join(lines))
    cmake = shutil.which("cmake") or str(Path(sys.executable).parent / "cmake")
    return subprocess.run([cmake, "-P", str(script)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.10.0", "2.11.0a0+git12", "2.11.0+cpu", "3.0.1"])
def test_the_build_refuses_an_older_pytorch(tmp_path, version):
    """PyTorch 2.6 was announced, but 2.10 too ended in "class c10::Stream has no member named native_handle"."""
    result = run_cmake(tmp_path, f"include({ROOT}/cmake/torch.cmake)", f"moe_a2a_check_torch_version({version})")
    if version.startswith(("2.6", "2.10")):
        said = " ".join(result.stderr.split())
        assert f"this environment has PyTorch {version}, moe_a2a needs 2.11 or newer" in said, said
    else:
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("version", "wanted"), [("2.10.0+cpu", ["torch>=2.11"]), ("2.11.0a0+git12", []), (None, ["torch>=2.11"])]
)
def test_a_build_gets_a_pytorch_that_is_new_enough(tmp_path, monkeypatch, version, wanted):
    """With an older one installed, pip built for it, and then replaced it."""
    pytest.importorskip("scikit_build_core")
    monkeypatch.chdir(ROOT)  # as pip does
    monkeypatch.syspath_prepend(str(ROOT / "build_backend"))
    backend = importlib.import_module("moe_a2a_build")
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}" if version else "raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: without the packages of this environment
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert [name for name in backend.get_requires_for_build_wheel() if name.startswith("torch")] == wanted
    assert [name for name in backend.get_requires_for_build_editable() if name.startswith("torch")] == wanted


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("", "a build without isolation needs its requirements in the environment: pip install scikit-build-core"),
        ("sys.version_info = 3, 9", "moe_a2a needs Python 3.10 or newer, this is 3.9"),
    ],
)
def test_a_build_that_cannot_start_says_why(tmp_path, before, words):
    """They were "No module named 'scikit_build_core'" and "No matching distribution found for torch"."""
    command = [sys.executable, "-S", "-c", f"import sys; {before}\nimport moe_a2a_build"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "build_backend")}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(words), result.stderr


def test_the_oldest_pytorch_is_the_same_everywhere():
    named = {
        "README.md": "PyTorch (.+?) or newer",
        "pyproject.toml": '"torch>=(.+?)"',
        "cmake/torch.cmake": r"set\(oldest (.+?)\)",
    }
    found = {file: re.search(pattern, (ROOT / file).read_text()) for file, pattern in named.items()}
    assert {file: match and match[1] for file, match in found.items()} == dict.fromkeys(named, "2.11")


@pytest.mark.parametrize(
    ("nvcc", "torch_cuda", "status", "words"),
    [
        ("13.0", "13.0", 0, ""),
        ("13.0", "none", 0, ""),
        (
            "12.4",
            "12.8",
            0,
            "nvcc is CUDA 12.4, this PyTorch is for CUDA 12.8; minor versions of one major are compatible",
        ),
        ("12.8", "13.0", 1, "nvcc is CUDA 12.8, this PyTorch is for CUDA 13.0: the major versions have to be the same"),
        (
            "13.0",
            "12.4",
            1,
            "or build for the CPU only: pip install --config-settings=cmake.define.MOE_A2A_TARGETS=cpu",
        ),
    ],
)
def test_the_build_compares_nvcc_with_pytorch(tmp_path, nvcc, torch_cuda, status, words):
    checks = f"include({ROOT}/cmake/gpu_versions.cmake)", f"moe_a2a_check_cuda_versions({nvcc} {torch_cuda})"
    result = run_cmake(tmp_path, *checks)
    assert result.returncode == status
    said = " ".join(result.stderr.split())
    assert words in said if words else said == ""


@pytest.mark.parametrize(
    ("library", "torch_hip", "status", "words"),
    [
        ("libamdhip64.so.7.0.70002", "7.0.51831-a3e329ad8", 0, ""),
        ("libamdhip64.so.7.0.70002", "none", 0, ""),
        ("libamdhip64.so", "6.4.43484-123eb5128", 0, ""),  # its name does not say
        (
            "libamdhip64.so.7.0.70002",
            "6.4.43484-123eb5128",
            1,
            "libamdhip64.so is HIP 7.0.70002, this PyTorch is for HIP 6.4.43484-123eb5128: the major versions have to be the same",
        ),
        ("libamdhip64.so.6.4.60400", "7.0.51831-a3e329ad8", 1, "Set ROCM_PATH to a ROCm with HIP 7"),
    ],
)
def test_the_build_compares_rocm_with_pytorch(tmp_path, library, torch_hip, status, words):
    """With two major versions, one process loaded two HIP runtimes: PyTorch's streams meant nothing to ours."""
    (tmp_path / library).touch()
    link = tmp_path / "lib" / "libamdhip64.so"
    link.parent.mkdir()
    link.symlink_to(tmp_path / library)
    checks = (
        f"include({ROOT}/cmake/gpu_versions.cmake)",
        f"moe_a2a_hip_runtime_version({link} version)",
        f'moe_a2a_check_hip_versions({link} "${{version}}" {torch_hip})',
    )
    result = run_cmake(tmp_path, "cmake_minimum_required(VERSION 3.22)", *checks)
    assert result.returncode == status, result.stderr
    said = " ".join(result.stderr.split())
    assert words in said if words else said == ""


@pytest.mark.parametrize("variable", ["ROCM_HOME", "ROCM_PATH"])
def test_rocm_is_found_where_pytorch_finds_it(tmp_path, variable):
    """With ROCM_HOME alone, PyTorch's own extensions were built for the GPU and this one for the CPU only."""
    for file in ("bin/amdclang++", "lib/libamdhip64.so"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("#!/bin/sh")
        (tmp_path / file).chmod(0o755)
    unset = [f"unset(ENV{{{name}}})" for name in ("ROCM_HOME", "ROCM_PATH", "HIP_PATH")]
    lines = [
        *unset,
        f"set(ENV{{{variable}}} {tmp_path})",
        "set(CMAKE_FIND_LIBRARY_PREFIXES lib)",
        "set(CMAKE_FIND_LIBRARY_SUFFIXES .so)",
    ]
    said = 'message("${MOE_A2A_HIP_COMPILER} ${MOE_A2A_HIP_RUNTIME}")'
    result = run_cmake(
        tmp_path, "cmake_minimum_required(VERSION 3.22)", *lines, f"include({ROOT}/cmake/hip.cmake)", said
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.split() == [f"{tmp_path}/bin/amdclang++", f"{tmp_path}/lib/libamdhip64.so"]


def test_a_build_without_protozero_says_why_it_cannot(monkeypatch):
    monkeypatch.delattr(_core, "write_perfetto")
    export.check_path("trace.json.gz")
    with pytest.raises(ValueError, match=re.escape("trace.pftrace: this build of moe_a2a writes Chrome JSON only")):
        export.check_path("trace.pftrace")


def test_pyproject_has_the_version_of_the_package():
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared and moe_a2a.__version__ == declared[1]


def test_the_package_says_that_it_is_typed():
    assert (Path(moe_a2a.__file__).parent / "py.typed").exists()


def run_choice(tmp_path, vendor, known, variable=None, gpus=None):
    """What cmake/gpu_architectures.cmake chooses, and its warnings. gpus: what the vendor's program prints; None: there is none."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{'exit 9' if gpus is None else f'printf {gpus!r}'}\n")
    program.chmod(0o755)
    set_variable = [f'set(ENV{{{name}}} "{value}")' for name, value in (variable or {}).items()]
    unset = [f"unset(ENV{{{name}}})" for name in ("TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH")]
    choice = f"moe_a2a_choose_{vendor}_architectures({known} chosen)"
    programs = [f"set({name} {program})" for name in ("MOE_A2A_NVIDIA_SMI", "MOE_A2A_ROCM_AGENTS")]
    lines = [*programs, *unset, *set_variable, f"include({ROOT}/cmake/gpu_architectures.cmake)", choice]
    result = run_cmake(tmp_path, "cmake_minimum_required(VERSION 3.22)", *lines, 'message("chosen: ${chosen}")')
    assert result.returncode == 0, result.stderr
    warnings, chosen = result.stderr.split("chosen: ")
    return chosen.strip(), " ".join(warnings.split())


KNOWN = '"sm_80 sm_90 sm_100"'  # to nvcc


@pytest.mark.parametrize(
    ("known", "variable", "gpus", "chosen"),
    [
        (KNOWN, None, None, "80;90;100"),
        ('"sm_80 sm_90"', None, None, "80;90"),
        (KNOWN, None, "9.0\\n9.0\\n", "90"),
        (KNOWN, None, "9.0\\n8.6\\n", "80;90"),
        (KNOWN, None, "12.0\\n", "80;90;100"),  # runs the PTX of sm_80
        (KNOWN, "9.0a", "8.0\\n", "90"),
        (KNOWN, "7.5 8.0 8.6 9.0 10.0 12.0+PTX", None, "80;90;100"),
        (KNOWN, "8.9;10.3", None, "80;100"),
    ],
)
def test_cuda_architectures(tmp_path, known, variable, gpus, chosen):
    """Every build compiled for all three: on 16 cores 164 s, compared with 92 for one."""
    variable = variable and {"TORCH_CUDA_ARCH_LIST": variable}
    assert run_choice(tmp_path, "cuda", known, variable, gpus) == (chosen, "")


@pytest.mark.parametrize(
    ("variable", "gpus", "chosen"),
    [
        (None, None, "gfx90a;gfx942;gfx950"),
        (None, "gfx000\\ngfx942\\ngfx942\\n", "gfx942"),
        ("gfx1100;gfx950;gfx90a:xnack-", "gfx942\\n", "gfx90a;gfx950"),
    ],
)
def test_hip_architectures(tmp_path, variable, gpus, chosen):
    variable = variable and {"PYTORCH_ROCM_ARCH": variable}
    assert run_choice(tmp_path, "hip", "", variable, gpus) == (chosen, "")


def test_architectures_without_kernels_are_reported(tmp_path):
    chosen, warning = run_choice(tmp_path, "cuda", KNOWN, {"TORCH_CUDA_ARCH_LIST": "7.0 Volta"})
    assert chosen == "80;90;100"
    assert 'asks for "7.0 Volta", for which moe_a2a has no kernels: building for 80;90;100' in warning
