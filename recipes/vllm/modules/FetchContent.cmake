# Stands in for CMake's own FetchContent: every external source "is" an empty folder.
function(FetchContent_Declare)
endfunction()

function(FetchContent_GetProperties name)
  string(TOLOWER "${name}" name)
  set(${name}_POPULATED FALSE PARENT_SCOPE)
endfunction()

function(FetchContent_Populate)
  foreach(name IN LISTS ARGN)
    string(TOLOWER "${name}" name)
    set(${name}_SOURCE_DIR "${PATCHKIT_SCRATCH}" PARENT_SCOPE)
    set(${name}_BINARY_DIR "${PATCHKIT_SCRATCH}" PARENT_SCOPE)
    set(${name}_POPULATED TRUE PARENT_SCOPE)
  endforeach()
endfunction()

macro(FetchContent_MakeAvailable)
  FetchContent_Populate(${ARGN})
endmacro()
