# The GPU architectures that kernels are compiled for. The first of these that names any, in the order of PyTorch's own extensions:
#
#   1. MOE_A2A_CUDA_ARCHITECTURES, MOE_A2A_HIP_ARCHITECTURES
#   2. the environment's TORCH_CUDA_ARCH_LIST ("8.0 9.0a+PTX"), PYTORCH_ROCM_ARCH ("gfx90a;gfx942"); containers often set them
#   3. the GPUs of this machine
#   4. all that our kernels are written for
#
# Of 2 and 3 only what is in 4 counts. CUDA's machine code runs on all GPUs of its major version: there 8.6 means 80.

find_program(MOE_A2A_NVIDIA_SMI nvidia-smi)
find_program(MOE_A2A_ROCM_AGENTS rocm_agent_enumerator HINTS $ENV{ROCM_HOME}/bin $ENV{ROCM_PATH}/bin $ENV{HIP_PATH}/bin /opt/rocm/bin)

function(_moe_a2a_cuda_majors text result)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${text}")
  list(TRANSFORM found REPLACE "\\.[0-9]" "0")
  set(${result} ${found} PARENT_SCOPE)
endfunction()

function(_moe_a2a_gfx_names text result)
  string(REGEX MATCHALL "gfx[0-9a-f]+" found "${text}") # without features, as in gfx90a:xnack-
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# 2 to 4. `reader` finds the names in a text: in `asked`, the environment's, else in what `program` prints about this machine's GPUs.
function(_moe_a2a_choose_architectures result supported reader asked program)
  set(said ${asked})
  if(asked STREQUAL "" AND program)
    execute_process(COMMAND ${program} ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE said ERROR_QUIET)
    if(NOT status EQUAL 0) # no driver, say
      set(said)
    endif()
  endif()
  cmake_language(CALL ${reader} "${said}" named)
  set(found)
  foreach(architecture IN LISTS supported) # the oldest first
    if(architecture IN_LIST named)
      list(APPEND found ${architecture})
    endif()
  endforeach()
  if(NOT found)
    set(found ${supported})
    if(asked)
      message(WARNING "the environment asks for \"${asked}\", for which moe_a2a has no kernels: building for ${supported}")
    endif()
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# `known`: what nvcc --list-gpu-code prints.
function(moe_a2a_choose_cuda_architectures known result)
  set(supported 80 90)
  if(known MATCHES "sm_100")
    list(APPEND supported 100)
  endif()
  _moe_a2a_choose_architectures(found "${supported}" _moe_a2a_cuda_majors "$ENV{TORCH_CUDA_ARCH_LIST}" "${MOE_A2A_NVIDIA_SMI}"
                                --query-gpu=compute_cap --format=csv,noheader)
  set(${result} ${found} PARENT_SCOPE)
endfunction()

function(moe_a2a_choose_hip_architectures result)
  _moe_a2a_choose_architectures(found "gfx90a;gfx942;gfx950" _moe_a2a_gfx_names "$ENV{PYTORCH_ROCM_ARCH}"
                                "${MOE_A2A_ROCM_AGENTS}")
  set(${result} ${found} PARENT_SCOPE)
endfunction()
