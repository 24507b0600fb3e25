"""Machine code for devices that nobody builds for, where PTX stands beside it."""

from collections.abc import Sequence

from patchkit.recipes.vllm import kit

_PATH = "cmake/utils.cmake"
_OLDER = "8.0;8.9;9.0"
_MACRO = "macro(set_gencode_flags_for_srcs)"
_BEFORE = """\
      set_gencode_flag_for_srcs(
        SRCS ${arg_SRCS}
        ARCH "compute_${_STRIPPED_ARCH}"
        CODE "sm_${_STRIPPED_ARCH}")
      set_gencode_flag_for_srcs(
"""
_AFTER = """\
      # Machine code loads within its major version alone; the PTX is for everything later.
      string(REGEX MATCH "^[0-9]+" _MAJOR "${_ARCH}")
      if(";${CUDA_ARCHS}" MATCHES ";${_MAJOR}[.]")
        set_gencode_flag_for_srcs(
          SRCS ${arg_SRCS}
          ARCH "compute_${_STRIPPED_ARCH}"
          CODE "sm_${_STRIPPED_ARCH}")
      endif()
      set_gencode_flag_for_srcs(
"""

# flash-attention has this macro, too, and its own replaces vLLM's while it is read.
_FLASH = "cmake/external_projects/vllm_flash_attn.cmake"
_READ = "FetchContent_MakeAvailable(vllm-flash-attn)\n"
_READ_AND_FILTERED = f"""\
{_READ}
# FlashAttention 2 asks for 8.0+PTX whatever is built for.
if(TARGET _vllm_fa2_C AND NOT ";${{CUDA_ARCHS}}" MATCHES ";8[.]")
  get_target_property(_FA2_SRCS _vllm_fa2_C SOURCES)
  foreach(_SRC ${{_FA2_SRCS}})
    get_property(_OPTIONS SOURCE ${{_SRC}} TARGET_DIRECTORY _vllm_fa2_C PROPERTY COMPILE_OPTIONS)
    string(REGEX REPLACE "[$]<[$]<COMPILE_LANGUAGE:CUDA>:-gencode;arch=[^,;]+,code=sm_8[0-9]>;?" ""
           _OPTIONS "${{_OPTIONS}}")
    set_property(SOURCE ${{_SRC}} TARGET_DIRECTORY _vllm_fa2_C
                 PROPERTY COMPILE_OPTIONS "${{_OPTIONS}}")
  endforeach()
endif()
"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look what the macro makes of an arch with +PTX."""
    text = tree.read(_PATH)
    span = kit.region(_PATH, text, _MACRO, "endmacro()")
    note = "machine code only for majors that are built for"
    edits = kit.swap_text(_PATH, text, _BEFORE, _AFTER, note=note, within=span)
    edits += kit.swap_text(
        _FLASH, tree.read(_FLASH), _READ, _READ_AND_FILTERED, note=note
    )
    return kit.found(
        edits,
        now=f"{_PATH}: +PTX makes machine code whatever is built for",
        done=f"{_PATH}: +PTX makes machine code for majors that are built for",
    )


def prove(case: kit.Case) -> str:
    """Evaluate the arch lists: dead machine code is gone, and all of it stays where it loads."""
    target = case.request.target
    wanted = case.request.arch_list

    def evaluate(tree: kit.SourceTree, archs: str) -> Sequence[kit.Group]:
        return kit.evaluate(tree, target, archs, target.cuda)

    before = evaluate(case.stock, wanted)
    after = evaluate(case.patched, wanted)
    for old, new in zip(before, after, strict=True):
        expected = tuple(_left_of(arch, target) for arch in old.archs)
        if new.archs != expected:
            raise _wrong(new, f"expected {';'.join(expected) or 'nothing'}")

    for group in evaluate(case.patched, f"{_OLDER};{wanted}"):
        if _is_virtual(group):
            raise _wrong(group, f"and {_OLDER} needs machine code of it")

    count = sum(map(_is_virtual, after))
    return f"{count} of {len(after)} kernel groups come as PTX, without machine code beside it"


def _left_of(arch: str, target: kit.Target) -> str:
    """Return an arch of a build for one major version: of others the PTX alone."""
    if kit.parse_arch(arch).major == target.major:
        return arch
    return arch.replace("+PTX", "-virtual")


def _is_virtual(group: kit.Group) -> bool:
    return any(kit.parse_arch(arch).virtual for arch in group.archs)


def _wrong(group: kit.Group, what: str) -> kit.ProofError:
    return kit.ProofError(
        f"{group.where}: {group.name} is built for {';'.join(group.archs) or 'nothing'}, {what}",
        why="the CMake files were edited by hand, or upstream changed the macro",
        hint="`patchkit archs` shows every group, stock beside patched",
    )


FIX = kit.Fix(
    title="No machine code of older devices beside PTX",
    symptom="A build for 12.1a compiles files to sm_80, sm_89 and sm_90 code that no GB10 loads.",
    why="For an entry as 8.9+PTX the macro that sets -gencode makes machine code and PTX, even if "
    "nothing is built for 8.x; a device of another major version takes the PTX. In 0.25.1 that is "
    "hadamard_transform_cuda.cu; without int8_azp scaled_mm_c2x.cu, too. An arch of the same major "
    "version in the list brings the machine code back. "
    "FlashAttention 2 is 52 sources of 8.0+PTX.",
    needs=(kit.recommended(">=0.11.1", "build time and size only"),),
    upstream="never: upstream builds one wheel for all devices",
    look=look,
    prove=prove,
    layer="build",
    majors=(11, 12),
    examples=(
        kit.Example(
            "0.33.0",
            _PATH,
            f"{_MACRO}\n  foreach(_ARCH ${{arg_CUDA_ARCHS}})\n{_BEFORE}  endforeach()\n"
            "endmacro()\n",
            f"{_MACRO}\n  foreach(_ARCH ${{arg_CUDA_ARCHS}})\n{_AFTER}  endforeach()\n"
            "endmacro()\n",
            beside={_FLASH: _READ_AND_FILTERED},
        ),
    ),
)
