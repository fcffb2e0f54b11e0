# Checks that nvcc and PyTorch use the same CUDA major version. The runtime is compatible within one: kernels of nvcc 12.4 run
# beside a PyTorch for CUDA 12.8. Across major versions one process would load two runtimes.

# The version of MOE_A2A_NVCC: "13.0".
function(moe_a2a_nvcc_version result)
  execute_process(COMMAND ${MOE_A2A_NVCC} --version OUTPUT_VARIABLE said ERROR_QUIET)
  if(NOT said MATCHES "release ([0-9]+\\.[0-9]+)")
    message(FATAL_ERROR "${MOE_A2A_NVCC} --version names no release")
  endif()
  set(${result} ${CMAKE_MATCH_1} PARENT_SCOPE)
endfunction()

# A different major version is an error, a different minor version a notice. `torch` is "none" for a PyTorch without CUDA.
function(moe_a2a_check_cuda_versions nvcc torch)
  if(torch STREQUAL "none" OR torch STREQUAL nvcc)
    return()
  endif()
  string(REGEX MATCH "^[0-9]+" nvcc_major "${nvcc}")
  string(REGEX MATCH "^[0-9]+" torch_major "${torch}")
  if(NOT nvcc_major STREQUAL torch_major)
    message(FATAL_ERROR "nvcc is CUDA ${nvcc}, this PyTorch is for CUDA ${torch}: the major versions have to be the same. "
                        "Set CUDA_HOME to a toolkit of CUDA ${torch_major}, install a PyTorch for CUDA ${nvcc_major}, or build for the "
                        "CPU only: pip install --config-settings=cmake.define.MOE_A2A_TARGETS=cpu")
  endif()
  message(WARNING "nvcc is CUDA ${nvcc}, this PyTorch is for CUDA ${torch}; minor versions of one major are compatible")
endfunction()
