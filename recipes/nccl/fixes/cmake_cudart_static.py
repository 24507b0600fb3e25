"""The CUDA runtime, linked as make links it: statically."""

from patchkit.recipes.nccl import kit

_SHARED, _CHOSEN, _STATIC = "CUDA::cudart", "CUDA::${CUDARTLIB}", "CUDA::cudart_static"
_SHIM = """\
# Add compatibility shim if using static cudart
if(CUDARTLIB STREQUAL "cudart_static")
    list(APPEND LIBSRCFILES enhcompat.cc)
endif()
"""
_DEFAULT = """\
# Statically, as make does; -DCUDARTLIB=cudart links the shared one.
set(CUDARTLIB "cudart_static" CACHE STRING "CUDA runtime to link: cudart_static or cudart")

"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Look which CUDA runtime the targets name; if they name none, CMake links the static one."""
    text = tree.read(kit.SOURCE_FILE)
    linked = [
        argument
        for call in kit.commands(text, kit.SOURCE_FILE)
        if call.name == "target_link_libraries"
        for argument in call.arguments[1:]
        if argument.value in (_SHARED, _CHOSEN, _STATIC)
    ]
    shared = [argument for argument in linked if argument.value == _SHARED]
    done = f"{kit.SOURCE_FILE}: cudart is linked as CUDARTLIB says, by default statically"
    if not shared and _DEFAULT in text:
        return kit.found((), now="", done=done)
    if not shared:
        return kit.upstream(f"{kit.SOURCE_FILE}: cudart is linked statically")
    if len(shared) != len(linked):
        raise kit.altered(
            f"{kit.SOURCE_FILE}:{shared[0].line}: some targets link {_SHARED}, and some do not"
        )
    edits = kit.swap_text(
        kit.SOURCE_FILE, text, _SHIM, _DEFAULT + _SHIM, note="CUDARTLIB has a default"
    )
    edits += [
        kit.Edit(
            kit.SOURCE_FILE, argument.start, argument.stop, _CHOSEN, "cudart as CUDARTLIB says"
        )
        for argument in shared
    ]
    now = f"{kit.SOURCE_FILE}:{shared[0].line}: {len(shared)} targets link the shared cudart"
    return kit.found(edits, now=now, done=done)


def prove(case: kit.Case) -> str:
    """Run the build files in CMake: which cudart both libraries link, and if the shim is in."""
    cuda = case.request.target.cuda
    built = kit.configured(case.patched, cuda)
    for target in ("nccl", "nccl_static"):
        if _STATIC not in built.libraries[target] or _SHARED in built.libraries[target]:
            raise kit.ProofError(f"{target} would link {' '.join(built.libraries[target])}")
        if "enhcompat.cc" not in built.sources[target]:
            raise kit.ProofError(
                f"{target} would be built without enhcompat.cc, the shim for old cudart"
            )
    users = kit.configured(case.patched, cuda, ["-DCUDARTLIB=cudart"])
    if _SHARED not in users.libraries["nccl"] or "enhcompat.cc" in users.sources["nccl"]:
        raise kit.ProofError("-DCUDARTLIB=cudart would not link the shared one")
    return f"nccl and nccl_static link {_STATIC}; -DCUDARTLIB=cudart still links the shared one"


_LINKED = (
    "target_link_libraries(nccl\n    PRIVATE\n    ${{CMAKE_DL_LIBS}}\n    {0}\n)\n\n"
    "target_link_libraries(nccl_static\n    PUBLIC\n    ${{CMAKE_DL_LIBS}}\n    {0}\n)\n"
)

FIX = kit.Fix(
    id="cmake_cudart_static",
    title="CMake links the CUDA runtime statically, as make does",
    symptom="libnccl.so.2 from CMake needs libcudart.so.13, which the one from make does not.",
    why="src/CMakeLists.txt names CUDA::cudart, beside the static one that CMake links anyway, and "
    "never sets CUDARTLIB, which its own condition for enhcompat.cc asks for.",
    needs=(
        kit.Need(
            ">=2.29.3", kit.Severity.RECOMMENDED, "a library that only loads beside a libcudart"
        ),
    ),
    upstream="2.28.7 to 2.29.2 named no cudart, so that CMake's own choice was linked: static",
    evidence=(
        kit.Evidence("what CMake would link, before and after", "patchkit's proof", "measured"),
        kit.Evidence(
            "2.30.7 from CMake needs libcudart.so.13; 2.28.9 from CMake does not, nor do both from "
            "make",
            "libraries built with nvcc 13.0",
            "measured",
        ),
    ),
    look=look,
    prove=prove,
    prove_from_stock=True,
    layer="build",
    majors=(9, 11, 12),
    examples=(
        kit.Example(
            version="2.29.7",
            path=kit.SOURCE_FILE,
            before=_SHIM + "\n" + _LINKED.format(_SHARED),
            after=_DEFAULT + _SHIM + "\n" + _LINKED.format(_CHOSEN),
        ),
    ),
)
