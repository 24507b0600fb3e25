"""CUTLASS MLA, built for SM12x although nothing selects it there."""

from __future__ import annotations

from patchkit.edit.cmake import list_items, remove_list_items
from patchkit.errors import DriftError
from patchkit.patching.fix import Evidence, Example, Finding, Fix, Need, Request, Severity, found
from patchkit.proof.archs import INTERSECTION, parsed
from patchkit.source.tree import SourceTree

_PATH = "CMakeLists.txt"
_VARIABLE = "MLA_ARCHS"


def look(tree: SourceTree, request: Request) -> Finding:
    """Two MLA lists: the one of CUDA 13 and the one of older compilers."""
    lists = [
        call.arguments[1]
        for call in parsed(_PATH, tree.read(_PATH))
        if call.name == INTERSECTION and len(call.arguments) == 3
        if call.arguments[0].value == _VARIABLE
    ]
    if len(lists) != 2:
        raise DriftError(
            f"{_PATH}: {len(lists)} {_VARIABLE} lists, expected 2",
            why="upstream changed them, or the file was edited by hand",
            hint="restore the file from the release, or leave this fix out",
        )
    named = [argument for argument in lists if any(map(_is_sm12x, list_items(argument)))]
    edits = [
        remove_list_items(argument, _is_sm12x, path=_PATH, note="SM100 kernels only")
        for argument in named
    ]
    where = ",".join(str(argument.line) for argument in named or lists)
    return found(
        edits,
        now=f"{_PATH}:{where}: {_VARIABLE} names SM12x",
        done=f"{_PATH}:{where}: {_VARIABLE} does not name SM12x",
    )


def _is_sm12x(item: str) -> bool:
    return item.startswith("12.")


def _example(cuda13: str, older: str) -> str:
    lists = (
        f'  {INTERSECTION}({_VARIABLE} "{items}" "${{CUDA_ARCHS}}")' for items in (cuda13, older)
    )
    return "if(CUDA_13)\n{}\nelse()\n{}\nendif()\n".format(*lists)


FIX = Fix(
    id="mla_archs",
    title="CUTLASS MLA is not built for SM12x",
    symptom="A build spends minutes on sm100_cutlass_mla_kernel.cu, which a GB10 never runs.",
    why="MLA_ARCHS names 12.0f, but CUTLASS_MLA accepts capability 10.x alone. Without that entry "
    "a build is shorter and its wheel smaller; nothing changes at run time.",
    needs=(Need(">=0.11.1,<0.24", Severity.OPTIONAL, "build time only"),),
    upstream="0.24.0 took 12.0f out of MLA_ARCHS",
    evidence=(
        Evidence(
            "CutlassMLABackend accepts major 10 alone in every release", "cutlass_mla.py", "read"
        ),
        Evidence("evaluated lists, every release", "patchkit archs", "measured"),
    ),
    look=look,
    layer="build",
    examples=(
        Example(
            version="0.19.1",
            path=_PATH,
            before=_example("10.0f;11.0f;12.0f", "10.0a;12.0a;12.1a"),
            after=_example("10.0f;11.0f", "10.0a"),
        ),
    ),
)
