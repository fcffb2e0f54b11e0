# Checks that the HIP runtime of ROCm and PyTorch's have the same major version, which is part of the library's name
# (libamdhip64.so.7). PyTorch's wheels bring a copy of theirs. Within a major version ours finds that one loaded; otherwise one
# process would load two runtimes, and the streams of one mean nothing to the other.

# The version in the name of the file behind the link libamdhip64.so: "7.0.70002"; empty if it has none.
function(moe_a2a_hip_runtime_version library result)
  get_filename_component(file ${library} REALPATH)
  string(REGEX MATCH "\\.so\\.([0-9.]+)$" versioned ${file})
  set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

# A different major version is an error. `torch` is "none" for a PyTorch without HIP.
function(moe_a2a_check_hip_versions library version torch)
  if(torch STREQUAL "none" OR version STREQUAL "")
    return()
  endif()
  string(REGEX MATCH "^[0-9]+" major "${version}")
  string(REGEX MATCH "^[0-9]+" torch_major "${torch}")
  if(NOT major STREQUAL torch_major)
    message(FATAL_ERROR "${library} is HIP ${version}, this PyTorch is for HIP ${torch}: the major versions have to be the same. "
                        "Set ROCM_PATH to a ROCm with HIP ${torch_major}, install a PyTorch for HIP ${major}, or build for the "
                        "CPU only: pip install --config-settings=cmake.define.MOE_A2A_TARGETS=cpu")
  endif()
endfunction()
