"""Tell what NCCL's own build files would do, without a compiler or a GPU.

GNU make reads makefiles/common.mk and is told the version that nvcc would tell. CMake runs
the two CMakeLists.txt that decide archs, libraries and nccl.pc in script mode; its trace says what
every target would be given.

Both run in a sandbox. CMake can read the tree, and write nothing but its trace. Make needs
``$(shell …)``, even for ``test``: it may start programs of the system, a few at a time, that can
read as little as make itself, and write nothing at all.
"""

from __future__ import annotations

import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from patchkit.durable.staging import ScratchFolder
from patchkit.errors import HostError, ProofError
from patchkit.proof.child_process import run
from patchkit.proof.cmake import Traced, mirror, read_trace, run_script
from patchkit.proof.sandbox import box_for, program_box
from patchkit.source.tree import SourceTree

COMMON_MK = "makefiles/common.mk"
ROOT_FILE = "CMakeLists.txt"
SOURCE_FILE = "src/CMakeLists.txt"
PC_FILE = "lib/pkgconfig/nccl.pc"
# What CMake takes from nvcc 13.0 if nothing is set: the oldest arch that nvcc has.
COMPILER_DEFAULT = "75"
_SCRIPT = Path(__file__).with_name("build_trace.cmake")
_USING = "Using CUDA_ARCHITECTURES: "
_COMMANDS = ("file", "add_library", "target_sources", "target_link_libraries", "add_custom_command")
_Calls = Sequence[Traced]
_KEYWORDS = ("", "PUBLIC", "PRIVATE", "INTERFACE", "SHARED", "STATIC", "OBJECT")
_PRINT = "include common.mk\n$(info patchkit $(NVCUFLAGS))\nnothing: ;\n"


def make_flags(
    tree: SourceTree,
    cuda: str,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the flags that make hands to nvcc of a version, for every device file.

    ``environment`` and ``arguments`` are what a user sets. Raises HostError without GNU make,
    ProofError if it stops.
    """
    make = shutil.which("make")
    if make is None:
        raise HostError("make is not installed", hint="sudo apt install make")
    with ScratchFolder() as folder:
        home = Path(folder)
        (home / "common.mk").write_text(tree.read(COMMON_MK), encoding="utf-8")
        (home / "Makefile").write_text(_PRINT, encoding="utf-8")
        # The file would split the version with a pipe of two programs, and that takes a fork.
        major, minor = cuda.split(".")[:2]
        given = (f"CUDA_VERSION={cuda}", f"CUDA_MAJOR={major}", f"CUDA_MINOR={minor}")
        needed = replace(program_box(Path(make), children=True), read=(home,))
        done = run(
            [make, "--no-print-directory", *given, *arguments],
            box_for(tree, needed),
            folder=home,
            environment={"PATH": "/usr/bin:/bin", **(environment or {})},
        )
    lines = [line for line in done.text.splitlines() if line.startswith("patchkit ")]
    trouble = done.trouble or f"it says {len(lines)} times what nvcc is given, expected 1"
    try:
        if not done.trouble and len(lines) == 1:
            return tuple(shlex.split(lines[0])[1:])
    except ValueError as error:  # a quote without its second
        trouble = f"what nvcc is given has {error}"
    raise ProofError(
        f"make stopped in {COMMON_MK} ({trouble}): {(done.error_text or done.text).strip()}",
        why="the file was edited by hand, or upstream rewrote it",
        hint="restore the file from the release",
    )


def gencodes(flags: Sequence[str]) -> tuple[str, ...]:
    """Return the -gencode flags among others, as they are written."""
    return tuple(flag for flag in flags if flag.startswith("-gencode"))


@dataclass(frozen=True, slots=True)
class Configured:
    """What CMake would generate: archs, nccl.pc, and target → its sources and libraries.

    ``outputs`` are files that custom commands make, each as often as it is named.
    """

    archs: str
    pkgconfig: str
    sources: Mapping[str, Sequence[str]]
    libraries: Mapping[str, Sequence[str]]
    outputs: tuple[str, ...]


def configured(tree: SourceTree, cuda: str, definitions: Sequence[str] = ()) -> Configured:
    """Run the build files of a tree. ``definitions`` are the user's, as ``-DNAME=VALUE``.

    Raises ProofError if CMake stops, or does not say what archs it uses.
    """
    with ScratchFolder() as folder:
        root, build = Path(folder, "tree"), Path(folder, "build")
        build.mkdir()
        mirror(tree, {path: tree.read(path) for path in (ROOT_FILE, SOURCE_FILE)}, root)
        log = build / "trace"
        given = [
            f"-DPATCHKIT_TREE={root}",
            f"-DPATCHKIT_CUDA={cuda}",
            f"-DPATCHKIT_DEFAULT={COMPILER_DEFAULT}",
            *definitions,
        ]
        ended = run_script(tree, _SCRIPT, given, folder=build, beside=Path(folder), log=log)
        if ended.trouble:
            words = ended.error_text.replace(f"{root}/", "")
            raise ProofError(
                f"CMake stopped in NCCL's build files ({ended.trouble}):\n{words}",
                why="the files were edited by hand, or upstream rewrote them",
                hint="restore them from the release",
            )
        calls = list(read_trace(log, _COMMANDS, root, build))
        files = [words for words in _command_arguments(calls, ("file",)) if len(words) > 2]
        written = {words[1]: words[2] for words in files if words[0] == "WRITE"}
        said = [line.partition(_USING)[2] for line in ended.text.splitlines() if _USING in line]
        if len(said) != 1:
            raise ProofError(
                f"{ROOT_FILE} says {len(said)} times which archs it uses, expected 1",
                why="upstream rewrote the choice of archs",
            )
        return Configured(
            archs=said[0],
            pkgconfig=written.get(PC_FILE, ""),
            sources=_arguments_by_target(calls, "add_library", "target_sources"),
            libraries=_arguments_by_target(calls, "target_link_libraries"),
            outputs=tuple(_custom_outputs(calls)),
        )


def _arguments_by_target(calls: _Calls, *commands: str) -> Mapping[str, Sequence[str]]:
    """Return the arguments of those commands by target, without keywords; none for a stranger."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for arguments in _command_arguments(calls, commands):
        found[arguments[0]].extend(
            item
            for argument in arguments[1:]
            for item in argument.split(";")
            if item not in _KEYWORDS
        )
    return found


def _command_arguments(calls: _Calls, commands: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of every call of one of the commands."""
    for call in calls:
        if call.command in commands and call.arguments:
            yield call.arguments


def _custom_outputs(calls: _Calls) -> Iterator[str]:
    """Yield what follows OUTPUT and BYPRODUCTS of each custom command."""
    for arguments in _command_arguments(calls, ("add_custom_command",)):
        keyword = ""
        for argument in arguments:
            if argument.isupper() and argument.isalpha():
                keyword = argument
            elif keyword in ("OUTPUT", "BYPRODUCTS"):
                yield argument
