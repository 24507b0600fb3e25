"""Arch lists as the CMake files write them: what a CUDA 13 build reads, and whom it is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from patchkit.edit.cmake import Argument, Command, list_items, remove_list_items
from patchkit.patching.fix import Observation, found, places
from patchkit.recipes.vllm.archs import INTERSECTION, parsed

SUPPORTED = "CUDA_SUPPORTED_ARCHS"
MLA = "MLA_ARCHS"
_CUDA = Version("13.0")


@dataclass(frozen=True, slots=True)
class ArchList:
    """One list of archs: the variable that it sets, and where it is written.

    ``sm100`` says that only SM100 selects its kernels, whatever archs it names.
    """

    path: str
    variable: str
    argument: Argument
    sm100: bool

    @property
    def where(self) -> str:
        return f"{self.path}:{self.argument.line}"

    @property
    def items(self) -> list[str]:
        return list(list_items(self.argument))

    @property
    def names_sm12x(self) -> bool:
        return any(map(_is_sm12x, self.items))


def _is_sm12x(item: str) -> bool:
    return item.startswith("12.")


def cuda13_lists(texts: Mapping[str, str]) -> Iterator[ArchList]:
    """Yield the lists that a compiler of CUDA 13 reads, in the order of the files."""
    for path, text in texts.items():
        calls = parsed(path, text)
        for index, call in enumerate(calls):
            argument = _list_of(call)
            excluded = (condition for branch in call.block for condition in branch.excluded)
            # The else of ``>= 13.0`` is only taken by older compilers.
            if argument is not None and not any(map(_at_least, excluded)):
                variable = call.arguments[0].value
                sm100 = variable == MLA or _switches_sm100_on(call, calls[index + 1 :])
                yield ArchList(path, variable, argument, sm100)


def _list_of(call: Command) -> Argument | None:
    if call.name == INTERSECTION and len(call.arguments) == 3:
        return call.arguments[1]
    if call.name == "set" and len(call.arguments) == 2 and call.arguments[0].value == SUPPORTED:
        return call.arguments[1]
    return None


def _at_least(condition: tuple[str, ...]) -> bool:
    names = ("CMAKE_CUDA_COMPILER_VERSION", "${CMAKE_CUDA_COMPILER_VERSION}", "DEFINED", "AND")
    rest = [word for word in condition if word not in names]
    return len(rest) == 2 and rest[0] == "VERSION_GREATER_EQUAL" and Version(rest[1]) <= _CUDA


def _switches_sm100_on(call: Command, later: Sequence[Command]) -> bool:
    """Return whether the next -DENABLE_… before a list of another name is an SM100 one."""
    for following in later:
        if (
            following.name == INTERSECTION
            and len(following.arguments) == 3
            and following.arguments[0].value != call.arguments[0].value
        ):
            return False
        defines = [a.value for a in following.arguments if a.value.startswith("-DENABLE_")]
        if defines:
            return call.name == INTERSECTION and defines[0].endswith("_SM100=1")
    return False


def without_sm12x(lists: Sequence[ArchList], what: str) -> Observation:
    """Return the edits that take SM12x out of lists of kernels that only SM100 selects."""
    named = [entry for entry in lists if entry.names_sm12x]
    edits = [
        remove_list_items(entry.argument, _is_sm12x, path=entry.path, note="SM100 kernels only")
        for entry in named
    ]
    where = places([entry.where for entry in named or lists])
    return found(
        edits, now=f"{where}: {what} names SM12x", done=f"{where}: {what} does not name SM12x"
    )
