"""The Marlin generators, which only write FP8-input kernels for arch 8.9 and 12.0."""

import ast
from functools import partial
from itertools import product
from types import SimpleNamespace

from patchkit.recipes.vllm import kit

_GENERATORS = "csrc/**/generate_kernels.py"
_FLAG = "SUPPORT_FP8"
_BEFORE = "if arch in [89, 120]:"
_AFTER = "if arch == 89 or arch // 10 == 12:"


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the gate in each generator."""
    paths = tree.containing(_GENERATORS, _FLAG)
    if not paths:
        raise kit.absent(f"{_GENERATORS}: no generator mentions {_FLAG}")
    edits = [
        edit
        for path in paths
        for edit in kit.swap_text(
            path, tree.read(path), _BEFORE, _AFTER, note="any SM12x"
        )
    ]
    return kit.found(
        edits,
        now=f"{kit.places(paths)}: FP8-input kernels for 8.9 and 12.0 only",
        done=f"{kit.places(paths)}: FP8-input kernels for every SM12x",
    )


def prove(case: kit.Case) -> str:
    """Run each generator's own loop over the arch list that CMake hands it."""
    wanted = {case.request.arch_list: True, "8.0": False, "9.0a": False}
    paths = case.patched.containing(_GENERATORS, _FLAG)
    asked = list(product(paths, wanted))
    run = partial(_supports_fp8, case.patched)
    answers = kit.ask(
        case.patched, [partial(run, *question) for question in asked], object
    )
    for (path, archs), got in zip(asked, answers, strict=True):
        if got is not wanted[archs]:
            raise kit.ProofError(f"{path}: {_FLAG} is {got} for {archs}")
    return f"the generators write FP8-input kernels for {case.request.arch_list}"


def _supports_fp8(tree: kit.SourceTree, path: str, archs: str) -> bool:
    """Return the flag after the statements that decide it: assignments, then the loop over argv."""
    body: list[ast.stmt] = []
    for statement in ast.parse(tree.read(path)).body:
        if isinstance(statement, ast.Assign):
            body.append(statement)
        elif isinstance(statement, ast.For):
            break
    else:
        raise kit.altered(f"{path}: no loop over the requested archs")
    names: dict[str, object] = {"sys": SimpleNamespace(argv=[path, archs])}
    kit.execute(compile(ast.Module([*body, statement], []), path, "exec"), names)
    return bool(names[_FLAG])


FIX = kit.Fix(
    title="Marlin FP8-input kernels for every SM12x",
    symptom='"marlin kernel with fp8 activation is not built." on a build for 12.1a.',
    why="The generators compare the arch with 89 and 120; for 12.1a they see 121 and leave the "
    "FP8-input kernels out.",
    needs=(
        kit.required(
            ">=0.12,<0.22",
            "a 12.1a build lacks kernels that 12.0 has",
            arch="native",
            target="gb10",
        ),
    ),
    upstream="0.22.0 asks for arch // 10 == 12",
    look=look,
    prove=prove,
    layer="build",
    examples=(
        kit.Example(
            "0.19.1",
            "csrc/quantization/marlin/generate_kernels.py",
            f"{_FLAG} = False\nfor arch in archs:\n    {_BEFORE}\n        {_FLAG} = True\n",
            f"{_FLAG} = False\nfor arch in archs:\n    {_AFTER}\n        {_FLAG} = True\n",
        ),
    ),
)
