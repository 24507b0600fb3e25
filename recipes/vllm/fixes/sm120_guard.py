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
