# The HIP target: kernel sources compiled in clang's HIP mode through a custom command: CMake's HIP language
# differs too much between CMake versions and ROCm packagings.
#
# A real ROCm install is found automatically; it must include rocPRIM's headers (package rocprim-dev). Any other HIP
# compiler (a plain clang with a directory of headers and device libraries) is given by MOE_A2A_HIP_COMPILER and
# MOE_A2A_HIP_FLAGS.

set(_moe_a2a_rocm_hints $ENV{ROCM_HOME} $ENV{ROCM_PATH} $ENV{HIP_PATH} /opt/rocm) # PyTorch asks for ROCM_HOME first, too
find_program(MOE_A2A_HIP_COMPILER amdclang++ HINTS ${_moe_a2a_rocm_hints}
             PATH_SUFFIXES bin llvm/bin lib/llvm/bin NO_DEFAULT_PATH)
find_library(MOE_A2A_HIP_RUNTIME amdhip64 HINTS ${_moe_a2a_rocm_hints} PATH_SUFFIXES lib lib64 NO_DEFAULT_PATH)
set(MOE_A2A_HIP_FLAGS "" CACHE STRING "Further flags for MOE_A2A_HIP_COMPILER (a list)")
set(MOE_A2A_HIP_ARCHITECTURES "" CACHE STRING "HIP architectures, such as gfx942;gfx950. Empty: see gpu_architectures.cmake")
set(MOE_A2A_ISA_ARCHITECTURES "gfx90a;gfx942;gfx950" CACHE STRING "HIP architectures of the assembly listings")

# The compile command, with the definitions that follow `result`.
function(moe_a2a_hip_command result)
  if(NOT MOE_A2A_HIP_COMPILER)
    message(FATAL_ERROR "MOE_A2A_TARGETS names hip, but no ROCm was found. "
                        "Set ROCM_PATH, or MOE_A2A_HIP_COMPILER and MOE_A2A_HIP_FLAGS")
  endif()
  set(definitions ${MOE_A2A_ABI_DEFINITIONS} ${ARGN})
  list(TRANSFORM definitions PREPEND -D)
  # -ffp-contract=off: sums have the same bits on every target.
  # A kernel must be one function: a call needs a stack in memory, and a memory order passed as an argument costs a branch
  # per order. The inliner stops at a number of blocks that our kernels exceed.
  # Machine-code hoisting fills the scalar registers with values that loops could recompute at no cost.
  set(${result} ${MOE_A2A_HIP_COMPILER} -x hip ${MOE_A2A_HIP_FLAGS} -std=c++20 -O3 -ffp-contract=off
      -mllvm -amdgpu-inline-max-bb=1000000 -mllvm -disable-machine-licm
      -fPIC -fvisibility=hidden -I${PROJECT_SOURCE_DIR}/csrc ${definitions} PARENT_SCOPE)
endfunction()

# moe_a2a_add_hip_object(<source> <object> [<definition>...]): compiles `source` to `object`: host code and one code object per architecture.
function(moe_a2a_add_hip_object source object)
  moe_a2a_hip_command(compile ${ARGN})
  list(TRANSFORM MOE_A2A_HIP_ARCHITECTURES PREPEND --offload-arch= OUTPUT_VARIABLE architecture_flags)
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${compile} ${architecture_flags} -MD -MF ${object}.d -MT ${object} -c ${PROJECT_SOURCE_DIR}/${source}
            -o ${object}
    DEPENDS ${PROJECT_SOURCE_DIR}/${source}
    DEPFILE ${object}.d
    COMMENT "Compiling the kernels for HIP (${MOE_A2A_HIP_ARCHITECTURES})"
    VERBATIM)
endfunction()

# moe_a2a_add_hip_listings(<result> <headers> <sources>): the assembly of their kernels, isa/<stem>.<architecture>.s for each source and
# architecture, and a code object linked from it, so that calls to undefined functions fail. Lists the files in `result`.
# isa/command.txt holds the compiler's command, one word per line, for recompiling changed sources to a listing. Every
# instruction names its source line, or has none; the instructions are the same as without.
function(moe_a2a_add_hip_listings result headers sources)
  moe_a2a_hip_command(compile)
  list(APPEND compile -gline-tables-only -mllvm -use-unknown-locations=Enable)
  string(REPLACE ";" "\n" command_text "${compile}")
  file(WRITE ${CMAKE_BINARY_DIR}/isa/command.txt "${command_text}\n")
  set(listings)
  set(left_out "(collective|coded_collective|combine|coded_combine|product_combine|simulated_experts)_kernels")
  foreach(source IN LISTS sources)
    get_filename_component(stem ${source} NAME_WE)
    foreach(architecture IN LISTS MOE_A2A_ISA_ARCHITECTURES)
      # Those that take longest to optimise are left out where others show the same. gfx950 has the memory orderings of gfx942 and
      # the float8 code of gfx90a. On gfx90a rows, LL words and float8 codes of the others are those of dispatch. The products of
      # product_combine are those of grouped_gemm.
      if((architecture STREQUAL "gfx950" AND stem MATCHES "^(dispatch_kernels|${left_out})$")
         OR (architecture STREQUAL "gfx90a" AND stem MATCHES "^${left_out}$"))
        continue()
      endif()
      set(listing ${CMAKE_BINARY_DIR}/isa/${stem}.${architecture}.s)
      add_custom_command(
        OUTPUT ${listing}
        COMMAND ${compile} --offload-arch=${architecture} --offload-device-only -S ${PROJECT_SOURCE_DIR}/${source}
                -o ${listing}
        COMMAND ${MOE_A2A_HIP_COMPILER} --target=amdgcn-amd-amdhsa -mcpu=${architecture} -x assembler ${listing}
                -o ${listing}.hsaco
        DEPENDS ${PROJECT_SOURCE_DIR}/${source} ${headers}
        COMMENT "Listing ${stem} for ${architecture}"
        VERBATIM)
      list(APPEND listings ${listing})
    endforeach()
  endforeach()
  set(${result} ${listings} PARENT_SCOPE)
endfunction()
