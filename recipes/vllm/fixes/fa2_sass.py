"""FlashAttention 2 as machine code for the device instead of PTX that it compiles at first use."""

from patchkit.recipes.vllm import kit

_PATH = "cmake/external_projects/vllm_flash_attn.cmake"
_READ = (
    'message(STATUS "vllm-flash-attn is available at ${vllm-flash-attn_SOURCE_DIR}")\n'
)
_READ_AND_BUILT = f"""\
{_READ}
# FlashAttention 2 asks for 8.0+PTX; each device that is built for gets machine code of its own.
if(TARGET {kit.FA2} AND CUDA_ARCHS)
  set(_FA2_CODES "")
  foreach(_ARCH ${{CUDA_ARCHS}})
    string(REGEX REPLACE "[.]|[+]PTX" "" _ARCH "${{_ARCH}}")
    list(APPEND _FA2_CODES
         "$<$<COMPILE_LANGUAGE:CUDA>:-gencode;arch=compute_${{_ARCH}},code=sm_${{_ARCH}}>")
  endforeach()
  get_target_property(_FA2_SRCS {kit.FA2} SOURCES)
  foreach(_SRC ${{_FA2_SRCS}})
    get_property(_OPTIONS SOURCE ${{_SRC}} TARGET_DIRECTORY {kit.FA2} PROPERTY COMPILE_OPTIONS)
    if(_OPTIONS MATCHES "-gencode")
      string(REGEX REPLACE "[$]<[$]<COMPILE_LANGUAGE:CUDA>:-gencode;arch=[^>]*>;?" ""
             _OPTIONS "${{_OPTIONS}}")
      list(APPEND _OPTIONS ${{_FA2_CODES}})
      set_property(SOURCE ${{_SRC}} TARGET_DIRECTORY {kit.FA2}
                   PROPERTY COMPILE_OPTIONS "${{_OPTIONS}}")
    endif()
  endforeach()
endif()
"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look what is made of FlashAttention 2's own arch list once its files are read."""
    note = "machine code for what is built for"
    edits = kit.swap_text(_PATH, tree.read(_PATH), _READ, _READ_AND_BUILT, note=note)
    return kit.found(
        edits,
        now=f"{_PATH}: {kit.FA2} is PTX for 8.0",
        done=f"{_PATH}: {kit.FA2} is machine code for what is built for",
    )
