# The PyTorch that the extension is built for: that of the interpreter into which it is installed.
#
# Its files are named by path instead of through find_package(Torch): for a CUDA build of PyTorch that package requires
# nvcc and imposes its own architecture flags, though our bindings only use its device-generic part.

set(_moe_a2a_torch_query [[
import pathlib, torch
root = pathlib.Path(torch.__file__).parent
vendor = "cuda" if torch.version.cuda else "hip" if torch.version.hip else "cpu"
abi = bool(torch._C._GLIBCXX_USE_CXX11_ABI)
print(torch.__version__, root, abi, vendor, torch.version.cuda or "none", torch.version.hip or "none", sep=";")
]])

# An older PyTorch is an error: its headers lack what the bindings call.
function(moe_a2a_check_torch_version version)
  set(oldest 2.11)
  if(version VERSION_LESS oldest)
    message(FATAL_ERROR "this environment has PyTorch ${version}, moe_a2a needs ${oldest} or newer. "
                        "Upgrade it first: pip install 'torch>=${oldest}'")
  endif()
endfunction()

# Sets MOE_A2A_TORCH_FOUND, _VERSION, _ROOT, _CXX11_ABI (True or False), _VENDOR (cpu, cuda or hip), _CUDA and _HIP (the versions
# of CUDA and HIP that it is for, or none) for the caller.
function(moe_a2a_find_torch)
  find_package(Python 3.10 COMPONENTS Interpreter QUIET)
  set(found FALSE)
  if(Python_Interpreter_FOUND)
    # An isolated build (plain `pip install .`) hides the target environment behind PYTHONPATH: the second
    # try looks past it, because the extension must match the PyTorch that will load it.
    foreach(environment IN ITEMS "" "--unset=PYTHONPATH")
      execute_process(
        COMMAND ${CMAKE_COMMAND} -E env ${environment} ${Python_EXECUTABLE} -c "${_moe_a2a_torch_query}"
        OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
      if(status EQUAL 0)
        set(found TRUE)
        break()
      endif()
    endforeach()
  endif()
  set(MOE_A2A_TORCH_FOUND ${found} PARENT_SCOPE)
  if(NOT found)
    return()
  endif()
  list(GET answer 0 version)
  list(GET answer 1 root)
  list(GET answer 2 cxx11_abi)
  list(GET answer 3 vendor)
  list(GET answer 4 cuda)
  list(GET answer 5 hip)
  set(MOE_A2A_TORCH_VERSION ${version} PARENT_SCOPE)
  set(MOE_A2A_TORCH_ROOT ${root} PARENT_SCOPE)
  set(MOE_A2A_TORCH_CXX11_ABI ${cxx11_abi} PARENT_SCOPE)
  set(MOE_A2A_TORCH_VENDOR ${vendor} PARENT_SCOPE)
  set(MOE_A2A_TORCH_CUDA ${cuda} PARENT_SCOPE)
  set(MOE_A2A_TORCH_HIP ${hip} PARENT_SCOPE)
endfunction()
