# The exporters of merged traces, beside the core: they depend on neither the core nor PyTorch. Uses two header-only libraries.
#
# nlohmann/json comes from the environment of the build (the package nlohmann_json, a build requirement) or the system.
# protozero is in no package index: taken from the system, else downloaded. Without it traces are written as Chrome JSON only.

set(MOE_A2A_PROTOZERO_URL https://github.com/mapbox/protozero/archive/refs/tags/v1.8.1.tar.gz
    CACHE STRING "Where protozero comes from if the system has none; empty: do without")
set(_moe_a2a_protozero_sha256 6c7a896f1dc08435e8cd4f3780ff688cd0bfce6890599b755f6f3cb36398dc25)

function(_moe_a2a_find_json)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import nlohmann_json, pathlib
print(pathlib.Path(nlohmann_json.__file__).parent / 'include')"
    OUTPUT_VARIABLE directory OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_path(MOE_A2A_JSON_INCLUDE nlohmann/json.hpp HINTS ${directory})
  if(NOT MOE_A2A_JSON_INCLUDE)
    message(FATAL_ERROR "The trace export needs the headers of nlohmann/json: `pip install nlohmann_json` into this "
                        "environment, or set MOE_A2A_JSON_INCLUDE to their directory")
  endif()
endfunction()

# A failed download is not an error: uses file(DOWNLOAD), since FetchContent would stop the build.
function(_moe_a2a_fetch_protozero)
  set(archive ${CMAKE_CURRENT_BINARY_DIR}/protozero.tar.gz)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/protozero)
  message(STATUS "protozero is not on this machine; trying ${MOE_A2A_PROTOZERO_URL}")
  file(DOWNLOAD ${MOE_A2A_PROTOZERO_URL} ${archive} STATUS status INACTIVITY_TIMEOUT 10 TIMEOUT 60)
  list(GET status 0 code)
  if(NOT code EQUAL 0)
    return()
  endif()
  file(SHA256 ${archive} sha256)
  if(NOT sha256 STREQUAL _moe_a2a_protozero_sha256)
    message(WARNING "${MOE_A2A_PROTOZERO_URL} has SHA-256 ${sha256} instead of ${_moe_a2a_protozero_sha256}; not used")
    return()
  endif()
  file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${folder})
  file(GLOB include ${folder}/protozero-*/include)
  set(MOE_A2A_PROTOZERO_INCLUDE ${include} CACHE PATH "" FORCE)
endfunction()

_moe_a2a_find_json()
find_path(MOE_A2A_PROTOZERO_INCLUDE protozero/pbf_writer.hpp)
if(NOT MOE_A2A_PROTOZERO_INCLUDE AND MOE_A2A_PROTOZERO_URL)
  _moe_a2a_fetch_protozero()
endif()

file(GLOB trace_export_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/trace_export/*.cpp)
if(NOT MOE_A2A_PROTOZERO_INCLUDE)
  message(STATUS "Without protozero: traces are written as Chrome JSON only")
  list(REMOVE_ITEM trace_export_sources ${PROJECT_SOURCE_DIR}/csrc/trace_export/perfetto.cpp)
endif()
add_library(moe_a2a_trace_export STATIC ${trace_export_sources})
# Never a unity build: each source has a class Writer of its own.
set_target_properties(moe_a2a_trace_export PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD OFF)
target_include_directories(moe_a2a_trace_export PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
target_include_directories(moe_a2a_trace_export SYSTEM PRIVATE ${MOE_A2A_JSON_INCLUDE})
if(MOE_A2A_PROTOZERO_INCLUDE)
  target_include_directories(moe_a2a_trace_export SYSTEM PRIVATE ${MOE_A2A_PROTOZERO_INCLUDE})
  target_compile_definitions(moe_a2a_trace_export PUBLIC MOE_A2A_WITH_PERFETTO=1)
endif()
target_compile_options(moe_a2a_trace_export PRIVATE ${MOE_A2A_WARNINGS})
target_compile_definitions(moe_a2a_trace_export PUBLIC ${MOE_A2A_ABI_DEFINITIONS})
