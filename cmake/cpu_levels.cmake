# The CPU target of a wheel: its kernels once per x86-64 level (psABI). csrc/arch/cpu_level.cpp picks the highest
# level that the machine supports.
#
# Each copy has its own namespace, but code outside it that its kernels call (std::, headers shared with the host) has
# the same name in all copies. Of inline functions with the same name a linker keeps one: perhaps the AVX-512 one, even for a
# machine without AVX-512. So each copy becomes one object file in which everything is local except functions with the level
# in their names (such as its families) and the symbols by which the host identifies a kernel.

set(MOE_A2A_CPU_LEVELS)
if(NOT MOE_A2A_NATIVE AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND CMAKE_OBJCOPY AND CMAKE_LINKER)
  set(MOE_A2A_CPU_LEVELS 2 3 4)
endif()

# moe_a2a_add_cpu_levels(<library> LEVELS <2|3|4>... SOURCES <families>...)
function(moe_a2a_add_cpu_levels library)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LEVELS;SOURCES")
  foreach(level IN LISTS arg_LEVELS)
    set(copy ${library}_cpu_v${level})
    set(kernels ${copy}_kernels)
    add_library(${kernels} OBJECT ${arg_SOURCES})
    _moe_a2a_set_up(${kernels} -march=x86-64-v${level})
    target_compile_definitions(${kernels} PRIVATE MOE_A2A_CPU_LEVEL=${level})
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${copy}.o)
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${CMAKE_LINKER} -r --force-group-allocation -o ${object} $<TARGET_OBJECTS:${kernels}>
      COMMAND ${CMAKE_OBJCOPY} --wildcard --keep-global-symbol=*_cpu_v${level}* --keep-global-symbol=*kArgsMark*
              --weaken-symbol=*kArgsMark* ${object}
      DEPENDS ${kernels} $<TARGET_OBJECTS:${kernels}>
      COMMENT "The CPU target for x86-64-v${level}"
      COMMAND_EXPAND_LISTS VERBATIM)
    # Not a source of the library: everything that links it would then wait for this object before it compiles.
    add_custom_target(${copy} DEPENDS ${object})
    target_link_libraries(${library} INTERFACE ${object})
  endforeach()
  target_compile_definitions(${library} PUBLIC MOE_A2A_CPU_LEVELS=1)
endfunction()
