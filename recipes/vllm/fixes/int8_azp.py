"""INT8 products with zero points, which SM12x only reaches as kernels that trap."""

import operator
import re

from patchkit.recipes.vllm import kit

_CMAKE = "CMakeLists.txt"
_CUTLASS = (
    "csrc/quantization/w8a8/cutlass",
    "csrc/libtorch_stable/quantization/w8a8/cutlass",
)
_GUARDS = (
    "csrc/cutlass_extensions/common.hpp",
    "csrc/libtorch_stable/cutlass_extensions/common.hpp",
    "csrc/quantization/w8a8/cutlass/scaled_mm_c2x.cuh",
)
_STRUCT = "struct enable_sm80_to_sm89"
_GUARD = "__CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 890"
_WIDER = f"(({_GUARD}) || (__CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300))"

_LIST = """\
  cuda_archs_loose_intersection(SCALED_MM_2X_ARCHS
    "7.5;8.0;8.7;8.9+PTX" "${CUDA_ARCHS}")
  # subtract out the archs that are already built for 3x
  list(REMOVE_ITEM SCALED_MM_2X_ARCHS ${SCALED_MM_3X_ARCHS})
"""
_LIST_WITH_SM12X = """\
  set(SCALED_MM_AZP_ARCHS ${CUDA_ARCHS})
  list(FILTER SCALED_MM_AZP_ARCHS INCLUDE REGEX "^12[.]")
  set(SCALED_MM_OTHER_ARCHS ${CUDA_ARCHS})
  list(FILTER SCALED_MM_OTHER_ARCHS EXCLUDE REGEX "^12[.]")
  cuda_archs_loose_intersection(SCALED_MM_2X_ARCHS
    "7.5;8.0;8.7;8.9+PTX" "${SCALED_MM_OTHER_ARCHS}")
  # subtract out the archs that are already built for 3x
  list(REMOVE_ITEM SCALED_MM_2X_ARCHS ${SCALED_MM_3X_ARCHS})
  # SM12x has no INT8 kernels for zero points but these.
  list(APPEND SCALED_MM_2X_ARCHS ${SCALED_MM_AZP_ARCHS})
"""

# nvcc gives every file the archs that it is compiled for, the lowest first.
_USING = "using namespace vllm;\n"
_USING_AND_ARCHS = f"""\
{_USING}
// SM12x reaches nothing of this file but cutlass_scaled_mm_azp_sm80.
#define LOWEST_ARCH_OF(lowest, ...) lowest
#define LOWEST_ARCH(...) LOWEST_ARCH_OF(__VA_ARGS__, 0)
#if LOWEST_ARCH(__CUDA_ARCH_LIST__) >= 1200
  #define ONLY_AZP_SM80
#endif
"""
_NOT_REACHED = (
    "cutlass_scaled_mm_sm75",
    "cutlass_scaled_mm_azp_sm75",
    "cutlass_scaled_mm_sm80",
    "cutlass_scaled_mm_sm89",
    "cutlass_scaled_mm_azp_sm89",
)
_REACHED = {"cutlass_scaled_mm_sm120", "cutlass_scaled_mm_azp_sm80"}
_OPEN = ") {\n"
_CLOSE = "\n}\n"
_LEFT_OUT = """\
#if defined ONLY_AZP_SM80
  {check}(false, "{name} is not built for SM12x");
#else
"""

_ENTRY = "scaled_mm_entry.cu"
_BRANCH = r"if \((version_num [^)]*)\) \{[^}]*?(cutlass_\w+)\("
_COMPARED = r"version_num (==|>=|<) (\d+)"
_COMPARE = {"==": operator.eq, ">=": operator.ge, "<": operator.lt}


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the arch list of scaled_mm_c2x.cu, its kernels' guard, and what it compiles."""
    entry = kit.first_existing(tree, [f"{home}/{_ENTRY}" for home in _CUTLASS])
    if "cutlass_scaled_mm_azp_sm120" in tree.read(entry):
        return kit.upstream(f"{entry}: SM12x has kernels of its own")
    path = kit.first_existing(tree, [f"{home}/scaled_mm_c2x.cu" for home in _CUTLASS])
    text = tree.read(path)

    guards = [
        path for path in _GUARDS if tree.exists(path) and _STRUCT in tree.read(path)
    ]
    if len(guards) != 1:
        raise kit.altered(f"{path}: {_STRUCT} is in {len(guards)} files, expected 1")
    (guard,) = guards
    guarded = tree.read(guard)
    span = kit.region(guard, guarded, _STRUCT, "\n};")
    edits = [
        *kit.swap_text(
            _CMAKE, tree.read(_CMAKE), _LIST, _LIST_WITH_SM12X, note="name SM12x"
        ),
        *kit.swap_text(
            guard, guarded, _GUARD, _WIDER, note="let SM12x through", within=span
        ),
        *kit.swap_text(
            path, text, _USING, _USING_AND_ARCHS, note="which archs are built"
        ),
        *(edit for name in _NOT_REACHED for edit in _left_out(path, text, name)),
    ]
    return kit.found(
        edits,
        now=f"{path}: SM12x gets kernels that trap",
        done=f"{path}: SM12x has INT8 kernels for zero points",
    )


def _left_out(path: str, text: str, name: str) -> kit.Edits:
    """Return the edits that give a function no body where it is not reached."""
    start, stop = kit.region(path, text, f"void {name}(", _CLOSE)
    _, head = kit.region(path, text[start:stop], f"void {name}(", _OPEN)
    begins = start + head
    ends = stop - len(_CLOSE)

    check = "STD_TORCH_CHECK" if "STD_TORCH_CHECK(" in text else "TORCH_CHECK"
    opened = _LEFT_OUT.format(check=check, name=name)
    closed = "\n#endif"
    body = text[begins:ends]
    if body.startswith(opened) and body.endswith(closed):
        return []
    if body.endswith(closed) or "ONLY_AZP_SM80" in body:
        raise kit.altered(f"{path}: {name} is left out in part")

    note = f"{name} not for SM12x"
    return [
        kit.Edit(path, begins - len(_OPEN), begins, f"{_OPEN}{opened}", note),
        kit.Edit(path, ends, stop, f"{closed}{_CLOSE}", note),
    ]


def prove(case: kit.Case) -> str:
    """Ask the release's own dispatch which kernels SM12x reaches, and CMake what they are."""
    target = case.request.target
    groups = kit.evaluate(case.patched, target, case.request.arch_list, target.cuda)
    switches = {switch for group in groups if group.archs for switch in group.switches}
    entry = kit.first_existing(case.patched, [f"{home}/{_ENTRY}" for home in _CUTLASS])
    text = case.patched.read(entry)
    reached = {
        dispatched(entry, text, name, switches, minor)
        for name in ("cutlass_scaled_mm", "cutlass_scaled_mm_azp")
        for minor in (120, 121)
    }

    (archs,) = (group.archs for group in groups if "SCALED_MM_C2X" in group.switches)
    load = kit.best_load(archs, target.capability)
    # Machine code of one arch: with another one beside it the whole file would be compiled.
    loads = len(archs) == 1 and load >= kit.Load.COMPATIBLE
    if not loads or reached != _REACHED:
        raise kit.ProofError(
            f"{entry}: SM12x reaches {' and '.join(sorted(reached))}, and scaled_mm_c2x.cu is "
            f"built for {';'.join(archs) or 'nothing'}",
            why="upstream changed the dispatch, or a file was edited by hand",
            hint="leave the fix out with --without int8_azp, and report this release",
        )
    return f"INT8 with zero points has {archs[0]} code; nothing else of scaled_mm_c2x.cu is reached"


def dispatched(
    path: str, text: str, name: str, switches: set[str], version: int
) -> str:
    """Return which function ``name`` calls on a device, with these -DENABLE_… switches on."""
    start, stop = kit.region(path, text, f"\nvoid {name}(", _CLOSE)
    compiled = []
    conditions = [True]
    for line in text[start:stop].splitlines():
        if line.startswith("#if"):
            names = set(re.findall(r"ENABLE_(\w+)", line))
            conditions.append(names <= switches)
        elif line.startswith("#endif"):
            conditions.pop()
        elif all(conditions):
            compiled.append(line)

    for condition, function in re.findall(_BRANCH, "\n".join(compiled)):
        comparisons = re.findall(_COMPARED, condition)
        if all(_COMPARE[sign](version, int(n)) for sign, n in comparisons):
            return str(function)
    return ""


FIX = kit.Fix(
    title="INT8 with zero points runs on SM12x",
    symptom='"This kernel only supports sm[80, 89)." and a trap from INT8 models with zero points '
    "(to 0.14: results that are never written); scaled_mm_c2x.cu takes twelve minutes to compile.",
    why="On SM12x cutlass_scaled_mm_azp takes Ampere's kernels, and the list leads to 8.9+PTX, "
    "where a guard makes traps of them; what takes the minutes are kernels for 8.9 that SM12x "
    "never reaches. Built for the device itself, with a guard that lets it through, they are "
    "machine code; what only older devices reach is left out unless one is built for.",
    needs=(kit.recommended(">=0.11.1", "a trap, after twelve minutes of one core"),),
    upstream="not in 0.33.0",
    look=look,
    prove=prove,
    layer="build",
    examples=(
        kit.Example(
            "0.33.0",
            _CMAKE,
            _LIST,
            _LIST_WITH_SM12X,
            beside={
                _GUARDS[0]: f"{_STRUCT} : Kernel {{\n  #if {_WIDER}\n  #endif\n}};\n",
                f"{_CUTLASS[0]}/{_ENTRY}": "void cutlass_scaled_mm_azp() {\n}\n",
                f"{_CUTLASS[0]}/scaled_mm_c2x.cu": _USING_AND_ARCHS
                + "".join(
                    f"void {name}(Tensor& out) {{\n"
                    + _LEFT_OUT.format(check="TORCH_CHECK", name=name)
                    + "#endif\n}\n"
                    for name in _NOT_REACHED
                ),
            },
        ),
    ),
)
