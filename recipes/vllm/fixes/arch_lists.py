"""Arch lists: every kernel group that stock builds for 12.0 gets the device's own arch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from patchkit.frozen import Values
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

    if request.arch == "native":
        if not any(place.startswith(_ROOT) for place, _ in units):
            raise kit.DriftError(
                f"{_ROOT}: no {kit.SUPPORTED} of a CUDA 13 build names {request.target.stock}",
                why="upstream dropped the device's family, or the file was edited by hand",
                hint="restore the file from the release",
            )
        # Upstream's own lists may name the arch of the family's first member.
        if done and todo and not request.arch_list.startswith(request.target.stock):
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


def _list_units(texts: Values, request: kit.Request) -> Iterator[tuple[str, kit.Edits]]:
    """Yield the place of each list that has to name the arch, and its edits: none if it does."""
    hands_on = _hands_on(texts[_UTILS])
    arch = request.arch_list
    for path, text in texts.items():
        for entry in kit.cuda13_lists(path, text):
            members = [
                item
                for item in entry.items
                if item.rstrip("af") == request.target.stock
            ]
            if not members or entry.sm100:
                continue
            if request.arch == "family":
                if all(item.endswith("a") for item in members):
                    yield entry.where, [_widen_item(entry, members[0], request)]
            elif arch in entry.items:
                yield entry.where, []
            elif not (hands_on and _leads_on(entry, members, request)):
                edit = kit.add_list_item(
                    entry.argument, arch, path=path, note=f"name {arch}"
                )
                yield entry.where, [edit]


def _leads_on(entry: kit.ArchList, members: list[str], request: kit.Request) -> bool:
    """Check whether a list leads to the arch if it hands on what was requested."""
    if any(item.endswith("f") for item in members):
        return True
    # torch detects a plain 12.1: in the list of all archs, the entry is what makes it 12.1a.
    plain = request.arch_list.rstrip("af")
    return plain in entry.items and entry.variable != kit.SUPPORTED


def _widen_item(entry: kit.ArchList, item: str, request: kit.Request) -> kit.Edit:
    argument = entry.argument
    text = argument.text.replace(item, request.arch_list)
    note = f"{item} to {request.arch_list}"
    return kit.Edit(entry.path, argument.start, argument.stop, text, note)


def _condition_units(
    texts: Values, request: kit.Request
) -> Iterator[tuple[str, kit.Edits]]:
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
    tests = (call for call in kit.commands(utils, _UTILS) if call.name == "elseif")
    return any(test.values == ("_arch", "MATCHES", "f$") for test in tests)


def prove(case: kit.Case) -> str:
    """Evaluate both trees with the release's own CMake and compare group by group."""
    target = case.request.target
    before = _evaluate_groups(case.stock, target.stock, target)
    after = _evaluate_groups(case.patched, case.request.arch_list, target)
    if target.major == 12 and _is_release(case.stock):
        _check_stock(case, before)

    wrong = []
    for old, new in zip(before, after, strict=True):
        expected = _expected(old, case.request, case.active)
        if frozenset(new.archs) not in expected:
            sets = (";".join(sorted(archs)) or "nothing" for archs in expected)
            wrong.append(
                f"{new.where}: {new.name} is built for "
                f"{';'.join(new.archs) or 'nothing'}, expected {' or '.join(sets)}"
            )
    if wrong:
        raise kit.ProofError(
            "\n    ".join([f"{len(wrong)} kernel groups get the wrong archs:", *wrong]),
            why="the CMake files were edited by hand, or upstream changed how lists are combined",
            hint="`patchkit archs` shows every group, stock beside patched",
        )

    arch = case.request.arch_list
    built = sum(arch in group.archs for group in after)
    return f"{built} of {len(after)} kernel groups are built for {arch}"


def _evaluate_groups(
    tree: kit.SourceTree, archs: str, target: kit.Target
) -> list[kit.Group]:
    # As its list asks for it: what PTX stands beside is for ptx_only.
    groups = []
    for group in kit.evaluate(tree, target, archs, target.cuda):
        asked = [arch.replace("-virtual", "+PTX") for arch in group.archs]
        groups.append(replace(group, archs=tuple(asked)))
    return groups


def _is_release(tree: kit.SourceTree) -> bool:
    """Check whether the CMake files that were read are those of a known release."""
    cmake = {
        path: digest
        for path, digest in tree.seen.items()
        if path.endswith((".cmake", "CMakeLists.txt"))
    }
    is_known = kit.load_recipe("vllm").knows(Version(tree.version.public))
    return is_known and not kit.foreign_file(tree, cmake)


def _check_stock(case: kit.Case, before: list[kit.Group]) -> None:
    """Compare the stock tree's groups with the recorded ones."""
    stock = frozenset({case.request.target.stock})

    def may_get(group: kit.Group) -> set[frozenset[str]]:
        """Return the arch sets of a group that is asked for stock's arch in a patched tree."""
        expected = _expected(group, case.request, case.active)
        if _handed_on(group, case.active):
            expected.add(stock)
        return expected

    version = Version(case.stock.version.public)
    kit.check_stock(before, _STOCK_ARCHS, version, may_get)


def _handed_on(group: kit.Group, active: frozenset[str]) -> bool:
    """Return whether a group's list is what is asked for, since a fix says so."""
    return "int8_azp" in active and "SCALED_MM_C2X" in group.switches


def _expected(
    group: kit.Group, request: kit.Request, active: frozenset[str]
) -> set[frozenset[str]]:
    """Return the arch sets a group may get, by what stock builds for the family's first member."""
    is_family = request.arch == "family"
    stock = request.target.stock
    archs = frozenset(group.archs)
    wanted = frozenset({request.arch_list})
    members = {
        arch for arch in archs if kit.parse_arch(arch).major == request.target.major
    }
    others = archs - members

    is_mla = group.variable == kit.MLA
    if is_mla or any(define.endswith("_SM100=1") for define in group.defines):
        # Nothing on SM12x selects these: a list that does not lead there by itself stays so.
        if "sm100_lists" in active and not is_mla:
            return {others}
        return {others, others | wanted}
    if members:
        # A family build may keep plain code where the sources use no family instruction.
        if is_family and members == {stock}:
            return {others | wanted, archs}
        return {others | wanted}
    if _handed_on(group, active):
        # The only kernels of an older device that are built for the family.
        return {wanted, frozenset({stock})} if is_family else {wanted}
    if archs and "marlin_sass" in active and _is_marlin(group, request):
        return {wanted}
    return {archs}


def _is_marlin(group: kit.Group, request: kit.Request) -> bool:
    """Check whether marlin_sass builds a group; a family build leaves some kernels to PTX."""
    is_left_to_ptx = request.arch == "family" and "OTHER" in group.variable
    return "MARLIN" in group.variable and not is_left_to_ptx


FIX = kit.Fix(
    title="Arch lists that lead to the device's own code (12.1a), or its family's (12.0f)",
    symptom="A build with TORCH_CUDA_ARCH_LIST=12.1a silently falls back to 12.0 code; adding 12.1 "
    "to one list by hand makes the FP8, NVFP4 and MoE kernels vanish without an error.",
    why="CUDA_SUPPORTED_ARCHS ends at 12.0 for CUDA 13, and before 0.19 an arch with a suffix "
    "matches no list at all. The lists only work together: all that name 12.0 must lead to 12.1a, "
    "but for those of kernels that only SM100 selects.",
    needs=(
        kit.required(">=0.11.1", "no list leads to 12.1a", arch="native"),
        kit.recommended(
            ">=0.11.1,<0.19",
            "QuTLASS is built for 12.0a, which does not load on 12.1",
            arch="family",
        ),
    ),
    upstream="never; from 0.11.1 on upstream builds 12.0f for the whole family",
    look=look,
    prove=prove,
    prove_from_stock=True,
    prove_upstream=True,
    layer="build",
    majors=(11, 12),
    requires=("marlin_sass", "sm120_guard", "marlin_fp8_generator"),
    examples=(
        kit.Example(
            "0.33.0",
            _ROOT,
            "if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)\n"
            '  set(CUDA_SUPPORTED_ARCHS "9.0;10.0;11.0;12.0")\n'
            'else()\n  set(CUDA_SUPPORTED_ARCHS "9.0;12.0")\nendif()\n',
            "if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)\n"
            '  set(CUDA_SUPPORTED_ARCHS "9.0;10.0;11.0;12.0;12.1a")\n'
            'else()\n  set(CUDA_SUPPORTED_ARCHS "9.0;12.0")\nendif()\n',
            beside={
                _UTILS: 'if(_arch MATCHES "a$")\nelseif(_arch MATCHES "f$")\nendif()\n',
            },
        ),
    ),
)
