# The library below the bindings. It knows no PyTorch. Its host code is compiled once. Kernel sources (the families of
# kernels, *_kernels.cpp, and the device) are compiled for each target; the families a second time without the recorder
# of the trace.

file(GLOB_RECURSE _moe_a2a_families RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/*_kernels.cpp)
set(_moe_a2a_devices csrc/comm/target_device.cpp)

find_package(Threads REQUIRED)

function(_moe_a2a_add_vendor_object library vendor source recording result)
  get_filename_component(stem ${source} NAME_WE)
  if(NOT recording)
    set(stem ${stem}_bare)
  endif()
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${library}_${stem}_${vendor}.o)
  cmake_language(CALL moe_a2a_add_${vendor}_object ${source} ${object} MOE_A2A_RECORDING=${recording})
  set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  target_sources(${library} PRIVATE ${object})
  set(${result} ${${result}} ${object} PARENT_SCOPE)
endfunction()

# Adds the kernels of a vendor's target; MOE_A2A_<VENDOR>_OBJECTS is set for the caller.
function(_moe_a2a_add_vendor library vendor runtime)
  set(objects)
  foreach(source IN LISTS _moe_a2a_families)
    _moe_a2a_add_vendor_object(${library} ${vendor} ${source} 1 objects)
    _moe_a2a_add_vendor_object(${library} ${vendor} ${source} 0 objects)
  endforeach()
  _moe_a2a_add_vendor_object(${library} ${vendor} ${_moe_a2a_devices} 1 objects)
  if(runtime)
    target_link_libraries(${library} PUBLIC ${runtime})
  endif()
endfunction()

# What is common to every object of a library, compiled by the C++ compiler.
function(_moe_a2a_set_up library options)
  set_target_properties(${library} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${library} PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
  # -ffp-contract=off: the sums are the same bits on every target.
  target_compile_options(${library} PRIVATE -ffp-contract=off ${MOE_A2A_WARNINGS} PUBLIC ${options})
  target_compile_definitions(${library} PUBLIC ${MOE_A2A_ABI_DEFINITIONS})
endfunction()

# moe_a2a_add_core(<library> TARGETS <cpu|cuda|hip>... [OPTIONS <compile and link options>...])
function(moe_a2a_add_core library)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "TARGETS;OPTIONS")
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/arch/*.cpp ${PROJECT_SOURCE_DIR}/csrc/comm/*.cpp
       ${PROJECT_SOURCE_DIR}/csrc/rows/*.cpp ${PROJECT_SOURCE_DIR}/csrc/moe/*.cpp
       ${PROJECT_SOURCE_DIR}/csrc/collectives/*.cpp)
  list(TRANSFORM _moe_a2a_families PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE families)
  if(NOT cpu IN_LIST arg_TARGETS)
    list(REMOVE_ITEM sources ${families} ${PROJECT_SOURCE_DIR}/${_moe_a2a_devices})
  endif()
  if(MOE_A2A_NATIVE)
    # For the CPU target's kernels alone: their loops over rows are vector loops as wide as this machine has.
    set_source_files_properties(${families} PROPERTIES COMPILE_OPTIONS -march=native)
  endif()
  add_library(${library} STATIC ${sources})
  _moe_a2a_set_up(${library} "${arg_OPTIONS}")
  target_link_libraries(${library} PUBLIC Threads::Threads rt ${arg_OPTIONS})
  foreach(target IN LISTS arg_TARGETS)
    string(TOUPPER ${target} name)
    target_compile_definitions(${library} PUBLIC MOE_A2A_WITH_${name}=1)
  endforeach()
  if(cpu IN_LIST arg_TARGETS)
    add_library(${library}_bare OBJECT ${families})
    _moe_a2a_set_up(${library}_bare "${arg_OPTIONS}")
    target_compile_definitions(${library}_bare PRIVATE MOE_A2A_RECORDING=0)
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:${library}_bare>)
  endif()
  if(cuda IN_LIST arg_TARGETS)
    _moe_a2a_add_vendor(${library} cuda "${MOE_A2A_CUDART}")
  endif()
  if(hip IN_LIST arg_TARGETS)
    _moe_a2a_add_vendor(${library} hip "${MOE_A2A_HIP_RUNTIME}")
  endif()
endfunction()
