"""The CUTLASS wrapper that only lets __CUDA_ARCH__ 1200 through."""

from patchkit.recipes.vllm import kit

_PATHS = (
    "csrc/cutlass_extensions/common.hpp",
    "csrc/libtorch_stable/cutlass_extensions/common.hpp",
)
_USERS = "csrc/**/c3x/*.cuh"
_STRUCT = "struct enable_sm120_only"
_BEFORE = "__CUDA_ARCH__ == 1200"
_AFTER = "__CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the guard, if any kernel is wrapped in it."""
    path = kit.first_existing(tree, _PATHS)
    users = tree.containing(_USERS, "enable_sm120_only<")
    if not users:
        return kit.upstream(f"{path}: no kernel is wrapped in enable_sm120_only")
    text = tree.read(path)
    span = kit.region(path, text, _STRUCT, "\n};")
    edits = kit.swap_text(
        path, text, _BEFORE, _AFTER, note="let the whole family through", within=span
    )
    return kit.found(
        edits,
        now=f"{path}: stops {kit.places(users)} on 12.1",
        done=f"{path}: lets {kit.places(users)} run on any SM12x",
    )


FIX = kit.Fix(
    title="enable_sm120_only lets the whole SM12x family through",
    symptom='"This kernel only supports sm120." and a trap, or FP8 results that are never written.',
    why="Built for 12.1a, __CUDA_ARCH__ is 1210, and the wrapper around the FP8 GEMMs compiles to "
    "an empty kernel (to 0.14) or a trap (0.16 to 0.21).",
    needs=(
        kit.required(
            ">=0.11.1,<0.22",
            "12.1a code is an empty kernel or a trap",
            arch="native",
            target="gb10",
        ),
    ),
    upstream="0.16.0 (block scales) and 0.22.0 (per tensor, #35568) use enable_sm120_family",
    look=look,
    layer="build",
    examples=(
        kit.Example(
            "0.19.1",
            _PATHS[0],
            "template <typename Kernel>\nstruct enable_sm120_only : Kernel {\n"
            "  #if __CUDA_ARCH__ == 1200\n  #endif\n};\n",
            "template <typename Kernel>\nstruct enable_sm120_only : Kernel {\n"
            "  #if __CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300\n  #endif\n};\n",
            beside={
                "csrc/x/c3x/scaled_mm.cuh": "using GemmKernel = enable_sm120_only<Kernel>;\n"
            },
        ),
    ),
)
