# moe_a2a._core: the only part that depends on PyTorch and pybind11 (the copy inside PyTorch's headers, so that its
# tensor converters and ours come from one version).

if(NOT MOE_A2A_TORCH_FOUND)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no PyTorch, and the extension is built for exactly one version of it. "
                      "Install torch into this environment first")
endif()
find_package(Python 3.10 COMPONENTS Interpreter Development.Module REQUIRED)
message(STATUS "moe_a2a for PyTorch ${MOE_A2A_TORCH_VERSION} in ${MOE_A2A_TORCH_ROOT}")

file(GLOB bindings CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/bindings/*.cpp)
Python_add_library(_core MODULE WITH_SOABI ${bindings})
target_include_directories(_core SYSTEM PRIVATE ${MOE_A2A_TORCH_ROOT}/include
                           ${MOE_A2A_TORCH_ROOT}/include/torch/csrc/api/include)
target_precompile_headers(_core PRIVATE ${PROJECT_SOURCE_DIR}/csrc/bindings/python.h)
# Reading that header is half of a small source's time, so several sources are compiled together. The two large ones stay separate.
set_target_properties(_core PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
set_source_files_properties(${PROJECT_SOURCE_DIR}/csrc/bindings/expert_parallel.cpp ${PROJECT_SOURCE_DIR}/csrc/bindings/collectives.cpp
                            PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_compile_definitions(_core PRIVATE TORCH_EXTENSION_NAME=_core)
target_compile_options(_core PRIVATE ${MOE_A2A_WARNINGS})
target_link_libraries(_core PRIVATE moe_a2a_core moe_a2a_trace_export)
# No rpath: `import torch` has loaded these libraries before `_core` asks for them by name.
foreach(library IN ITEMS c10 torch_cpu torch_python)
  target_link_libraries(_core PRIVATE ${MOE_A2A_TORCH_ROOT}/lib/lib${library}.so)
endforeach()
configure_file(${CMAKE_CURRENT_LIST_DIR}/build_info.py.in ${CMAKE_CURRENT_BINARY_DIR}/_build_info.py @ONLY)
install(TARGETS _core LIBRARY DESTINATION moe_a2a)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_build_info.py DESTINATION moe_a2a)
