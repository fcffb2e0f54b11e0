# What `make kernels` compiles. Optimising a larger family for a GPU takes most of a minute, so nothing is
# optimised twice for the same check. Whatever is not optimised is compiled from one source file that includes all families, since
# reading the headers takes longest:
#
#   CUDA  Each family for sm_90a, without the recorder, as in a library, down to SASS, except simulated_experts, whose kernels are
#         combine's with another source of rows; the products, which are short of registers, also for sm_80, with it. All families
#         with the recorder, hardly optimised, for sm_80 and sm_90a down to PTX that nobody reads, and their host side.
#   HIP   Each family with the recorder: listings for the ISA check, and code objects linked from them. All families: only the front
#         end, without the recorder and for the host. The device: an object for all architectures.

# A command whose output is a stamp file.
function(_moe_a2a_check stamp sources)
  get_filename_component(folder ${stamp} DIRECTORY)
  file(MAKE_DIRECTORY ${folder})
  add_custom_command(OUTPUT ${stamp} COMMAND ${ARGN} COMMAND ${CMAKE_COMMAND} -E touch ${stamp}
                     DEPENDS ${sources} COMMENT "Checking ${stamp}" VERBATIM)
endfunction()

# Writes a source file that includes all `families`.
function(_moe_a2a_include families result)
  set(text)
  foreach(source IN LISTS families)
    string(APPEND text "#include \"${source}\"\n")
  endforeach()
  set(path ${CMAKE_BINARY_DIR}/all_families.cpp)
  file(CONFIGURE OUTPUT ${path} CONTENT "${text}")
  set(${result} ${path} PARENT_SCOPE)
endfunction()

function(_moe_a2a_cuda_checks families all headers result)
  set(checked)
  execute_process(COMMAND ${MOE_A2A_NVCC} --help OUTPUT_VARIABLE options)
  set(fast -Xcompiler=-O0)
  if(options MATCHES "--Ofast-compile") # CUDA 12.9 and later
    list(APPEND fast --Ofast-compile=max)
  endif()
  set(folder ${CMAKE_BINARY_DIR}/cuda)
  moe_a2a_cuda_command(bare MOE_A2A_RECORDING=0)
  moe_a2a_cuda_command(recorded MOE_A2A_RECORDING=1)
  set(for_sm_80 --generate-code arch=compute_80,code=compute_80)
  set(for_sm_90a --generate-code arch=compute_90a,code=compute_90a)
  foreach(source IN LISTS families)
    get_filename_component(stem ${source} NAME_WE)
    if(stem STREQUAL simulated_experts_kernels)
      continue()
    endif()
    set(stamp ${folder}/${stem}.sm_90a)
    _moe_a2a_check(${stamp} "${source};${headers}" ${bare} --resource-usage --generate-code arch=compute_90a,code=sm_90a
                   -cubin ${source} -o ${stamp}.cubin)
    list(APPEND checked ${stamp})
    if(stem STREQUAL grouped_gemm_kernels)
      set(stamp ${folder}/${stem}.sm_80)
      _moe_a2a_check(${stamp} "${source};${headers}" ${recorded} --resource-usage --generate-code arch=compute_80,code=sm_80
                     -cubin ${source} -o ${stamp}.cubin)
      list(APPEND checked ${stamp})
    endif()
  endforeach()
  _moe_a2a_check(${folder}/recorded "${families};${headers}" ${recorded} ${fast} ${for_sm_80} ${for_sm_90a} -c ${all}
                 -o ${folder}/recorded.o)
  set(object ${folder}/device.o)
  moe_a2a_add_cuda_object(${_moe_a2a_devices} ${object})
  set(${result} ${checked} ${folder}/recorded ${object} PARENT_SCOPE)
endfunction()

function(_moe_a2a_hip_checks families all headers result)
  set(folder ${CMAKE_BINARY_DIR}/hip)
  moe_a2a_hip_command(compile MOE_A2A_RECORDING=0)
  _moe_a2a_check(${folder}/bare "${families};${headers}" ${compile} --offload-arch=gfx942 -fsyntax-only ${all})
  moe_a2a_hip_command(compile MOE_A2A_RECORDING=1)
  _moe_a2a_check(${folder}/host "${families};${headers}" ${compile} --offload-host-only -fsyntax-only ${all})
  moe_a2a_add_hip_listings(listings "${headers}" "${_moe_a2a_families}")
  set(object ${folder}/device.o)
  moe_a2a_add_hip_object(${_moe_a2a_devices} ${object})
  set(${result} ${folder}/bare ${folder}/host ${listings} ${object} PARENT_SCOPE)
endfunction()

# The target `moe_a2a_kernel_checks`, for the vendors in MOE_A2A_TARGETS.
function(moe_a2a_add_kernel_checks)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/*.h)
  list(TRANSFORM _moe_a2a_families PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE families)
  _moe_a2a_include("${families}" all)
  if(cuda IN_LIST MOE_A2A_TARGETS)
    _moe_a2a_cuda_checks("${families}" ${all} "${headers}" of_cuda)
  endif()
  if(hip IN_LIST MOE_A2A_TARGETS)
    _moe_a2a_hip_checks("${families}" ${all} "${headers}" of_hip)
  endif()
  add_custom_target(moe_a2a_kernel_checks DEPENDS ${of_cuda} ${of_hip})
  add_dependencies(moe_a2a_kernel_checks moe_a2a_core_host) # what names the targets on the host
endfunction()
