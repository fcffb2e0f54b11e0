#!/usr/bin/env bash
# compile_kernels.sh <build folder> [new]: compiles every kernel for CUDA and HIP, no GPU needed, and checks the AMD
# assembly. new: compiles for HIP once more, with newer headers; not part of CI, whose clang may not read them.
#
# With CI=true a missing compiler is an error; elsewhere it is said and left out.
set -euo pipefail
build=$1
failed=()

leave_out() {
  echo "$1"
  if [ "${CI:-}" = true ]; then failed+=("$1"); fi
}

# compile <folder> <targets> <further cmake options>...
compile() {
  cmake -S . -B "$1" -G Ninja -DMOE_A2A_BUILD_PYTHON=OFF -DMOE_A2A_TARGETS="$2" "${@:3}" >/dev/null
  cmake --build "$1"
}

# compile_hip <stable|new> <folder>: the library for gfx942, with the headers of hip_prefix.sh. The listings for the ISA
# check compile every kernel for the other architectures.
compile_hip() {
  local prefix=$build/hip_$1 flags
  flags=$(paste -sd';' "$prefix/flags")
  compile "$2" "cpu;hip" -DMOE_A2A_HIP_COMPILER="$(command -v clang++-22)" -DMOE_A2A_HIP_FLAGS="$flags" \
    -DMOE_A2A_HIP_ARCHITECTURES=gfx942
}

fetch_prefix() {
  [ -e "$build/hip_$1/flags" ] || .ci/hip_prefix.sh "$1" "$build/hip_$1"
}

mkdir -p "$build"

echo "== CUDA, sm_90"
if command -v nvcc >/dev/null; then
  compile "$build/cuda" "cpu;cuda" -DMOE_A2A_CUDA_ARCHITECTURES=90 -DMOE_A2A_CUDA_FLAGS=--resource-usage ||
    failed+=("CUDA")
  # nvcc lets host templates call device functions, and makes such a call an exit(1).
  nm -u "$build"/cuda/*_cuda.o >"$build/cuda/undefined.txt"
  if grep -w exit "$build/cuda/undefined.txt"; then failed+=("CUDA: host code calls a device function"); fi
else
  leave_out "CUDA: nvcc is not on this machine"
fi

echo "== HIP, gfx90a gfx942 gfx950"
if .ci/system_packages.sh kernels && fetch_prefix stable; then
  if compile_hip stable "$build/stable" && cmake --build "$build/stable" --target moe_a2a_isa; then
    for listing in "$build"/stable/isa/*.s; do
      python3 tests/structure/check_isa.py "$listing" || failed+=("ISA of $listing")
    done
    echo "ISA of kernels that have lost one ordering each"
    python3 tests/structure/isa_mutants.py "$build/stable/isa/command.txt" || failed+=("ISA mutants")
  else
    failed+=("HIP")
  fi
  if [ "${2:-}" = new ]; then
    echo "== HIP with newer headers, gfx942"
    fetch_prefix new && compile_hip new "$build/new" || failed+=("HIP with newer headers")
  fi
else
  leave_out "HIP: its compiler or headers are not on this machine"
fi

if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "kernels: all compiled"
