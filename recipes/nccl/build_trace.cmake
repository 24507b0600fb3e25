# Runs NCCL's CMakeLists.txt, which says for which archs it builds, in script mode. Nothing is
# compiled; commands that make targets or write files are stubs. As in vllm/arch_trace.cmake the
# stubs prevent nothing; the sandbox does that (proof/sandbox.py).
#
#   PATCHKIT_TREE  the sources
#   PATCHKIT_CUDA  version that the CUDA toolkit is said to have
cmake_minimum_required(VERSION 3.26)

set(CMAKE_SOURCE_DIR "${PATCHKIT_TREE}")
set(CMAKE_BINARY_DIR "${CMAKE_CURRENT_BINARY_DIR}")
set(PROJECT_SOURCE_DIR "${PATCHKIT_TREE}")
set(PROJECT_BINARY_DIR "${CMAKE_BINARY_DIR}")
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_CXX_COMPILER_ID GNU)
if(NOT CMAKE_INSTALL_PREFIX)
  set(CMAKE_INSTALL_PREFIX /usr/local)
endif()

foreach(command
    add_compile_definitions add_compile_options add_custom_command add_custom_target
    add_definitions add_dependencies add_executable add_library add_subdirectory configure_file
    configure_package_config_file execute_process export
    find_library install set_target_properties target_compile_definitions
    target_include_directories target_link_libraries target_link_options target_sources
    write_basic_package_version_file)
  cmake_language(EVAL CODE "function(${command})\nendfunction()")
endforeach()

# Reading goes on; nothing is written.
macro(file operation)
  if("${operation}" MATCHES "^(GLOB|GLOB_RECURSE|READ|STRINGS|RELATIVE_PATH|REAL_PATH|SIZE)$")
    _file(${operation} ${ARGN})
  endif()
endmacro()

# As CMake's own: a language that nobody chose archs for takes those of its compiler, which for
# nvcc 13.0 is its oldest arch.
macro(project name)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 75)
  endif()
endmacro()

macro(find_package package)
  if("${package}" STREQUAL "CUDAToolkit")
    set(CUDAToolkit_VERSION "${PATCHKIT_CUDA}")
    set(CUDAToolkit_INCLUDE_DIRS /usr/local/cuda/include)
  endif()
endmacro()

# CMake's modules ask the compiler; what they would find is of no use here.
macro(include file)
  if(NOT "${file}" MATCHES "^(GNUInstallDirs|CMakePackageConfigHelpers)$")
    _include("${file}")
  endif()
endmacro()

set(CMAKE_CURRENT_SOURCE_DIR "${PATCHKIT_TREE}")
_include("${PATCHKIT_TREE}/CMakeLists.txt")
