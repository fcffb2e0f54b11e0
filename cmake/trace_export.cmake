# The exporters of merged traces, beside the core: they know neither it nor PyTorch. Two libraries that are headers only;
# where they are not in a system path, MOE_A2A_JSON_INCLUDE and MOE_A2A_PROTOZERO_INCLUDE name their directories.

find_path(MOE_A2A_JSON_INCLUDE nlohmann/json.hpp)
find_path(MOE_A2A_PROTOZERO_INCLUDE protozero/pbf_writer.hpp)

foreach(found IN ITEMS "MOE_A2A_JSON_INCLUDE nlohmann-json3-dev" "MOE_A2A_PROTOZERO_INCLUDE libprotozero-dev")
  separate_arguments(found)
  list(POP_FRONT found variable package)
  if(NOT ${variable})
    message(FATAL_ERROR "The trace export needs the headers of ${package}. On Debian or Ubuntu: apt-get install "
                        "${package}; elsewhere set ${variable}")
  endif()
endforeach()

file(GLOB trace_export_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/trace_export/*.cpp)
add_library(moe_a2a_trace_export STATIC ${trace_export_sources})
set_target_properties(moe_a2a_trace_export PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_include_directories(moe_a2a_trace_export PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
target_include_directories(moe_a2a_trace_export SYSTEM PRIVATE ${MOE_A2A_JSON_INCLUDE} ${MOE_A2A_PROTOZERO_INCLUDE})
target_compile_options(moe_a2a_trace_export PRIVATE ${MOE_A2A_WARNINGS})
target_compile_definitions(moe_a2a_trace_export PUBLIC ${MOE_A2A_ABI_DEFINITIONS})
