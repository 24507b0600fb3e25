"""Find the sources that a release's CMake files fetch while they configure a build.

Only commands that a CUDA build reaches count: files are followed from ``CMakeLists.txt`` through
``include`` and ``add_subdirectory``, and branches for other devices are ignored.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath

from patchkit.edit.cmake import Branch, Command, Commands, commands
from patchkit.errors import DriftError
from patchkit.frozen import Texts, frozen, positional
from patchkit.source.tree import SourceTree

ROOT_FILE = "CMakeLists.txt"

# The values of these variables in a CUDA build. A branch that compares one of them with another
# value is for other devices.
_DEVICE = {"VLLM_TARGET_DEVICE": "cuda", "VLLM_GPU_LANG": "CUDA"}
_DECLARING = "fetchcontent_(declare|populate)"
_FOREIGN = "externalproject_add|cpmaddpackage|cpmfindpackage"
_RUNNING = "execute_process|add_custom_(command|target)"
_PLACE = re.compile("URL|[A-Z]+_REPOSITORY|DOWNLOAD_COMMAND")
# The form of a keyword of these commands, such as GIT_TAG.
_KEYWORD = "[A-Z]+(_[A-Z]+)+"
# Programs with the subcommands that download something.
_GETTERS = (
    r"(?:^|[/ ])(?:git\S* (?:clone|fetch|pull|submodule|ls-remote)|curl|wget"
    r"|pip\S* (?:install|download))\b"
)
_REFERENCE = r"\$\{([A-Za-z0-9_-]+)\}"
_HERE = ("${CMAKE_CURRENT_LIST_DIR}/", "${CMAKE_CURRENT_SOURCE_DIR}/")
_ROOT = ("${CMAKE_SOURCE_DIR}/", "${PROJECT_SOURCE_DIR}/")
_HINT = "tell patchkit about it in recipes/vllm/build.toml, or build a release that it knows"


@frozen
class External:
    """A source that FetchContent clones with git.

    ``name`` is its name in FetchContent; ``variable`` is the environment variable that, if set,
    names a folder to use instead of the fetch. ``pin`` is a commit id or a tag, ``submodules`` are
    the submodules to fetch (None for all). ``path`` and ``line`` say where the tree declares the
    fetch.
    """

    name: str
    variable: str
    url: str
    pin: str
    submodules: Texts | None
    path: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def is_commit(self) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", self.pin) is not None


@positional
class _Reached:
    """A command that a CUDA build reaches, with its file, and all that are reached there."""

    path: str
    call: Command
    calls: Commands

    def unseen(self, problem: str) -> DriftError:
        """Return the error for a fetch in a form that patchkit does not know."""
        return DriftError(
            f"{self.path}:{self.call.line}: {problem}",
            why="the release fetches a source in a way that patchkit has not seen, so nothing can "
            "be handed in for it and the build would need the network",
            hint=_HINT,
        )

    def entered_file(self, tree: SourceTree) -> str:
        """Return the file that an ``include`` or ``add_subdirectory`` reads, "" for other commands.

        "" is also returned for a module of CMake's own. Raises DriftError if the tree has no such
        file.
        """
        if (
            self.call.name not in ("include", "add_subdirectory")
            or not self.call.arguments
        ):
            return ""

        value = self.call.arguments[0].value
        if value.startswith(_HERE):
            value = str(PurePosixPath(self.path).parent / value.partition("/")[2])
        elif value.startswith(_ROOT):
            value = value.partition("/")[2]
        if self.call.name == "add_subdirectory":
            value = f"{value}/{ROOT_FILE}"
        elif re.fullmatch(r"\w+", value):
            return ""

        if "$" in value or not tree.exists(value):
            raise self.unseen(f"{self.call.name}({value}) leads to no file of the tree")
        return value

    def external(self) -> External | None:
        """Return the source that a command fetches, None if it fetches nothing.

        Raises DriftError if the command fetches something in an unknown way.
        """
        if _fetches_unseen(self.call):
            raise self.unseen(f"{self.call.name} fetches something in an unknown way")

        if not re.fullmatch(_DECLARING, self.call.name):
            return None

        places = set(filter(_PLACE.fullmatch, self.call.values))
        is_local = (
            "SOURCE_DIR" in self.call.values
            and self.call.name == "fetchcontent_declare"
        )
        # fetchcontent_populate(NAME): the declaration of NAME, above, is examined on its own.
        is_named_again = len(self.call.values) == 1
        if not places and (is_local or is_named_again):
            return None

        if places != {"GIT_REPOSITORY"}:
            raise self.unseen(f"{self.call.values[0]} is not fetched with git")
        return self._declared()

    def _declared(self) -> External:
        values = self.call.values
        texts = self._texts_before()

        def field(keyword: str) -> Texts:
            behind = values[values.index(keyword) + 1 :] if keyword in values else []
            words = itertools.takewhile(
                lambda value: not re.fullmatch(_KEYWORD, value), behind
            )
            resolved = tuple(_fill_in(word, texts) for word in words)

            if any("$" in value for value in resolved):
                raise self.unseen(f"{keyword} is not set to one text in this file")
            return resolved

        pin = field("GIT_TAG")
        if not pin:
            raise self.unseen(f"{values[0]} has no GIT_TAG: any commit could come")

        return External(
            name=values[0],
            variable=self._override(),
            url=field("GIT_REPOSITORY")[0].removesuffix(".git"),
            pin=pin[0],
            submodules=field("GIT_SUBMODULES") if "GIT_SUBMODULES" in values else None,
            path=self.path,
            line=self.call.line,
        )

    def _texts_before(self) -> Mapping[str, Collection[str]]:
        """Return variable → every text to which a ``set`` before the command sets the variable."""
        texts: defaultdict[str, set[str]] = defaultdict(set)
        start = self.call.start
        for former in self.calls:
            match former.values:
                case [name, text, *_] if former.name == "set" and former.start < start:
                    texts[name].add(text)
        return texts

    def _override(self) -> str:
        """Return the environment variable that, if set, names a folder to use instead of the fetch.

        The release asks for the variable with ``if(NAME)`` or ``if(DEFINED ENV{NAME})`` and fetches
        in the ``else``. Raises DriftError if the fetch is in the ``else`` of no such condition.
        """
        environment = {
            name for command in self.calls for name in _environment_copy(command)
        }
        for branch in self.call.block:
            for condition in branch.excluded:
                match condition:
                    case [name] if name in environment:
                        return name
                    case ["DEFINED", name] if name.startswith("ENV{"):
                        return name.removeprefix("ENV{").removesuffix("}")

        name = self.call.values[0]
        raise self.unseen(f"no variable names a folder to use for {name}")


def externals(tree: SourceTree) -> tuple[External, ...]:
    """Return every source that configuring a CUDA build fetches, in the order of the files.

    Raises DriftError with file and line if the form of a fetch is unknown, if no environment
    variable can name a folder to use instead of it, or if a source is fetched twice.
    """
    sources: dict[str, External] = {}

    for path, calls in _read_files(tree).items():
        for call in calls:
            reached = _Reached(path, call, calls)
            external = reached.external()
            if external is None:
                continue

            if external.name in sources:
                raise reached.unseen(f"{external.name} is fetched twice")
            sources[external.name] = external
    return tuple(sources.values())


def _read_files(tree: SourceTree) -> dict[str, Commands]:
    """Return file → its commands, for the files and commands that a CUDA build reaches."""
    files: dict[str, Commands] = {}
    waiting = [ROOT_FILE]
    while waiting:
        path = waiting.pop(0)
        if path in files:
            continue

        calls = commands(tree.read(path), path)
        reached = tuple(call for call in calls if for_cuda(call.block))
        files[path] = reached

        entered = (_Reached(path, call, reached).entered_file(tree) for call in reached)
        waiting += filter(None, entered)
    return files


def for_cuda(block: tuple[Branch, ...]) -> bool:
    """Return whether a CUDA build can reach a command inside these branches."""
    for branch in block:
        if _condition_holds(branch.condition) is False:
            return False
        if any(map(_condition_holds, branch.excluded)):
            return False
    return True


def _condition_holds(condition: Texts) -> bool | None:
    """Return the value of a condition in a CUDA build, None if the value is unknown.

    Comparisons of the device with a text are understood, also with NOT or joined by OR or AND.
    """
    if "(" in condition:
        return None
    # The value that decides, whatever the other side of the joint is.
    for joint, decisive in (("OR", True), ("AND", False)):
        if joint in condition:
            cut = condition.index(joint)
            sides = (condition[:cut], condition[cut + 1 :])
            values = list(map(_condition_holds, sides))
            if decisive in values:
                return decisive
            return None if None in values else not decisive

    match condition:
        case ["NOT", *words]:
            holds = _condition_holds(tuple(words))
            return None if holds is None else not holds
        case [variable, "STREQUAL", text] if variable in _DEVICE:
            return _DEVICE[variable] == text
    return None


def _fetches_unseen(call: Command) -> bool:
    if re.fullmatch(_FOREIGN, call.name):
        return True
    if re.fullmatch(_RUNNING, call.name):
        return re.search(_GETTERS, " ".join(call.values)) is not None
    return call.name == "file" and call.values[:1] == ("DOWNLOAD",)


def _fill_in(word: str, texts: Mapping[str, Collection[str]]) -> str:
    """Replace each ``${VARIABLE}`` that has exactly one text by that text; keep the others."""

    def text(match: re.Match[str]) -> str:
        choices = texts.get(match[1], ())
        return next(iter(choices)) if len(choices) == 1 else match[0]

    return re.sub(_REFERENCE, text, word)


def _environment_copy(call: Command) -> Iterator[str]:
    """Yield NAME if the command is ``set(NAME $ENV{NAME})`` within ``if(DEFINED ENV{NAME})``."""
    match call.values:
        case [name, value] if call.name == "set" and value == f"$ENV{{{name}}}":
            condition = ("DEFINED", f"ENV{{{name}}}")
            if any(branch.condition == condition for branch in call.block):
                yield name
