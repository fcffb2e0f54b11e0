# Checks that CUDA's or HIP's runtime, which the kernels are built for, and PyTorch's have the same major version. The runtimes are
# compatible within one: kernels of nvcc 12.4 run beside a PyTorch for CUDA 12.8, and ROCm's libamdhip64.so.7 is the one that PyTorch's
# wheel has loaded. Across major versions one process would load two runtimes, and the streams of one mean nothing to the other.

# The version of MOE_A2A_NVCC: "13.0".
function(moe_a2a_nvcc_version result)
  execute_process(COMMAND ${MOE_A2A_NVCC} --version OUTPUT_VARIABLE said ERROR_QUIET)
  if(NOT said MATCHES "release ([0-9]+\\.[0-9]+)")
    message(FATAL_ERROR "${MOE_A2A_NVCC} --version names no release")
  endif()
  set(${result} ${CMAKE_MATCH_1} PARENT_SCOPE)
endfunction()

# The version in the name of the file behind the link libamdhip64.so: "7.0.70002"; empty if it has none.
function(moe_a2a_hip_runtime_version library result)
  get_filename_component(file ${library} REALPATH)
  string(REGEX MATCH "\\.so\\.([0-9.]+)$" versioned ${file})
  set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

# In the next two, a different major version is an error. `torch` is "none" for a PyTorch without CUDA or HIP.

# A different minor version is a notice.
function(moe_a2a_check_cuda_versions nvcc torch)
  if(torch STREQUAL "none" OR torch STREQUAL nvcc)
    return()
  endif()
  _moe_a2a_require_same_major(nvcc CUDA ${nvcc} ${torch} "CUDA_HOME to a toolkit of")
  message(WARNING "nvcc is CUDA ${nvcc}, this PyTorch is for CUDA ${torch}; minor versions of one major are compatible")
endfunction()

function(moe_a2a_check_hip_versions library version torch)
  if(torch STREQUAL "none" OR version STREQUAL "")
    return()
  endif()
  _moe_a2a_require_same_major(${library} HIP ${version} ${torch} "ROCM_PATH to a ROCm with")
endfunction()

# ours: what is of this version; remedy: what to set, for another one.
function(_moe_a2a_require_same_major ours kind version torch remedy)
  string(REGEX MATCH "^[0-9]+" major "${version}")
  string(REGEX MATCH "^[0-9]+" torch_major "${torch}")
  if(NOT major STREQUAL torch_major)
    message(FATAL_ERROR "${ours} is ${kind} ${version}, this PyTorch is for ${kind} ${torch}: the major versions have to be the same. "
                        "Set ${remedy} ${kind} ${torch_major}, install a PyTorch for ${kind} ${major}, or build for the CPU only: "
                        "pip install --config-settings=cmake.define.MOE_A2A_TARGETS=cpu")
  endif()
endfunction()
