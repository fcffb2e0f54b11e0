# The library below the bindings. It knows no PyTorch. Its host code is compiled once; csrc/runtime/backend.cpp, which
# instantiates every kernel, and backend_bare.cpp, which does so without the recorder of the trace, once per target.

set(_moe_a2a_kernel_sources csrc/runtime/backend.cpp csrc/runtime/backend_bare.cpp)

find_package(Threads REQUIRED)

function(_moe_a2a_add_vendor_object library vendor runtime)
  foreach(source IN LISTS _moe_a2a_kernel_sources)
    get_filename_component(stem ${source} NAME_WE)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${library}_${stem}_${vendor}.o)
    cmake_language(CALL moe_a2a_add_${vendor}_object ${source} ${object})
    set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
    target_sources(${library} PRIVATE ${object})
  endforeach()
  if(runtime)
    target_link_libraries(${library} PUBLIC ${runtime})
  endif()
endfunction()

# moe_a2a_add_core(<library> TARGETS <cpu|cuda|hip>... [OPTIONS <compile and link options>...])
function(moe_a2a_add_core library)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "TARGETS;OPTIONS")
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/target/*.cpp
       ${PROJECT_SOURCE_DIR}/csrc/symmetric_memory/*.cpp ${PROJECT_SOURCE_DIR}/csrc/protocol/*.cpp
       ${PROJECT_SOURCE_DIR}/csrc/runtime/*.cpp)
  list(TRANSFORM _moe_a2a_kernel_sources PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE kernel_sources)
  if(NOT cpu IN_LIST arg_TARGETS)
    list(REMOVE_ITEM sources ${kernel_sources})
  endif()
  if(MOE_A2A_NATIVE)
    # For the CPU target's kernels alone: their loops over rows are vector loops as wide as this machine has.
    set_source_files_properties(${kernel_sources} PROPERTIES COMPILE_OPTIONS -march=native)
  endif()
  add_library(${library} STATIC ${sources})
  set_target_properties(${library} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${library} PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
  target_link_libraries(${library} PUBLIC Threads::Threads rt ${arg_OPTIONS})
  # -ffp-contract=off: the sums are the same bits on every target.
  target_compile_options(${library} PRIVATE -ffp-contract=off ${MOE_A2A_WARNINGS} PUBLIC ${arg_OPTIONS})
  target_compile_definitions(${library} PUBLIC ${MOE_A2A_ABI_DEFINITIONS})
  foreach(target IN LISTS arg_TARGETS)
    string(TOUPPER ${target} name)
    target_compile_definitions(${library} PUBLIC MOE_A2A_WITH_${name}=1)
  endforeach()
  if(cuda IN_LIST arg_TARGETS)
    _moe_a2a_add_vendor_object(${library} cuda "${MOE_A2A_CUDART}")
  endif()
  if(hip IN_LIST arg_TARGETS)
    _moe_a2a_add_vendor_object(${library} hip "${MOE_A2A_HIP_RUNTIME}")
  endif()
endfunction()
