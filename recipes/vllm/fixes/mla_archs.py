"""CUTLASS MLA, built for SM12x although nothing selects it there."""

from patchkit.recipes.vllm import kit

_PATH = "CMakeLists.txt"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the MLA list of CUDA 13."""
    every = kit.cuda13_lists(_PATH, tree.read(_PATH))
    lists = [entry for entry in every if entry.variable == kit.MLA]
    if not lists:
        raise kit.absent(f"{_PATH}: no list is called {kit.MLA}")
    if len(lists) != 1:
        raise kit.altered(f"{_PATH}: {len(lists)} {kit.MLA} lists for CUDA 13, expected 1")
    return kit.without_sm12x(lists, kit.MLA)


_LISTS = f"""\
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
  {kit.INTERSECTION}({kit.MLA} "{{}}" "${{{{CUDA_ARCHS}}}}")
else()
  {kit.INTERSECTION}({kit.MLA} "10.0a;12.0a;12.1a" "${{{{CUDA_ARCHS}}}}")
endif()
"""

FIX = kit.Fix(
    id="mla_archs",
    title="CUTLASS MLA is not built for SM12x",
    symptom="A build spends minutes on sm100_cutlass_mla_kernel.cu, which a GB10 never runs.",
    why="MLA_ARCHS names 12.0f, but CUTLASS_MLA accepts capability 10.x alone. Without that entry "
    "a build is shorter and its wheel smaller; nothing changes at run time.",
    needs=(
        # Up to 0.18 a list of families leads nowhere when it is asked for 12.1a.
        kit.Need(">=0.19,<0.24", kit.Severity.OPTIONAL, "build time only", arch="native"),
        kit.Need(">=0.11.1,<0.24", kit.Severity.OPTIONAL, "build time only", arch="family"),
    ),
    upstream="0.24.0 took 12.0f out of MLA_ARCHS",
    evidence=(
        kit.Evidence(
            "CutlassMLABackend accepts major 10 alone in every release", "cutlass_mla.py", "read"
        ),
        kit.Evidence("evaluated lists, every release", "patchkit archs", "measured"),
    ),
    look=look,
    layer="build",
    examples=(
        kit.Example(
            version="0.19.1",
            path=_PATH,
            before=_LISTS.format("10.0f;11.0f;12.0f"),
            after=_LISTS.format("10.0f;11.0f"),
        ),
    ),
)
