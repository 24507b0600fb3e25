"""torch's answer for a GB10, compute_20 and sm_121, taken for what it is."""

from patchkit.recipes.vllm import kit

_PATH = "cmake/utils.cmake"
_FUNCTION = "function(extract_unique_cuda_archs_ascending "
_REGEXES = (r'"arch=compute_\([0-9]+a?\)"', r'"arch=compute_\([0-9]+[af]?\)"')
_BEFORE = "    string(REGEX MATCH {} _COMPUTE ${{_ARCH}})\n"
_AFTER = """\
    # torch answers compute_20,sm_121 for a GB10: the code= half is the right one.
    string(REGEX MATCH "code=sm_([0-9]+[af]?)" _COMPUTE ${{_ARCH}})
    if(NOT _COMPUTE)
      string(REGEX MATCH {} _COMPUTE ${{_ARCH}})
    endif()
"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look how the requested archs are read out of the -gencode flags."""
    text = tree.read(_PATH)
    start, stop = kit.region(_PATH, text, _FUNCTION, "endfunction()")
    body = text[start:stop]
    regex = next((regex for regex in _REGEXES if regex in body), None)
    if regex is None:
        raise kit.altered(
            f"{_PATH}: extract_unique_cuda_archs_ascending matches no arch=compute_ as expected"
        )
    if r'"code=sm_\(' in body:
        return kit.upstream(f"{_PATH}: reads code=sm_ first")
    edits = kit.swap_text(
        _PATH,
        text,
        _BEFORE.format(regex),
        _AFTER.format(regex),
        note="read code=sm_ first",
        within=(start, stop),
    )
    return kit.found(
        edits,
        now=f"{_PATH}: reads arch=compute_ only",
        done=f"{_PATH}: reads code=sm_ first",
    )


def prove(case: kit.Case) -> str:
    """Check that the base kernels load without TORCH_CUDA_ARCH_LIST, on the device itself."""
    target = case.request.target
    groups = kit.evaluate(case.patched, target, "Auto", target.cuda)
    archs = next(group.archs for group in groups if group.variable == "CUDA_ARCHS")
    if kit.best_load(archs, target.capability) < kit.Load.COMPATIBLE:
        raise kit.ProofError(
            f"auto-detection leads to {';'.join(archs) or 'an empty arch list'}",
            why="the flags of torch's CMake are read wrongly",
            hint="set TORCH_CUDA_ARCH_LIST and please report this",
        )
    return f"auto-detection leads to {';'.join(archs)}"


FIX = kit.Fix(
    title="Arch auto-detection on a GB10",
    symptom="Built on a Spark without TORCH_CUDA_ARCH_LIST: no error, and no CUDA kernels either.",
    why='torch\'s CMake rewrites "2.1" inside "12.1" and answers arch=compute_20,code=sm_121. vLLM '
    "reads compute_20, which no list supports, and ends with an empty arch list.",
    needs=(
        kit.required(
            ">=0.11.1,<0.27", "the detected arch list is empty", target="gb10"
        ),
    ),
    upstream="0.27.0 reads code=sm_ first, and stops on an empty list",
    look=look,
    prove=prove,
    prove_from_stock=True,
    layer="build",
    examples=(
        kit.Example(
            "0.19.1",
            _PATH,
            f"{_FUNCTION}OUT FLAGS)\n{_BEFORE.format(_REGEXES[1])}endfunction()\n",
            f"{_FUNCTION}OUT FLAGS)\n{_AFTER.format(_REGEXES[1])}endfunction()\n",
        ),
    ),
)
