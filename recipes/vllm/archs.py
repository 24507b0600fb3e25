"""Evaluate, with the release's own CMake files, for which archs each kernel group is built.

First the CMake files are read, to find every group. Then the release's CMakeLists.txt runs in
CMake's script mode (no compiler, no torch, no GPU), and the trace of this run tells the archs of
each group. A group that is not in the trace is not built. A call in the trace that was not found in
the files is an error.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePosixPath

from patchkit.durable.staging import ScratchFolder
from patchkit.edit.cmake import Command, Commands, commands
from patchkit.errors import DriftError, ProofError, UsageError
from patchkit.frozen import Texts, Values, frozen
from patchkit.proof.cmake import Traced, mirror, read_trace, run_script
from patchkit.source.tree import SourceTree
from patchkit.target import Target, list_archs, parse_arch

ROOT_FILE = "CMakeLists.txt"
EXTERNAL_FILES = "cmake/external_projects/*.cmake"
HELPER_FILES = "cmake/*.cmake"
GENCODE = "set_gencode_flags_for_srcs"
INTERSECTION = "cuda_archs_loose_intersection"
_SCRIPT = Path(__file__).with_name("arch_trace.cmake")
_WRAPPERS = "arch_wrappers.cmake"
_FLAG = "set_gencode_flag_for_srcs"  # the release's own definition of GENCODE calls it
# Commands that the wrappers call only so that they are in the trace.
_LIST = "patchkit_archs"
_CODE = "patchkit_code"
_COMMANDS = (_FLAG, _LIST, _CODE, GENCODE, INTERSECTION)
_SWITCH = re.compile("-DENABLE_")
_CODE_NAME = r"(sm|compute)_[0-9]{2,4}[af]?"

Site = tuple[str, int]  # file, line of a call


@frozen
class Group:
    """CUDA sources that are built for one arch list.

    ``site`` is the call that gives them the list, ``variable`` the CMake variable with the list,
    ``defines`` are flags that the group adds, and ``archs`` is empty if the group is not built.
    """

    site: Site
    name: str
    variable: str
    defines: Texts = ()
    archs: Texts = ()

    @property
    def where(self) -> str:
        path, line = self.site
        return f"{path}:{line}"

    @property
    def switches(self) -> Texts:
        """Return the switches that the group sets, for example ``NVFP4_SM120``."""
        return tuple(
            define.removeprefix("-DENABLE_").removesuffix("=1")
            for define in self.defines
        )


def evaluate(
    tree: SourceTree,
    target: Target,
    arch_list: str,
    cuda: str,
) -> list[Group]:
    """Return every kernel group of the tree with the archs that it is built for.

    ``arch_list`` is TORCH_CUDA_ARCH_LIST, or ``Auto`` for what torch detects on the device;
    ``cuda`` is the version of the CUDA compiler. Raises DriftError if nothing sets the list of a
    group, ProofError if CMake stops or a call cannot be read.
    """
    texts = cmake_texts(tree)
    gencode = target.gencode_flags(arch_list)
    key = (gencode, cuda, *texts.items())

    # The result is kept in the tree, since several proofs need it and a run of CMake takes long.
    if key not in tree.answers:
        groups = [group for path in texts for group in _find_groups(path, texts[path])]
        _require_lists(groups, texts)

        sites = {group.site for group in groups}
        archs = _archs_by_site(_trace_calls(tree, texts, gencode, cuda), sites)
        tree.answers[key] = [
            replace(group, archs=archs.get(group.site, ())) for group in groups
        ]
    return [*tree.answers[key]]


def _require_lists(groups: Iterable[Group], texts: Values) -> None:
    """Raise DriftError if nothing sets the list of a group: CMake would silently not build it."""
    variables: set[str] = set()
    for path, text in texts.items():
        for call in commands(text, path):
            if call.name in ("set", "list") or call.name.startswith("cuda_archs_"):
                variables.update(call.values[:2])

    for group in groups:
        if group.variable and group.variable not in variables:
            raise DriftError(
                f"{group.where}: {group.name} is built for {group.variable}, which nothing sets",
                why="the file was edited by hand: the list was removed or renamed",
                hint="restore the file from the release",
            )


def cmake_texts(tree: SourceTree) -> Values:
    """Return path → text of the CMake files that decide arch lists."""
    paths = [ROOT_FILE, *tree.glob(HELPER_FILES), *tree.glob(EXTERNAL_FILES)]
    return {path: tree.read(path) for path in paths}


def _is_build_file(path: str) -> bool:
    return path == ROOT_FILE or PurePosixPath(path).match(EXTERNAL_FILES)


def _find_groups(path: str, text: str) -> Iterator[Group]:
    """Yield a group for each call in a build file that gives sources an arch list.

    If an external project is built by its own CMake, its file has no such call: then each arch list
    that the file computes is a group.
    """
    if not _is_build_file(path):
        return

    calls = commands(text, path)
    names = {call.name for call in calls}
    # Such a project's file uses the list only to decide whether to build the project.
    builds_itself = path != ROOT_FILE and GENCODE not in names

    for index, call in enumerate(calls):
        site = (path, call.line)
        if call.name == GENCODE:
            yield Group(
                site=site,
                name=_first_source(calls[:index], _keyword_variable(call, "SRCS")),
                variable=_keyword_variable(call, "CUDA_ARCHS"),
                defines=_defines_beside(call, calls),
            )
        elif builds_itself and call.name == INTERSECTION and call.arguments:
            yield Group(
                site=site,
                name=PurePosixPath(path).stem,
                variable=call.values[0],
            )


def _defines_beside(call: Command, calls: Iterable[Command]) -> Texts:
    """Return the -DENABLE_… flags that the same branch as a call adds to a list."""
    defines: list[str] = []
    for neighbour in calls:
        if neighbour.name == "list" and call.block and neighbour.block == call.block:
            defines += filter(_SWITCH.match, neighbour.values)
    return tuple(defines)


def _keyword_variable(call: Command, keyword: str) -> str:
    """Return the variable behind a keyword: ``CUDA_ARCHS "${X}"`` → ``X``."""
    for word, reference in pairwise(call.values):
        if word == keyword:
            return reference.removeprefix("${").removesuffix("}")
    return ""


def _first_source(before: Commands, variable: str) -> str:
    """Return the name of a group: folder and stem of the first CUDA source in a variable.

    The sources are those of the last command in ``before`` that sets the variable. Without sources,
    the group has the name of the variable.
    """
    name = variable
    for call in reversed(before):
        sources = [value for value in call.values if value.endswith((".cu", ".cpp"))]
        is_list = call.name in ("set", "file") and variable in call.values[:2]
        if sources and is_list:
            # A .cu file is preferred to a .cpp file.
            name = min(sources, key=lambda source: not source.endswith(".cu"))
            break

    parts = [
        part for part in PurePosixPath(name).with_suffix("").parts if part != "csrc"
    ]
    return "/".join(part for part in parts[-2:] if not part.startswith("${"))


def _trace_calls(
    tree: SourceTree,
    texts: Values,
    gencode: str,
    cuda: str,
) -> list[Traced]:
    """Run the release's CMake in a temporary folder; return the calls in the build files.

    ``gencode`` are the flags that torch's CMake puts into CMAKE_CUDA_FLAGS. The paths in a call are
    relative to the tree or, in an external source, to that source. Raises ProofError if CMake
    stops.
    """
    with ScratchFolder() as folder:
        root = Path(folder, "tree")
        scratch = Path(folder, "scratch")
        log = Path(folder, "trace")
        mirror(tree, texts, root)

        # Some external projects check whether this file of CUTLASS exists.
        header = scratch / "cutlass/cutlass.h"
        header.parent.mkdir(parents=True)
        header.touch()

        sources = [*filter(_is_build_file, texts), _WRAPPERS]
        arguments = [f"--trace-source={path}" for path in sources]
        arguments.append(f"-DPATCHKIT_GENCODE={gencode}")
        arguments.append(f"-DPATCHKIT_CUDA={cuda}")
        arguments.append(f"-DPATCHKIT_SCRATCH={scratch}")
        ended = run_script(
            tree,
            _SCRIPT,
            arguments,
            folder=root,
            beside=Path(folder),
            log=log,
        )

        if ended.trouble:
            output = ended.error_text.replace(f"{root}/", "") or ended.trouble
            lines = [f"    {line}" for line in output.splitlines() if line.strip()]
            shown = "\n".join(lines)
            raise ProofError(
                f"CMake stopped while it decided the arch lists ({ended.trouble}):\n{shown}",
                why="the release's own CMake rejects this arch list, or the files were edited by "
                "hand",
                hint="`patchkit archs` shows the tree as it is; DriftError lines above name the "
                "place",
            )
        return list(read_trace(log, _COMMANDS, root, scratch))


def _archs_by_site(
    calls: Iterable[Traced],
    sites: Collection[Site],
) -> dict[Site, Texts]:
    """Return site → the archs for which nvcc compiles, for the known sites in the trace.

    The archs are read from the flags that a call results in, not from its arguments, which are only
    the requested archs.
    """
    archs: dict[Site, Texts] = {}
    codes: list[str] = []
    # The sites to which the next _CODE and _LIST records belong.
    sources: Site | None = None
    project: Site | None = None

    for call in calls:
        _require_readable(call, sites)
        if call.command == GENCODE:
            sources = call.where
            codes = []
            archs[sources] = ()
        elif call.command == _CODE and sources:
            codes.append(_read_code(call))
            archs[sources] = list_archs(codes)
        elif call.command == INTERSECTION:
            project = call.where if call.where in sites else None
        elif call.command == _LIST and project:
            archs[project] = _read_archs(call)
            project = None
    return archs


def _require_readable(call: Traced, sites: Collection[Site]) -> None:
    """Raise ProofError if a call gives archs to sources but was not found in the files."""
    is_unknown = call.command == GENCODE and call.where not in sites
    if call.command == _FLAG or is_unknown:
        raise _unreadable_call(call)


def _read_code(call: Traced) -> str:
    if not call.arguments or not re.fullmatch(_CODE_NAME, call.arguments[0]):
        raise _unreadable_call(call)
    return call.arguments[0]


def _read_archs(call: Traced) -> Texts:
    archs = tuple(filter(None, ";".join(call.arguments[1:]).split(";")))
    try:
        for arch in archs:
            parse_arch(arch)
    except UsageError:
        raise _unreadable_call(call) from None
    return archs


def _unreadable_call(call: Traced) -> ProofError:
    """Return the error for a call whose form is unknown."""
    path, line = call.where
    return ProofError(
        f"{path}:{line}: CMake calls {call.command} here in a form that patchkit cannot read",
        why="upstream introduced a form of call that the reader does not know",
        hint="please report it with the vLLM version",
    )
