# Runs a release's own CMakeLists.txt in script mode, far enough to decide every arch list.
# Nothing is compiled, fetched or written: commands that would do so are replaced by stubs, and the
# trace of the rest tells which sources get which archs. This file itself is not traced.
#
# The stubs are a convenience: they let a release's files run to their end. They prevent nothing,
# since CMake keeps what they replace under names with an underscore (_execute_process, _file).
# What prevents is the sandbox that CMake is started in (proof/sandbox.py): Landlock, by which it can open
# the tree, its own modules and shared libraries, and write its trace; and seccomp, by which it can
# start no process, open no socket and signal nobody. With --trust-source there is no sandbox, and
# the files can do what the user can.
#
#   PATCHKIT_CUDA     version that the CUDA compiler is said to have
#   PATCHKIT_GENCODE  the -gencode flags that torch's CMake would put into CMAKE_CUDA_FLAGS
#   PATCHKIT_SCRATCH  an empty folder for whatever wants a path
cmake_minimum_required(VERSION 3.26)
set(PATCHKIT_WRAPPERS "${CMAKE_CURRENT_LIST_DIR}/arch_wrappers.cmake")
list(PREPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}/modules")

foreach(command
    add_compile_definitions add_compile_options add_custom_command add_custom_target
    add_definitions add_dependencies add_executable add_library add_link_options add_subdirectory
    configure_file enable_language find_file find_library find_path find_program get_target_property
    include_directories install link_directories link_libraries project
    set_property set_source_files_properties set_target_properties target_compile_definitions
    target_compile_features target_compile_options target_include_directories
    target_link_directories target_link_libraries target_link_options)
  cmake_language(EVAL CODE "function(${command})\nendfunction()")
endforeach()

# Reading goes on, writing does nothing.
macro(file operation)
  if("${operation}" STREQUAL "READ" AND NOT EXISTS "${ARGV1}")
    set(${ARGV2} "") # a file of an external source
  elseif("${operation}" MATCHES "^(GLOB|GLOB_RECURSE|READ|STRINGS|MD5|SHA256|REAL_PATH|RELATIVE_PATH|SIZE)$")
    _file(${operation} ${ARGN})
  endif()
endmacro()

function(execute_process)
  cmake_parse_arguments(P "" "RESULT_VARIABLE;OUTPUT_VARIABLE;ERROR_VARIABLE" "" ${ARGN})
  foreach(variable IN ITEMS "${P_OUTPUT_VARIABLE}" "${P_ERROR_VARIABLE}")
    if(variable)
      set(${variable} "" PARENT_SCOPE)
    endif()
  endforeach()
  if(P_RESULT_VARIABLE)
    set(${P_RESULT_VARIABLE} 0 PARENT_SCOPE)
  endif()
endfunction()

# Only the trace reads these calls: the outcome of one intersection, by the name it is stored under;
# and what nvcc is told to make.
function(patchkit_archs)
endfunction()
function(patchkit_code)
endfunction()
function(Python_add_library)
endfunction()
function(target_sources)
endfunction()

macro(find_package package)
  if("${package}" STREQUAL "Python")
    set(Python_FOUND TRUE)
    set(Python_VERSION_MAJOR 3)
    set(Python_VERSION_MINOR 12)
    set(Python_VERSION 3.12)
  elseif("${package}" STREQUAL "Torch")
    set(CUDA_FOUND TRUE)
    set(Torch_VERSION "${TORCH_SUPPORTED_VERSION_CUDA}")
    set(CUDA_VERSION "${PATCHKIT_CUDA}")
    set(CMAKE_CUDA_COMPILER_VERSION "${PATCHKIT_CUDA}")
    set(CMAKE_CUDA_FLAGS "${PATCHKIT_GENCODE}")
    # By now the release's functions are defined; wrapping keeps them reachable under _name.
    if(NOT COMMAND cuda_archs_loose_intersection)
      message(FATAL_ERROR "cuda_archs_loose_intersection is not defined before find_package(Torch)")
    endif()
    include("${PATCHKIT_WRAPPERS}")
  endif()
endmacro()

set(VLLM_TARGET_DEVICE cuda)
set(VLLM_PYTHON_EXECUTABLE "${CMAKE_COMMAND}")
set(CUTLASS_INCLUDE_DIR "${PATCHKIT_SCRATCH}")
set(FETCHCONTENT_BASE_DIR "${PATCHKIT_SCRATCH}")
include(CMakeLists.txt)
