"""Run CMake scripts that use a tree's own build files, and read the trace of every call.

No compiler and no GPU is needed. CMake runs in a sandbox: it can read the tree, and can write
nothing but its trace.
"""

import importlib.util
import json
import os
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from patchkit.errors import ProofError, StorageError, translated
from patchkit.frozen import Texts, Values, positional
from patchkit.proof.child_process import Ended, run
from patchkit.proof.sandbox import box_for, program_box
from patchkit.source.tree import SourceTree

# This text cannot be part of an argument: quotes in an argument are escaped.
_COMMAND = re.compile(r'"cmd":"(\w+)"')
# Errors that reading a line as a call raises if the line is no call.
_NO_CALL = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@positional
class Traced:
    """One call in CMake's trace.

    The command is in lower case, ``where`` is (file, line), variables in arguments are expanded.
    """

    command: str
    where: tuple[str, int]
    arguments: Texts


def run_script(
    tree: SourceTree,
    script: Path,
    arguments: Sequence[str],
    *,
    folder: Path,
    beside: Path,
    log: Path,
) -> Ended:
    """Run a CMake script in the folder ``folder`` and write its trace to ``log``.

    In the sandbox it may read the tree, the script's folder and ``beside``. A script that fails
    raises nothing: see ``trouble`` of the result. Raises StorageError if CMake is not installed or
    no process can be started, HostError if there is no sandbox.
    """
    log.touch()
    program = Path(cmake_program())
    trace = ("--trace-expand", "--trace-format=json-v1", f"--trace-redirect={log}")

    # parents[1] holds share/, where CMake's own modules are.
    needed = replace(
        program_box(program),
        read=(beside, program.parents[1], script.parent),
        write=(log,),
    )
    return run(
        [str(program), *trace, *arguments, "-P", str(script)],
        box_for(tree, needed),
        folder=folder,
        environment={},  # a variable *_SRC_DIR of the user would send the script into other trees
    )


def read_trace(log: Path, commands: Container[str], *folders: Path) -> Iterator[Traced]:
    """Yield the calls of ``commands`` (in lower case) in a trace file.

    Paths below ``folders`` become relative. Raises ProofError if a line is no call.
    """
    # cmake(1), json-v1: the first line is the version of the format.
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
        # Most lines are of other commands, and reading their JSON takes long.
        command = _COMMAND.search(line)
        if command and command[1].lower() not in commands:
            continue

        try:
            call = _read_call(line, folders)
        except _NO_CALL:
            raise ProofError(
                f"CMake's trace has a line that is none of its own: {line[:200]}",
                why="the build files write into it, or they fill it up",
                hint="restore the files from the release",
            ) from None
        yield call


def _read_call(line: str, folders: Sequence[Path]) -> Traced:
    entry = json.loads(line)
    texts: list[str] = [entry["file"], *entry["args"]]
    for folder in folders:
        texts = [text.replace(f"{folder}/", "") for text in texts]
    file, *arguments = texts
    place = (file, int(entry["line"]))
    return Traced(entry["cmd"].lower(), place, tuple(arguments))


def mirror(tree: SourceTree, texts: Values, root: Path) -> None:
    """Write build files into ``root``; link everything else of their folders to the tree.

    ``texts`` maps the path of a build file to its text, with pending edits.

    Raises StorageError if a file cannot be written.
    """
    # Folder → names in it that must not be links: files to write, and folders that contain some.
    written: dict[PurePosixPath, set[str]] = {}
    for place in map(PurePosixPath, texts):
        for folder in place.parents:
            name = place.relative_to(folder).parts[0]
            written.setdefault(folder, set()).add(name)

    for folder, names in written.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        # Do not use Path here: it takes longer than making the links.
        for name in {*os.listdir(tree.root / folder)} - names:  # noqa: PTH208
            os.symlink(f"{tree.root}/{folder}/{name}", f"{root}/{folder}/{name}")  # noqa: PTH211
    for path, text in texts.items():
        with translated(at=root / path):  # errors of a write do not name the file
            (root / path).write_text(text, encoding="utf-8")


def cmake_program() -> str:
    """Return the path of CMake's binary. Raises StorageError if it is not installed."""
    # The script that pip puts on PATH starts a Python first; the binary beside it does not. The
    # package is found, not imported: that takes 0.1 s, in each process that a proof forks.
    package = importlib.util.find_spec("cmake")
    if package is not None:
        binary = Path(package.origin or "").parent / "data" / "bin" / "cmake"
        if binary.is_file():
            return str(binary)
    raise StorageError(
        "cmake is not installed: patchkit proves arch lists with it",
        hint="pip install cmake",
    )
