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


FIX = kit.Fix(
    title="FlashAttention 2 as SASS for the device",
    symptom="The first requests after a start wait while the driver compiles FlashAttention 2's "
    "PTX, and again wherever its cache (~/.nv/ComputeCache) is not kept.",
    why="FlashAttention 2 asks for 8.0+PTX whatever is built for, so a GB10 compiles the PTX of "
    "its 52 (0.28.0: 76) sources by itself, one core for each. Built for 12.1a they are machine "
    "code; it costs what upstream's machine code for 8.0 costs.",
    needs=(
        kit.optional(
            ">=0.11.1",
            "PTX is compiled on the device; `patchkit build` assembles it without the fix, too",
        ),
    ),
    upstream="never: upstream builds one wheel for all devices",
    look=look,
    layer="build",
    majors=(11, 12),
    examples=(
        kit.Example(
            "0.33.0",
            _PATH,
            _READ,
            _READ_AND_BUILT,
        ),
    ),
)
