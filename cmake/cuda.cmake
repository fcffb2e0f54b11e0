# The CUDA target: kernel sources compiled by nvcc through a custom command. CMake's CUDA language would impose
# its compiler probe and its flags on every machine, and its architecture list cannot say "sm_90a, nothing else".

find_program(MOE_A2A_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
set(MOE_A2A_CUDA_FLAGS "" CACHE STRING "Further flags for nvcc (a list)")
set(MOE_A2A_CUDA_ARCHITECTURES "" CACHE STRING "CUDA architectures, such as 80;90. Empty: see gpu_architectures.cmake")

# /usr/local/bin/nvcc may be a wrapper: nvcc itself knows where the toolkit is.
function(_moe_a2a_cuda_toolkit result)
  execute_process(COMMAND ${MOE_A2A_NVCC} -v -dryrun -x cu /dev/null OUTPUT_VARIABLE said ERROR_VARIABLE said)
  if(said MATCHES "#\\$ TOP=([^\n]+)")
    get_filename_component(top ${CMAKE_MATCH_1} REALPATH)
    set(${result} ${top} PARENT_SCOPE)
  endif()
endfunction()

# Finds the CUDA runtime library; sets MOE_A2A_CUDART if both nvcc and the library exist.
function(moe_a2a_find_cuda)
  if(MOE_A2A_NVCC AND NOT MOE_A2A_CUDART)
    _moe_a2a_cuda_toolkit(toolkit)
    find_library(MOE_A2A_CUDART cudart HINTS ${toolkit} PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib
                 targets/sbsa-linux/lib)
  endif()
endfunction()

function(_moe_a2a_cuda_architecture_flags result)
  set(flags)
  foreach(architecture IN LISTS MOE_A2A_CUDA_ARCHITECTURES)
    if(architecture EQUAL 90) # wgmma and bulk copies exist in the architecture-specific set only
      set(architecture 90a)
    endif()
    list(APPEND flags -gencode arch=compute_${architecture},code=sm_${architecture})
  endforeach()
  # The oldest one also as PTX: a GPU newer than this list compiles it when the library is loaded.
  list(GET MOE_A2A_CUDA_ARCHITECTURES 0 oldest)
  if(NOT oldest EQUAL 90)
    list(APPEND flags -gencode arch=compute_${oldest},code=compute_${oldest})
  endif()
  set(${result} ${flags} PARENT_SCOPE)
endfunction()

# The compile command, with the definitions that follow `result`. --fmad=false: sums have the same bits on every target.
function(moe_a2a_cuda_command result)
  moe_a2a_find_cuda()
  if(NOT MOE_A2A_CUDART)
    message(FATAL_ERROR "MOE_A2A_TARGETS names cuda, but nvcc or libcudart is missing "
                        "(MOE_A2A_NVCC=${MOE_A2A_NVCC}, MOE_A2A_CUDART=${MOE_A2A_CUDART})")
  endif()
  set(definitions ${MOE_A2A_ABI_DEFINITIONS} ${ARGN})
  list(TRANSFORM definitions PREPEND -D)
  set(${result} ${MOE_A2A_NVCC} -x cu -std=c++20 -O3 --fmad=false --expt-relaxed-constexpr ${MOE_A2A_CUDA_FLAGS}
      -ccbin ${CMAKE_CXX_COMPILER} -Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off -I${PROJECT_SOURCE_DIR}/csrc
      ${definitions} PARENT_SCOPE)
endfunction()

# moe_a2a_add_cuda_object(<source> <object> [<definition>...]): compiles `source` to `object`, for all architectures.
function(moe_a2a_add_cuda_object source object)
  moe_a2a_cuda_command(compile ${ARGN})
  _moe_a2a_cuda_architecture_flags(architecture_flags)
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${compile} ${architecture_flags} -MD -MF ${object}.d -MT ${object} -c ${PROJECT_SOURCE_DIR}/${source} -o ${object}
    DEPENDS ${PROJECT_SOURCE_DIR}/${source}
    DEPFILE ${object}.d
    COMMENT "Compiling the kernels for CUDA"
    VERBATIM)
endfunction()
