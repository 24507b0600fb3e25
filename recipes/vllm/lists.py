"""Find the arch lists in CMake files that a CUDA 13 build reads."""

from functools import lru_cache

from packaging.version import Version

from patchkit.edit.cmake import Argument, Command, Commands, commands, list_items
from patchkit.frozen import Texts, positional
from patchkit.recipes.vllm.archs import INTERSECTION

SUPPORTED = "CUDA_SUPPORTED_ARCHS"
MLA = "MLA_ARCHS"
_CUDA = Version("13.0")
# Command → the number of arguments of a call that sets an arch list.
_LISTING = {INTERSECTION: 3, "set": 2}
_COMPILER = (
    "CMAKE_CUDA_COMPILER_VERSION",
    "${CMAKE_CUDA_COMPILER_VERSION}",
    "DEFINED",
    "AND",
)


@positional
class ArchList:
    """A list of archs in a CMake file.

    ``argument`` is the list as the file has it, ``variable`` the variable that is set to the archs
    to build. ``sm100`` says that vLLM uses the kernels on SM100 only, whatever archs the list has.
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


@lru_cache(maxsize=64)
def cuda13_lists(path: str, text: str) -> tuple[ArchList, ...]:
    """Return the arch lists of a file that a build with CUDA 13 reads, in the order of the file."""
    calls = commands(text, path)
    lists = []

    for index, call in enumerate(calls):
        if _gives_list(call) and not _is_for_older_cuda(call):
            variable = call.values[0]
            sm100 = variable == MLA or _switches_sm100_on(call, calls[index + 1 :])
            lists.append(ArchList(path, variable, call.arguments[1], sm100))
    return tuple(lists)


def _gives_list(call: Command) -> bool:
    if len(call.arguments) != _LISTING.get(call.name):
        return False
    return call.name != "set" or call.values[0] == SUPPORTED


def _is_for_older_cuda(call: Command) -> bool:
    """Return whether a call is in an ``else`` that only compilers older than CUDA 13 reach."""
    conditions = [words for branch in call.block for words in branch.excluded]
    return any(map(_asks_for_cuda13, conditions))


def _asks_for_cuda13(condition: Texts) -> bool:
    """Return whether a condition holds for every compiler from CUDA 13 on."""
    match [word for word in condition if word not in _COMPILER]:
        case ["VERSION_GREATER_EQUAL", version]:
            return Version(version) <= _CUDA
        case _:
            return False


def _switches_sm100_on(call: Command, later: Commands) -> bool:
    """Return whether the first ``-DENABLE_…`` after a list ends with ``_SM100=1``.

    The search stops at the next list of another variable.
    """
    if call.name != INTERSECTION:
        return False

    for following in later:
        is_list = following.name == INTERSECTION and len(following.values) == 3
        if is_list and following.values[0] != call.values[0]:
            return False
        for value in following.values:
            if value.startswith("-DENABLE_"):
                return value.endswith("_SM100=1")
    return False
