"""SM100 groups that stock 0.11.1 builds for SM12x by mistake."""

from operator import methodcaller

from patchkit.recipes.vllm import kit

_PATH = "CMakeLists.txt"
_IS_SM12X = methodcaller("startswith", "12.")


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the lists with a 12.x entry whose block switches an SM100 kernel on."""
    lists = [
        entry
        for entry in kit.cuda13_lists(_PATH, tree.read(_PATH))
        if entry.sm100 and entry.variable != kit.MLA
    ]
    named = [entry for entry in lists if any(map(_IS_SM12X, entry.items))]
    edits = [
        kit.remove_list_items(
            entry.argument, _IS_SM12X, path=_PATH, note="SM100 kernels only"
        )
        for entry in named
    ]

    where = kit.places([entry.where for entry in named or lists])
    return kit.found(
        edits,
        now=f"{where}: SM100 lists names SM12x",
        done=f"{where}: SM100 lists does not name SM12x",
    )


FIX = kit.Fix(
    title="SM100 kernel lists without SM12x",
    symptom="vLLM 0.11.1 on a GB10: NVFP4 and FP8 GEMMs fail, although they were built.",
    why="Three SM100 lists name 12.0f, so the build sets ENABLE_NVFP4_SM100 and "
    "ENABLE_SCALED_MM_SM100, and the dispatch takes the SM100 kernels at compile time. Asked for "
    "12.1a, the lists of that release lead nowhere by themselves.",
    needs=(
        kit.required("==0.11.1", "SM100 kernels are chosen on SM12x", arch="family"),
    ),
    upstream="0.11.2 took 12.0f out of the SM100 lists",
    look=look,
    layer="build",
    examples=(
        kit.Example(
            "0.11.1",
            _PATH,
            'cuda_archs_loose_intersection(FP4_ARCHS "10.0f;11.0f;12.0f" "${CUDA_ARCHS}")\n'
            'list(APPEND VLLM_GPU_FLAGS "-DENABLE_NVFP4_SM100=1")\n',
            'cuda_archs_loose_intersection(FP4_ARCHS "10.0f;11.0f" "${CUDA_ARCHS}")\n'
            'list(APPEND VLLM_GPU_FLAGS "-DENABLE_NVFP4_SM100=1")\n',
            arch="family",
        ),
    ),
)
