# What `make kernels` compiles. Optimising a larger family for a GPU takes most of a minute, so nothing is
# optimised twice for the same check:
#
#   CUDA  sm_90a: without the recorder, as in a library. sm_80: with it, down to PTX that nobody reads, so hardly optimised; the
#         products, which are short of registers, down to SASS, and their pipeline with the recorder down to sm_90a's PTX.
#   HIP   with the recorder: listings for the ISA check, and code objects linked from them. Without it, and the
#         host side: only the front end. The device: an object for all architectures.

# A command whose output is a stamp file.
function(_moe_a2a_check stamp source headers)
  get_filename_component(folder ${stamp} DIRECTORY)
  file(MAKE_DIRECTORY ${folder})
  add_custom_command(OUTPUT ${stamp} COMMAND ${ARGN} COMMAND ${CMAKE_COMMAND} -E touch ${stamp}
                     DEPENDS ${PROJECT_SOURCE_DIR}/${source} ${headers} COMMENT "Checking ${stamp}" VERBATIM)
endfunction()

function(_moe_a2a_cuda_checks headers result)
  set(checked)
  execute_process(COMMAND ${MOE_A2A_NVCC} --help OUTPUT_VARIABLE options)
  set(fast)
  if(options MATCHES "--Ofast-compile") # CUDA 12.9 and later
    set(fast --Ofast-compile=max)
  endif()
  foreach(source IN LISTS _moe_a2a_families)
    get_filename_component(stem ${source} NAME_WE)
    set(object ${CMAKE_BINARY_DIR}/cuda/${stem}.o)
    set(recorded ${fast} --generate-code arch=compute_80,code=compute_80 -ptx -o ${object}.ptx)
    if(stem STREQUAL grouped_gemm_kernels)
      set(recorded --generate-code arch=compute_80,code=sm_80 --generate-code arch=compute_90a,code=compute_90a
          --resource-usage -c -o ${object}.recorded)
    endif()
    moe_a2a_cuda_command(compile MOE_A2A_RECORDING=0)
    _moe_a2a_check(${object}.sm_90a ${source} "${headers}" ${compile} --resource-usage
                   --generate-code arch=compute_90a,code=sm_90a -c ${PROJECT_SOURCE_DIR}/${source} -o ${object})
    moe_a2a_cuda_command(compile MOE_A2A_RECORDING=1)
    _moe_a2a_check(${object}.sm_80 ${source} "${headers}" ${compile} ${recorded} ${PROJECT_SOURCE_DIR}/${source})
    list(APPEND checked ${object}.sm_90a ${object}.sm_80)
  endforeach()
  set(object ${CMAKE_BINARY_DIR}/cuda/device.o)
  moe_a2a_add_cuda_object(${_moe_a2a_devices} ${object})
  set(${result} ${checked} ${object} PARENT_SCOPE)
endfunction()

function(_moe_a2a_hip_checks headers result)
  set(checked)
  foreach(source IN LISTS _moe_a2a_families)
    get_filename_component(stem ${source} NAME_WE)
    set(stamp ${CMAKE_BINARY_DIR}/hip/${stem})
    moe_a2a_hip_command(compile MOE_A2A_RECORDING=0)
    _moe_a2a_check(${stamp}.bare ${source} "${headers}" ${compile} --offload-arch=gfx942 --offload-arch=gfx950
                   -fsyntax-only ${PROJECT_SOURCE_DIR}/${source})
    moe_a2a_hip_command(compile MOE_A2A_RECORDING=1)
    _moe_a2a_check(${stamp}.host ${source} "${headers}" ${compile} --offload-host-only -fsyntax-only
                   ${PROJECT_SOURCE_DIR}/${source})
    list(APPEND checked ${stamp}.bare ${stamp}.host)
  endforeach()
  moe_a2a_add_hip_listings(listings "${headers}" "${_moe_a2a_families}")
  set(object ${CMAKE_BINARY_DIR}/hip/device.o)
  moe_a2a_add_hip_object(${_moe_a2a_devices} ${object})
  set(${result} ${checked} ${listings} ${object} PARENT_SCOPE)
endfunction()

# The target `moe_a2a_kernel_checks`, for the vendors in MOE_A2A_TARGETS.
function(moe_a2a_add_kernel_checks)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/*.h)
  if(cuda IN_LIST MOE_A2A_TARGETS)
    _moe_a2a_cuda_checks("${headers}" of_cuda)
  endif()
  if(hip IN_LIST MOE_A2A_TARGETS)
    _moe_a2a_hip_checks("${headers}" of_hip)
  endif()
  add_custom_target(moe_a2a_kernel_checks DEPENDS ${of_cuda} ${of_hip})
  add_dependencies(moe_a2a_kernel_checks moe_a2a_core_host) # what names the targets on the host
endfunction()
