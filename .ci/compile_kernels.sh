#!/usr/bin/env bash
# compile_kernels.sh <build folder> [full|new]: compiles every kernel for CUDA and HIP, no GPU needed, and checks the AMD
# assembly and NVIDIA's machine code. full: builds whole libraries too, for every architecture (half an hour). new: the library for HIP with newer
# headers, which CI's clang may not be able to read. cmake/kernel_checks.cmake says what the short form omits.
#
# With CI=true a missing compiler is an error; elsewhere it is reported and skipped.
set -euo pipefail
build=$1
failed=()

leave_out() {
  echo "$1"
  if [ "${CI:-}" = true ]; then failed+=("$1"); fi
}

unset TORCH_CUDA_ARCH_LIST PYTORCH_ROCM_ARCH

# configure <folder> <targets> <further cmake options>...: for all architectures, whatever GPUs this machine has; the host's side is
# compiled, never run.
configure() {
  local options=(-DMOE_A2A_NVIDIA_SMI= -DMOE_A2A_ROCM_AGENTS=)
  [[ $2 == *hip* ]] && options+=(-DMOE_A2A_HIP_COMPILER="$(command -v clang++-22)")
  cmake -S . -B "$1" -G Ninja -DMOE_A2A_BUILD_PYTHON=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O0 -DCMAKE_UNITY_BUILD=ON \
    -DMOE_A2A_TARGETS="$2" "${options[@]}" "${@:3}" >/dev/null
}

hip_flags() {  # of the headers stable|new
  echo "-DMOE_A2A_HIP_FLAGS=$(paste -sd';' "$build/hip_$1/flags")"
}

fetch_prefix() {
  [ "$build/hip_$1/flags" -nt .ci/hip_prefix.sh ] || .ci/hip_prefix.sh "$1" "$build/hip_$1"
}

get_disassembler() {  # part of CUDA's toolkit; some installations have its compiler only
  command -v cuobjdump >/dev/null && command -v nvdisasm >/dev/null && return
  local wheels=$build/disassembler
  [ -d "$wheels" ] || python3 -m pip install -qq --root-user-action=ignore --no-deps --target "$wheels" \
    'nvidia-cuda-cuobjdump==13.*' 'nvidia-cuda-nvdisasm==13.*' || return
  PATH+=:$PWD/$wheels/nvidia/cu13/bin
}

mkdir -p "$build"
targets="cpu"
options=()
if command -v nvcc >/dev/null; then targets+=";cuda"; else leave_out "CUDA: nvcc is not on this machine"; fi
if .ci/system_packages.sh kernels && fetch_prefix stable; then
  targets+=";hip"
  options=("$(hip_flags stable)")
else
  leave_out "HIP: its compiler or headers are not on this machine"
fi

echo "== Compiling for $targets"
configure "$build/checks" "$targets" -DMOE_A2A_CHECK_KERNELS=ON "${options[@]}"
cmake --build "$build/checks" --target moe_a2a_kernel_checks -- -k 0 || failed+=("compiling")

if [[ $targets == *cuda* ]]; then
  # nvcc lets host templates call device functions, and compiles such a call to exit(1).
  nm -u "$build"/checks/cuda/*.o >"$build/checks/cuda/undefined.txt"
  if grep -w exit "$build/checks/cuda/undefined.txt"; then failed+=("CUDA: host code calls a device function"); fi

  echo "== NVIDIA machine code"
  if get_disassembler; then
    python3 tests/structure/check_sass.py "$build"/checks/cuda/*.sm_90a.cubin || failed+=("SASS")
  else
    leave_out "SASS: cuobjdump and nvdisasm are not on this machine"
  fi
fi

if [[ $targets == *hip* ]]; then
  echo "== AMD assembly"
  python3 tests/structure/check_isa.py "$build"/checks/isa/*.s || failed+=("ISA")
  echo "ISA of kernels that have lost one ordering each"
  python3 tests/structure/isa_mutants.py "$build/checks/isa/command.txt" || failed+=("ISA mutants")
fi

case "${2:-}" in
  full)
    configure "$build/full" "$targets" "${options[@]}"
    cmake --build "$build/full" --target moe_a2a_core -- -k 0 || failed+=("libraries")
    ;;
  new)
    fetch_prefix new && configure "$build/new" "cpu;hip" "$(hip_flags new)" -DMOE_A2A_HIP_ARCHITECTURES=gfx942 &&
      cmake --build "$build/new" --target moe_a2a_core || failed+=("HIP with newer headers")
    ;;
esac

if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "kernels: all compiled"
