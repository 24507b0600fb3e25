"""SM100 groups that stock 0.11.1 builds for SM12x by mistake."""

from collections.abc import Iterable

from patchkit.recipes.vllm import kit

_PATH = "CMakeLists.txt"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the lists with a 12.x entry whose block switches an SM100 kernel on."""
    text = tree.read(_PATH)
    calls = kit.parsed(_PATH, text)
    lists = [
        call.arguments[1]
        for index, call in enumerate(calls)
        if _is_arch_list(call) and _switches_sm100_on(call, calls[index + 1 :])
    ]
    wrong = [argument for argument in lists if any(map(_is_sm12x, kit.list_items(argument)))]
    edits = [
        kit.remove_list_items(argument, _is_sm12x, path=_PATH, note="SM100 kernels only")
        for argument in wrong
    ]
    where = ",".join(str(argument.line) for argument in wrong or lists)
    return kit.found(
        edits,
        now=f"{_PATH}:{where}: SM100 lists name SM12x",
        done=f"{_PATH}:{where}: SM100 lists do not name SM12x",
    )


def _is_arch_list(call: kit.Command) -> bool:
    return call.name == kit.INTERSECTION and len(call.arguments) == 3


def _switches_sm100_on(call: kit.Command, later: Iterable[kit.Command]) -> bool:
    """Return whether the next -DENABLE_… before a list of another name is an SM100 one."""
    for following in later:
        if _is_arch_list(following) and following.arguments[0].value != call.arguments[0].value:
            return False
        defines = [a.value for a in following.arguments if a.value.startswith("-DENABLE_")]
        if defines:
            return defines[0].endswith("_SM100=1")
    return False


def _is_sm12x(item: str) -> bool:
    return item.startswith("12.")


FIX = kit.Fix(
    id="sm100_lists",
    title="SM100 kernel lists without SM12x",
    symptom="vLLM 0.11.1 on a GB10: NVFP4 and FP8 GEMMs fail, although they were built.",
    why="Three SM100 lists name 12.0f, so the build sets ENABLE_NVFP4_SM100 and "
    "ENABLE_SCALED_MM_SM100, and the dispatch takes the SM100 kernels at compile time.",
    needs=(kit.Need("==0.11.1", kit.Severity.REQUIRED, "SM100 kernels are chosen on SM12x"),),
    upstream="0.11.2 took 12.0f out of the SM100 lists",
    evidence=(
        kit.Evidence("evaluated lists of 0.11.1 and 0.11.2", "patchkit archs", "measured"),
        kit.Evidence("compile-time #if ENABLE_NVFP4_SM100 … #elif", "vLLM 0.11.1 csrc", "read"),
    ),
    look=look,
    layer="build",
    examples=(
        kit.Example(
            version="0.11.1",
            path=_PATH,
            before='cuda_archs_loose_intersection(FP4_ARCHS "10.0f;11.0f;12.0f" "${CUDA_ARCHS}")\n'
            'list(APPEND VLLM_GPU_FLAGS "-DENABLE_NVFP4_SM100=1")\n',
            after='cuda_archs_loose_intersection(FP4_ARCHS "10.0f;11.0f" "${CUDA_ARCHS}")\n'
            'list(APPEND VLLM_GPU_FLAGS "-DENABLE_NVFP4_SM100=1")\n',
        ),
    ),
)
