"""CUTLASS MLA, built for SM12x although nothing selects it there."""

from patchkit.recipes.vllm import kit

_PATH = "CMakeLists.txt"
_VARIABLE = "MLA_ARCHS"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read two MLA lists: the one of CUDA 13 and the one of older compilers."""
    lists = [
        call.arguments[1]
        for call in kit.parsed(_PATH, tree.read(_PATH))
        if call.name == kit.INTERSECTION and len(call.arguments) == 3
        if call.arguments[0].value == _VARIABLE
    ]
    if not lists:
        raise kit.absent(f"{_PATH}: no list is called {_VARIABLE}")
    if len(lists) != 2:
        raise kit.altered(f"{_PATH}: {len(lists)} {_VARIABLE} lists, expected 2")
    named = [argument for argument in lists if any(map(_is_sm12x, kit.list_items(argument)))]
    edits = [
        kit.remove_list_items(argument, _is_sm12x, path=_PATH, note="SM100 kernels only")
        for argument in named
    ]
    where = ",".join(str(argument.line) for argument in named or lists)
    return kit.found(
        edits,
        now=f"{_PATH}:{where}: {_VARIABLE} names SM12x",
        done=f"{_PATH}:{where}: {_VARIABLE} does not name SM12x",
    )


def _is_sm12x(item: str) -> bool:
    return item.startswith("12.")


def _example(cuda13: str, older: str) -> str:
    lists = (
        f'  {kit.INTERSECTION}({_VARIABLE} "{items}" "${{CUDA_ARCHS}}")'
        for items in (cuda13, older)
    )
    return "if(CUDA_13)\n{}\nelse()\n{}\nendif()\n".format(*lists)


FIX = kit.Fix(
    id="mla_archs",
    title="CUTLASS MLA is not built for SM12x",
    symptom="A build spends minutes on sm100_cutlass_mla_kernel.cu, which a GB10 never runs.",
    why="MLA_ARCHS names 12.0f, but CUTLASS_MLA accepts capability 10.x alone. Without that entry "
    "a build is shorter and its wheel smaller; nothing changes at run time.",
    needs=(kit.Need(">=0.11.1,<0.24", kit.Severity.OPTIONAL, "build time only"),),
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
            before=_example("10.0f;11.0f;12.0f", "10.0a;12.0a;12.1a"),
            after=_example("10.0f;11.0f", "10.0a"),
        ),
    ),
)
