"""Sources that a release fetches while it is configured, read from its own CMake files.

Only what a CUDA build reaches counts: files are followed from ``CMakeLists.txt`` through
``include`` and ``add_subdirectory``, and branches for other devices are left aside.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath

from patchkit.edit.cmake import Branch, Command, commands
from patchkit.errors import DriftError
from patchkit.source.tree import SourceTree

ROOT_FILE = "CMakeLists.txt"

# What these are in a CUDA build; a comparison with another value is a branch for other devices.
_DEVICE = {"VLLM_TARGET_DEVICE": "cuda", "VLLM_GPU_LANG": "CUDA"}
_DECLARING = frozenset({"fetchcontent_declare", "fetchcontent_populate"})
_FOREIGN = frozenset({"externalproject_add", "cpmaddpackage", "cpmfindpackage"})
_RUNNING = frozenset({"execute_process", "add_custom_command", "add_custom_target"})
_PLACES = frozenset(
    {"URL", "GIT_REPOSITORY", "SVN_REPOSITORY", "HG_REPOSITORY", "CVS_REPOSITORY"}
    | {"DOWNLOAD_COMMAND"}
)
# Words of a command line that bring something from elsewhere.
_GETTERS = re.compile(
    r"(?:^|[/ ])(?:git\S* (?:clone|fetch|pull|submodule|ls-remote)|curl|wget"
    r"|pip\S* (?:install|download))\b"
)
_KEYWORDS = frozenset(
    {
        "GIT_REPOSITORY",
        "GIT_TAG",
        "GIT_PROGRESS",
        "GIT_SHALLOW",
        "GIT_SUBMODULES",
        "BINARY_DIR",
    }
    | {
        "SOURCE_DIR",
        "SOURCE_SUBDIR",
        "SUBBUILD_DIR",
        "CONFIGURE_COMMAND",
        "BUILD_COMMAND",
    }
)
_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_-]+)\}")
_HERE = ("${CMAKE_CURRENT_LIST_DIR}/", "${CMAKE_CURRENT_SOURCE_DIR}/")
_ROOT = ("${CMAKE_SOURCE_DIR}/", "${PROJECT_SOURCE_DIR}/")
_HINT = "tell patchkit about it in recipes/vllm/build.toml, or build a release that it knows"


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """One source: FetchContent's name, where it comes from, and what takes its place.

    ``pin`` is a commit id or the name of a tag, ``submodules`` what is asked for by name (None for
    all of them), ``subdir`` the folder in it that CMake enters.
    """

    name: str
    variable: str
    url: str
    pin: str
    submodules: tuple[str, ...] | None
    subdir: str
    path: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def is_commit(self) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", self.pin) is not None


def externals(tree: SourceTree) -> tuple[External, ...]:
    """Return every source that configuring a CUDA build fetches, in the order of the files.

    Raises DriftError, with the place, for a fetch in a form that is not understood, or that no
    variable replaces.
    """
    found: dict[str, External] = {}
    files: dict[str, tuple[Command, ...]] = {}
    waiting = [ROOT_FILE]
    while waiting:
        path = waiting.pop(0)
        if path not in files:
            read = commands(tree.read(path), path)
            files[path] = tuple(call for call in read if for_cuda(call.block))
            waiting += filter(
                None, (_entered_file(tree, path, call) for call in files[path])
            )
    for path, calls in files.items():
        for call in calls:
            if external := _find_external(path, call, calls):
                if external.name in found:
                    raise _unseen_form(
                        path, call.line, f"{external.name} is fetched twice"
                    )
                found[external.name] = external
    return tuple(found.values())


def _entered_file(tree: SourceTree, path: str, call: Command) -> str:
    """Return the file of the tree that a command reads; "" for CMake's own modules."""
    if call.name not in ("include", "add_subdirectory") or not call.arguments:
        return ""
    value = call.arguments[0].value
    folder = str(PurePosixPath(path).parent)
    if value.startswith(_HERE):
        value = str(PurePosixPath(folder) / value.partition("/")[2])
    elif value.startswith(_ROOT):
        value = value.partition("/")[2]
    if call.name == "add_subdirectory":
        value = f"{value}/{ROOT_FILE}"
    if call.name == "include" and re.fullmatch(r"\w+", value):
        return ""
    if "$" in value or not tree.exists(value):
        raise _unseen_form(
            path, call.line, f"{call.name}({value}) leads to no file of the tree"
        )
    return value


def for_cuda(block: tuple[Branch, ...]) -> bool:
    """Return whether a CUDA build can be inside of all these branches."""
    return not any(
        _condition_holds(branch.condition) is False
        or any(map(_condition_holds, branch.excluded))
        for branch in block
    )


def _condition_holds(condition: tuple[str, ...]) -> bool | None:
    """Return what a condition is in a CUDA build, None if that is unknown.

    Understood are comparisons of the device with a text, and those joined by OR or AND.
    """
    if "(" in condition:
        return None
    for joint, decides in (("OR", True), ("AND", False)):
        if joint in condition:
            cut = condition.index(joint)
            parts = (
                _condition_holds(condition[:cut]),
                _condition_holds(condition[cut + 1 :]),
            )
            if decides in parts:
                return decides
            return None if None in parts else not decides
    if condition[:1] == ("NOT",):
        inner = _condition_holds(condition[1:])
        return None if inner is None else not inner
    if len(condition) == 3 and condition[1] == "STREQUAL" and condition[0] in _DEVICE:
        return _DEVICE[condition[0]] == condition[2]
    return None


def _find_external(
    path: str, call: Command, calls: tuple[Command, ...]
) -> External | None:
    """Return the source that a command fetches, None if it fetches nothing."""
    values = [argument.value for argument in call.arguments]
    runs_getter = call.name in _RUNNING and _GETTERS.search(" ".join(values))
    downloads = call.name == "file" and values[:1] == ["DOWNLOAD"]
    if call.name in _FOREIGN or runs_getter or downloads:
        raise _unseen_form(
            path, call.line, f"{call.name} fetches something in an unknown way"
        )
    if call.name not in _DECLARING:
        return None
    places = _PLACES.intersection(values)
    local = "SOURCE_DIR" in values and call.name == "fetchcontent_declare"
    # One argument: it was declared before, and is looked at there.
    if not places and (local or len(values) == 1):
        return None
    if places != {"GIT_REPOSITORY"}:
        raise _unseen_form(path, call.line, f"{values[0]} is not fetched with git")
    return _declared_external(path, call, values, calls)


def _declared_external(
    path: str, call: Command, values: list[str], calls: tuple[Command, ...]
) -> External:
    # variable → the texts that the file sets it to before the command
    texts: defaultdict[str, set[str]] = defaultdict(set)
    for other in calls:
        if (
            other.name == "set"
            and other.start < call.start
            and len(other.arguments) > 1
        ):
            texts[other.arguments[0].value].add(other.arguments[1].value)

    def text(match: re.Match[str]) -> str:
        known = texts[match[1]]
        return next(iter(known)) if len(known) == 1 else match[0]

    def field(keyword: str) -> tuple[str, ...]:
        rest = values[values.index(keyword) + 1 :] if keyword in values else []
        given = itertools.takewhile(lambda value: value not in _KEYWORDS, rest)
        resolved = tuple(_REFERENCE.sub(text, value) for value in given)
        if any("$" in value for value in resolved):
            raise _unseen_form(
                path, call.line, f"{keyword} is not set to one text in this file"
            )
        return resolved

    if not field("GIT_TAG"):
        raise _unseen_form(
            path, call.line, f"{values[0]} has no GIT_TAG: any commit could come"
        )
    return External(
        name=values[0],
        variable=_find_override(path, call, calls, values[0]),
        url=field("GIT_REPOSITORY")[0].removesuffix(".git"),
        pin=field("GIT_TAG")[0],
        submodules=field("GIT_SUBMODULES") if "GIT_SUBMODULES" in values else None,
        subdir="".join(field("SOURCE_SUBDIR")),
        path=path,
        line=call.line,
    )


def _find_override(
    path: str, call: Command, calls: tuple[Command, ...], name: str
) -> str:
    """Return the environment variable that replaces a fetch: its branch is the one without it."""
    # Variables that the file sets to those of the environment, where there are any.
    taken = set()
    for other in calls:
        words = [argument.value for argument in other.arguments]
        name = words[0] if words else ""
        defined = any(
            branch.condition == ("DEFINED", f"ENV{{{name}}}") for branch in other.block
        )
        if other.name == "set" and words == [name, f"$ENV{{{name}}}"] and defined:
            taken.add(name)
    for condition in (passed for branch in call.block for passed in branch.excluded):
        if len(condition) == 1 and condition[0] in taken:
            return condition[0]
        if (
            len(condition) == 2
            and condition[0] == "DEFINED"
            and condition[1].startswith("ENV{")
        ):
            return condition[1].removeprefix("ENV{").removesuffix("}")
    raise _unseen_form(path, call.line, f"no variable names a folder to use for {name}")


def _unseen_form(path: str, line: int, problem: str) -> DriftError:
    return DriftError(
        f"{path}:{line}: {problem}",
        why="the release fetches a source in a way that patchkit has not seen, so nothing can be "
        "handed in for it and the build would need the network",
        hint=_HINT,
    )
