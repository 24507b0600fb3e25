"""Which kernel group is built for which archs, as the release's own CMake says.

The CMake files are read to find every group; then the release's CMakeLists.txt runs in script mode
(no compiler, no torch, no GPU) and its trace says what each group gets. A group that was read but
not reached is not built; a call that was reached but not read is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

from patchkit.durable.staging import ScratchFolder
from patchkit.edit.cmake import Command, commands
from patchkit.errors import DriftError, ProofError, UsageError
from patchkit.proof.cmake import Traced, mirror, read_trace, run_script
from patchkit.source.tree import SourceTree
from patchkit.target import Target, list_archs, parse_arch

ROOT_FILE = "CMakeLists.txt"
EXTERNAL_FILES = "cmake/external_projects/*.cmake"
HELPER_FILES = "cmake/*.cmake"
GENCODE = "set_gencode_flags_for_srcs"
INTERSECTION = "cuda_archs_loose_intersection"
_SCRIPT = Path(__file__).with_name("arch_trace.cmake")
_FLAG = "set_gencode_flag_for_srcs"  # what the release's own GENCODE calls
# Calls that arch_trace.cmake adds for the trace alone.
_LIST, _CODE = "patchkit_archs", "patchkit_code"
_COMMANDS = (_FLAG, _LIST, _CODE, GENCODE, INTERSECTION)
_CODE_NAME = re.compile(r"(sm|compute)_[0-9]{2,4}[af]?")

Place = tuple[
    str, int
]  # file, ordinal of the call in that file: lines may move, ordinals do not


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sources that are built for one arch list."""

    place: Place
    line: int
    name: str
    variable: str
    defines: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.place[0]}:{self.line}"

    @property
    def switches(self) -> tuple[str, ...]:
        """What the group switches on, for example ``NVFP4_SM120``."""
        return tuple(
            d.removeprefix("-DENABLE_").removesuffix("=1") for d in self.defines
        )


def evaluate(
    tree: SourceTree, target: Target, arch_list: str, cuda: str
) -> list[Group]:
    """Return every kernel group of the tree and the archs it gets.

    ``arch_list`` is TORCH_CUDA_ARCH_LIST, or ``Auto`` for what torch detects on the device;
    ``cuda`` the compiler's version. Raises ProofError if CMake stops or a group cannot be read.
    """
    texts, gencode = cmake_texts(tree), target.gencode_flags(arch_list)
    key = (gencode, cuda, *texts.items())
    if key in tree.answers:  # several proofs ask the same
        return [*tree.answers[key]]
    groups = [group for path in texts for group in _find_groups(path, texts[path])]
    set_here = {
        argument.value
        for path, text in texts.items()
        for call in parsed(path, text)
        if call.name in ("set", "list") or call.name.startswith("cuda_archs_")
        for argument in call.arguments[:2]
    }
    for group in groups:
        # It would silently not be built.
        if group.variable and group.variable not in set_here:
            raise DriftError(
                f"{group.where}: {group.name} is built for {group.variable}, which nothing sets",
                why="the file was edited by hand: the list was removed or renamed",
                hint="restore the file from the release",
            )
    known = {(group.place[0], group.line) for group in groups}
    archs = _archs_by_place(_trace_calls(tree, texts, gencode, cuda), known)
    tree.answers[key] = [
        replace(group, archs=archs.get((group.place[0], group.line), ()))
        for group in groups
    ]
    return [*tree.answers[key]]


def cmake_texts(tree: SourceTree) -> dict[str, str]:
    """Return the CMake files that decide arch lists, by path."""
    paths = [ROOT_FILE, *tree.glob(HELPER_FILES), *tree.glob(EXTERNAL_FILES)]
    return {path: tree.read(path) for path in paths}


@lru_cache(maxsize=64)
def parsed(path: str, text: str) -> tuple[Command, ...]:
    """Return the commands of a CMake file, which is parsed once per text."""
    return tuple(commands(text, path))


def _is_build_file(path: str) -> bool:
    return path == ROOT_FILE or PurePosixPath(path).match(EXTERNAL_FILES)


def _find_groups(path: str, text: str) -> Iterator[Group]:
    """Yield calls that give sources an arch list, and lists that no such call in the file uses."""
    calls = parsed(path, text) if _is_build_file(path) else ()
    used = {
        _keyword_variable(call, "CUDA_ARCHS") for call in calls if call.name == GENCODE
    }
    ordinal = 0
    for index, call in enumerate(calls):
        place = (path, ordinal)
        if call.name == GENCODE:
            # The -D flags that the same branch switches on.
            beside = [
                c
                for c in calls
                if c.name == "list" and call.block and c.block == call.block
            ]
            yield Group(
                place=place,
                line=call.line,
                name=_first_source(calls[:index], _keyword_variable(call, "SRCS")),
                variable=_keyword_variable(call, "CUDA_ARCHS"),
                defines=tuple(
                    argument.value
                    for other in beside
                    for argument in other.arguments
                    if argument.value.startswith("-DENABLE_")
                ),
            )
        # An external project that builds itself only asks whether its list is empty.
        elif (
            call.name == INTERSECTION
            and call.arguments
            and path != ROOT_FILE
            and not used
        ):
            variable, name = call.arguments[0].value, PurePosixPath(path).stem
            yield Group(place=place, line=call.line, name=name, variable=variable)
        else:
            continue
        ordinal += 1


def _keyword_variable(call: Command, keyword: str) -> str:
    """Return the variable behind a keyword: ``CUDA_ARCHS "${X}"`` → ``X``."""
    values = [argument.value for argument in call.arguments]
    if keyword not in values[:-1]:
        return ""
    return values[values.index(keyword) + 1].removeprefix("${").removesuffix("}")


def _first_source(before: tuple[Command, ...], variable: str) -> str:
    """Return a name a reader recognises: folder and stem of the variable's first CUDA source."""
    name = variable
    for call in reversed(before):
        values = [argument.value for argument in call.arguments]
        sources = [value for value in values if value.endswith((".cu", ".cpp"))]
        if sources and call.name in ("set", "file") and variable in values[:2]:
            name = next(
                (source for source in sources if source.endswith(".cu")), sources[0]
            )
            break
    parts = [
        part for part in PurePosixPath(name).with_suffix("").parts if part != "csrc"
    ]
    return "/".join(part for part in parts[-2:] if not part.startswith("${"))


def _trace_calls(
    tree: SourceTree, texts: Mapping[str, str], gencode: str, cuda: str
) -> list[Traced]:
    """Return the calls that CMake made in the build files, run in a temporary folder.

    ``gencode`` is what torch's CMake puts into CMAKE_CUDA_FLAGS. Paths in the tree are relative to
    it, those of external sources to them. Raises ProofError if CMake stops.
    """
    with ScratchFolder() as folder:
        root, scratch, log = (
            Path(folder) / name for name in ("tree", "scratch", "trace")
        )
        mirror(tree, texts, root)
        (scratch / "include/cutlass").mkdir(parents=True)
        (
            scratch / "include/cutlass/cutlass.h"
        ).touch()  # some projects look whether it is there
        sources = [*filter(_is_build_file, texts), _SCRIPT.name]
        arguments = [
            *(f"--trace-source={path}" for path in sources),
            f"-DPATCHKIT_GENCODE={gencode}",
            f"-DPATCHKIT_CUDA={cuda}",
            f"-DPATCHKIT_SCRATCH={scratch}",
        ]
        ended = run_script(
            tree, _SCRIPT, arguments, folder=root, beside=Path(folder), log=log
        )
        if ended.trouble:
            lines = ended.error_text.replace(f"{root}/", "").splitlines() or [
                ended.trouble
            ]
            shown = "\n".join(f"    {line}" for line in lines if line.strip())
            raise ProofError(
                f"CMake stopped while it decided the arch lists ({ended.trouble}):\n{shown}",
                why="the release's own CMake rejects this arch list, or the files were edited by "
                "hand",
                hint="`patchkit archs` shows the tree as it is; DriftError lines above name the "
                "place",
            )
        return list(read_trace(log, _COMMANDS, root, scratch))


def _archs_by_place(
    calls: Iterable[Traced], known: set[tuple[str, int]]
) -> dict[tuple[str, int], tuple[str, ...]]:
    """Return what nvcc is told to make at each known site, as an arch list.

    A call hands over what is wanted; the flags that come of it are what counts.
    """
    found: dict[tuple[str, int], tuple[str, ...]] = {}
    codes: list[str] = []
    sources = project = None  # what the next records are about
    for call in calls:
        if call.command == _FLAG or (
            call.command == GENCODE and call.where not in known
        ):
            raise _unreadable_call(call)
        if call.command == GENCODE:
            sources, codes = call.where, []
            found[sources] = ()
        elif call.command == _CODE and sources:
            if not (call.arguments and _CODE_NAME.fullmatch(call.arguments[0])):
                raise _unreadable_call(call)
            codes.append(call.arguments[0])
            found[sources] = list_archs(codes)
        elif call.command == INTERSECTION:
            project = call.where if call.where in known else None
        elif call.command == _LIST and project:
            archs = tuple(
                arch for text in call.arguments[1:] for arch in text.split(";") if arch
            )
            try:
                for arch in archs:
                    parse_arch(arch)
            except UsageError:
                raise _unreadable_call(call) from None
            found[project], project = archs, None
    return found


def _unreadable_call(call: Traced) -> ProofError:
    """Return the error for a call that has another form than those that are known."""
    path, line = call.where
    return ProofError(
        f"{path}:{line}: CMake calls {call.command} here in a form that patchkit cannot read",
        why="upstream introduced a form of call that the reader does not know",
        hint="please report it with the vLLM version",
    )
