# As upstream's functions are called; what nvcc would be told is all that counts here.
macro(set_gencode_flag_for_srcs)
endmacro()

macro(set_gencode_flags_for_srcs)
  cmake_parse_arguments(arg "" "" "SRCS;CUDA_ARCHS" ${ARGN})
  foreach(_ARCH ${arg_CUDA_ARCHS})
    string(REPLACE "." "" _PLAIN "${_ARCH}")
    set_gencode_flag_for_srcs(SRCS ${arg_SRCS} ARCH "compute_${_PLAIN}" CODE "sm_${_PLAIN}")
  endforeach()
endmacro()

function(cuda_archs_loose_intersection OUT SRC TGT)
  set(${OUT} "${SRC}" PARENT_SCOPE)
endfunction()
