#!/usr/bin/env bash
# check_package.sh <python> <folder>: tests what users without a checkout get. Builds a source distribution from this checkout and
# a wheel from that with pip's build isolation, installs PyTorch and the wheel into an environment, and runs the demo there.
set -euo pipefail
python=$(realpath -s "$1")
root=$PWD
rm -rf "$2"
mkdir -p "$2"
cd "$2"
unset PYTHONDONTWRITEBYTECODE # pip does not precompile modules here, thousands that nothing imports

"$python" -m venv fresh
fresh/bin/python -m pip install -qq --no-compile 'build==1.*'
fresh/bin/python -m build --sdist --outdir . "$root" >sdist.log
sdist=$(ls moe_a2a-*.tar.gz)
for file in LICENSE README.md tests/python/conftest.py tests/unit/number_test.cpp csrc/arch/arch.h .ci/run Makefile; do
  tar -tzf "$sdist" "${sdist%.tar.gz}/$file" >/dev/null # an error names what is missing
done

torch=$("$python" -c 'import torch; print("torch==" + torch.__version__.split("+")[0])')
fresh/bin/python -m pip install -qq --no-compile "$torch" numpy platformdirs
# Isolated: the build requirements come from the package index, PyTorch from the environment. Not optimised, several sources at a
# time: the check is that the wheel is complete and runs, and it compiles its kernels three times.
fresh/bin/python -m pip wheel -q --no-deps --wheel-dir . --config-settings=cmake.define.CMAKE_UNITY_BUILD=ON \
  --config-settings='cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG' "$sdist"
wheel=$(ls moe_a2a-*.whl)
"$python" -m zipfile -l "$wheel" >contents.txt # a file: the writer of a pipe fails when grep has seen enough
for file in moe_a2a/py.typed moe_a2a/_core.pyi moe_a2a/_build_info.py moe_a2a/leaderboard/problems/all2all.yml; do
  grep -q "^$file " contents.txt || { echo "$wheel lacks $file" >&2; exit 1; }
done
fresh/bin/python -m pip install -qq --no-compile "$wheel[demo,leaderboard]"

for level in v2 v3 v4; do # the kernels for older machines, where this one has them
  MOE_A2A_CPU_LEVEL=$level fresh/bin/moe-a2a doctor >"doctor_$level.txt" || { cat "doctor_$level.txt"; exit 1; }
done
grep 'self test' doctor_*.txt
fresh/bin/moe-a2a demo --ranks 2 --models mixtral --output demo
fresh/bin/moe-a2a leaderboard run all2all expert_parallel --ranks 2
echo "package: $(du -h "$wheel" | cut -f1) $wheel"
