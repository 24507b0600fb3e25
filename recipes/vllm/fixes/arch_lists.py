"""Arch lists: every kernel group that stock builds for 12.0 gets the device's own arch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from patchkit.recipes.vllm import kit

_ROOT = "CMakeLists.txt"
_UTILS = "cmake/utils.cmake"
_QUTLASS = "cmake/external_projects/qutlass.cmake"
_STOCK_ARCHS = Path(__file__).parents[1] / "stock_archs.csv"

# Before 0.19 a requested arch with a suffix matches no list entry at all, not even itself.
_MATCH = """\
        list(REMOVE_ITEM _TGT_CUDA_ARCHS "${_base}")
        list(APPEND _CUDA_ARCHS "${_arch}")
"""
_MATCH_EXACT = """\
      elseif("${_arch}" IN_LIST _TGT_CUDA_ARCHS)
        list(REMOVE_ITEM _TGT_CUDA_ARCHS "${_arch}")
        list(APPEND _CUDA_ARCHS "${_arch}")
"""
# QuTLASS chooses its code by matching the evaluated list, and stops CMake on one it cannot match.
_QUTLASS_CHOICE = r'elseif(QUTLASS_ARCHS MATCHES "12\\.0a")'
_QUTLASS_WIDER = r'elseif(QUTLASS_ARCHS MATCHES "12\\.[01][af]")'


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read every list that has to name the arch: all do, none does, or the file was edited."""
    texts = kit.cmake_texts(tree)
    units = [*_list_units(texts, request), *_condition_units(texts, request)]
    done = [place for place, edits in units if not edits]
    todo = [place for place, edits in units if edits]
    if request.arch == "native" and not any(
        place.startswith(_ROOT) for place, _ in units
    ):
        raise kit.DriftError(
            f"{_ROOT}: no {kit.SUPPORTED} of a CUDA 13 build names {request.target.stock}",
            why="upstream dropped the device's family, or the file was edited by hand",
            hint="restore the file from the release",
        )
    if done and todo and request.arch == "native":
        raise kit.DriftError(
            f"{todo[0]}: does not lead to {request.arch_list}, but {done[0]} does",
            why="the tree is half patched, or was edited by hand",
            hint="restore the CMake files from the release",
        )
    edits = [edit for _, of_unit in units for edit in of_unit]
    where = kit.places(todo or done) or _ROOT
    return kit.found(
        edits,
        now=f"{where}: no way to {request.arch_list}",
        done=f"{where}: lists lead to {request.arch_list}",
    )


def _list_units(
    texts: dict[str, str], request: kit.Request
) -> Iterator[tuple[str, list[kit.Edit]]]:
    hands_on = _hands_on(texts[_UTILS])
    wanted, stock = request.arch_list, request.target.stock
    entries = (entry for file in texts.items() for entry in kit.cuda13_lists(*file))
    for entry in entries:
        members = [item for item in entry.items if item.rstrip("af") == stock]
        if not members or entry.sm100:
            continue
        if request.arch == "family":
            if all(item.endswith("a") for item in members):
                argument, note = entry.argument, f"{members[0]} to {wanted}"
                text = argument.text.replace(members[0], wanted)
                edit = kit.Edit(entry.path, argument.start, argument.stop, text, note)
                yield entry.where, [edit]
        elif wanted in entry.items:
            yield entry.where, []
        # torch detects a plain 12.1: in the list of all archs, the entry is what makes it 12.1a.
        elif not hands_on or not (
            (wanted.rstrip("af") in entry.items and entry.variable != kit.SUPPORTED)
            or any(item.endswith("f") for item in members)
        ):
            edit = kit.add_list_item(
                entry.argument, wanted, path=entry.path, note=f"name {wanted}"
            )
            yield entry.where, [edit]


def _condition_units(
    texts: dict[str, str], request: kit.Request
) -> Iterator[tuple[str, list[kit.Edit]]]:
    utils = texts[_UTILS]
    if _hands_on(utils):
        return
    if request.arch == "native":
        span = kit.region(
            _UTILS, utils, f"function({kit.INTERSECTION} ", "endfunction()"
        )
        edits = kit.swap_text(
            _UTILS,
            utils,
            f"{_MATCH}      endif()\n",
            f"{_MATCH}{_MATCH_EXACT}      endif()\n",
            note="let an arch with a suffix match itself",
            within=span,
        )
        yield _UTILS, edits
    if request.target.major == 12 and _QUTLASS in texts:
        edits = kit.swap_text(
            _QUTLASS,
            texts[_QUTLASS],
            _QUTLASS_CHOICE,
            _QUTLASS_WIDER,
            note="recognise the arch",
        )
        yield _QUTLASS, edits


def _hands_on(utils: str) -> bool:
    """Return whether a list that names the family hands on the arch as it was requested (0.19)."""
    tests = (call for call in kit.parsed(_UTILS, utils) if call.name == "elseif")
    return any(
        [a.value for a in test.arguments] == ["_arch", "MATCHES", "f$"]
        for test in tests
    )


def prove(case: kit.Case) -> str:
    """Evaluate both trees with the release's own CMake and compare group by group."""
    target = case.request.target
    lists = ((case.stock, target.stock), (case.patched, case.request.arch_list))
    before, after = (
        # As its list asks for it: what PTX stands beside is for ptx_only.
        [
            replace(
                group, archs=tuple(a.replace("-virtual", "+PTX") for a in group.archs)
            )
            for group in kit.evaluate(tree, target, archs, target.cuda)
        ]
        for tree, archs in lists
    )
    cmake = {
        p: d
        for p, d in case.stock.seen.items()
        if p.endswith((".cmake", "CMakeLists.txt"))
    }
    version = Version(case.stock.version.public)
    known = kit.load_recipe().knows(version) and not kit.foreign_file(case.stock, cmake)
    if known and target.major == 12:

        def may_get(group: kit.Group) -> set[frozenset[str]]:
            """Return the arch sets of a group that is asked for stock's arch in a patched tree."""
            expected = _expected(group, case.request, case.active)
            stock = (
                {frozenset({target.stock})} if _handed_on(group, case.active) else set()
            )
            return expected | stock

        kit.check_stock(before, _STOCK_ARCHS, version, may_get)
    wrong = [
        f"{new.where}: {new.name} is built for {';'.join(new.archs) or 'nothing'}, "
        f"expected {' or '.join(';'.join(sorted(e)) or 'nothing' for e in expected)}"
        for old, new in zip(before, after, strict=True)
        if frozenset(new.archs)
        not in (expected := _expected(old, case.request, case.active))
    ]
    if wrong:
        raise kit.ProofError(
            "\n    ".join([f"{len(wrong)} kernel groups get the wrong archs:", *wrong]),
            why="the CMake files were edited by hand, or upstream changed how lists are combined",
            hint="`patchkit archs` shows every group, stock beside patched",
        )
    built = sum(1 for group in after if case.request.arch_list in group.archs)
    return (
        f"{built} of {len(after)} kernel groups are built for {case.request.arch_list}"
    )


def _handed_on(group: kit.Group, active: frozenset[str]) -> bool:
    """Return whether a group's list is what is asked for, since a fix says so."""
    return "int8_azp" in active and "SCALED_MM_C2X" in group.switches


def _expected(
    group: kit.Group, request: kit.Request, active: frozenset[str]
) -> set[frozenset[str]]:
    """Return the arch sets a group may get, by what stock builds for the family's first member."""
    members = {
        a for a in group.archs if kit.parse_arch(a).major == request.target.major
    }
    others = frozenset(group.archs) - members
    wanted = frozenset({request.arch_list})
    if group.variable == kit.MLA or any(d.endswith("_SM100=1") for d in group.defines):
        # Nothing on SM12x selects these: a list that does not lead there by itself stays so.
        left_out = "sm100_lists" in active and group.variable != kit.MLA
        return {others} if left_out else {others, others | wanted}
    if members:
        # A family build may keep plain code where the sources use no family instruction.
        plain = request.arch == "family" and members == {request.target.stock}
        return {others | wanted, frozenset(group.archs)} if plain else {others | wanted}
    if _handed_on(group, active):
        # The only kernels of an older device that are built for the family.
        return (
            {wanted}
            if request.arch == "native"
            else {wanted, frozenset({request.target.stock})}
        )
    other_files = request.arch == "family" and "OTHER" in group.variable
    if (
        "marlin_sass" in active
        and "MARLIN" in group.variable
        and group.archs
        and not other_files
    ):
        return {wanted}
    return {frozenset(group.archs)}


FIX = kit.Fix(
    id="arch_lists",
    title="Arch lists that lead to the device's own code (12.1a), or its family's (12.0f)",
    symptom="A build with TORCH_CUDA_ARCH_LIST=12.1a silently falls back to 12.0 code; adding 12.1 "
    "to one list by hand makes the FP8, NVFP4 and MoE kernels vanish without an error.",
    why="CUDA_SUPPORTED_ARCHS ends at 12.0 for CUDA 13, and before 0.19 an arch with a suffix "
    "matches no list at all. The lists only work together: all that name 12.0 must lead to 12.1a, "
    "but for those of kernels that only SM100 selects.",
    needs=(
        kit.Need(
            ">=0.11.1", kit.Severity.REQUIRED, "no list leads to 12.1a", arch="native"
        ),
        kit.Need(
            ">=0.11.1,<0.19",
            kit.Severity.RECOMMENDED,
            "QuTLASS is built for 12.0a, which does not load on 12.1",
            arch="family",
        ),
    ),
    upstream="never; from 0.11.1 on upstream builds 12.0f for the whole family",
    evidence=(
        kit.Evidence(
            "ten files of 0.19.1 and 0.33.0 have the same instructions for 12.1a and 12.0f",
            "nvcc 13.0.88: docs/kernel-proof.md",
            "compiled",
        ),
        kit.Evidence(
            "each release's own CMake, run before and after, gives 12.1a for every group",
            "patchkit archs; tests/integration",
            "measured",
        ),
        kit.Evidence(
            "the FP4 conversions and block-scaled MMA assemble for 121a and 120f, not for plain "
            "121 or 120",
            "nvcc 13.0.88",
            "compiled",
        ),
        kit.Evidence(
            "12.1a code runs on a GB10",
            "NVIDIA's binary compatibility rules",
            "inferred",
        ),
    ),
    look=look,
    prove=prove,
    prove_from_stock=True,
    prove_upstream=True,
    layer="build",
    majors=(11, 12),
    requires=("marlin_sass", "sm120_guard", "marlin_fp8_generator"),
    examples=(
        kit.Example(
            version="0.33.0",
            path=_ROOT,
            beside={
                _UTILS: 'if(_arch MATCHES "a$")\nelseif(_arch MATCHES "f$")\nendif()\n',
            },
            before="if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)\n"
            '  set(CUDA_SUPPORTED_ARCHS "9.0;10.0;11.0;12.0")\n'
            'else()\n  set(CUDA_SUPPORTED_ARCHS "9.0;12.0")\nendif()\n',
            after="if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)\n"
            '  set(CUDA_SUPPORTED_ARCHS "9.0;10.0;11.0;12.0;12.1a")\n'
            'else()\n  set(CUDA_SUPPORTED_ARCHS "9.0;12.0")\nendif()\n',
        ),
    ),
)
