"""Tell what NCCL's own build files would do, without a compiler or a GPU.

GNU make reads makefiles/common.mk and is told the version that nvcc would tell. CMake runs the
CMakeLists.txt that decides archs in script mode, and says which.

Both run in a sandbox, and can start no program. CMake can read the tree, and write nothing but its
trace; make can write nothing at all. NCCL's makefiles compare CUDA's version by
``$(shell test …)``: make gets them with the answers.
"""

import operator
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from patchkit.durable.staging import ScratchFolder
from patchkit.errors import HostError, ProofError
from patchkit.frozen import Texts, Values
from patchkit.proof.child_process import run
from patchkit.proof.cmake import mirror, run_script
from patchkit.proof.sandbox import box_for, program_box
from patchkit.source.tree import SourceTree

COMMON_MK = "makefiles/common.mk"
ROOT_FILE = "CMakeLists.txt"
_SCRIPT = Path(__file__).with_name("build_trace.cmake")
_USING = "Using CUDA_ARCHITECTURES: "
_COMPARED = re.compile(r'"0\$\(CUDA_(MAJOR|MINOR)\)" -(ge|gt|eq|lt) (\d{1,4})')
_TEST = rf"\$\(shell test ((?:{_COMPARED.pattern}(?: -[ao] )?)+); echo \$\$\?\)"
_PRINT = "include common.mk\n$(info patchkit $(NVCUFLAGS))\nnothing: ;\n"


def make_flags(
    tree: SourceTree,
    cuda: str,
    *,
    environment: Values | None = None,
    arguments: Sequence[str] = (),
) -> Texts:
    """Return the flags that make hands to nvcc of a version, for every device file.

    ``environment`` and ``arguments`` are what a user sets. Raises HostError without GNU make,
    ProofError if it stops.
    """
    make = shutil.which("make")
    if make is None:
        raise HostError("make is not installed", hint="sudo apt install make")
    # The file would split the version with a pipe of two programs.
    major, minor = cuda.split(".")[:2]
    text = _answer_tests(tree.read(COMMON_MK), {"MAJOR": major, "MINOR": minor})
    with ScratchFolder() as folder:
        home = Path(folder)
        (home / "common.mk").write_text(text, encoding="utf-8")
        (home / "Makefile").write_text(_PRINT, encoding="utf-8")
        given = (f"CUDA_VERSION={cuda}", f"CUDA_MAJOR={major}", f"CUDA_MINOR={minor}")
        needed = replace(program_box(Path(make)), read=(home,))
        done = run(
            [make, "--no-print-directory", *given, *arguments],
            box_for(tree, needed),
            folder=home,
            environment={"PATH": "/usr/bin:/bin", **(environment or {})},
        )
    lines = [line for line in done.text.splitlines() if line.startswith("patchkit ")]
    trouble = done.trouble
    if "not permitted" in done.error_text:
        # make itself goes on without the program.
        trouble = "it starts a program, and in the sandbox it may not"
    elif not trouble and len(lines) != 1:
        trouble = f"it says {len(lines)} times what nvcc is given, expected 1"
    try:
        if not trouble:
            return tuple(shlex.split(lines[0])[1:])
    except ValueError as error:  # a quote without its second
        trouble = f"what nvcc is given has {error}"
    raise ProofError(
        f"make stopped in {COMMON_MK} ({trouble}): {(done.error_text or done.text).strip()}",
        why="the file was edited by hand, or upstream rewrote it",
        hint="restore the file from the release; `apply --trust-source` runs it without a sandbox",
    )


def _answer_tests(text: str, versions: Values) -> str:
    """Return a makefile with the answers of programs in their place.

    They are the exit code of each test of CUDA's version, and the name of the system.
    """

    def answer(test: re.Match[str]) -> str:
        # -a binds closer than -o.
        for choice in test[1].split(" -o "):
            comparisons = _COMPARED.findall(choice)
            if all(
                getattr(operator, sign)(int(versions[part]), int(number))
                for part, sign, number in comparisons
            ):
                return "0"
        return "1"

    return re.sub(_TEST, answer, text).replace("$(shell uname -s)", "Linux")


def gencodes(flags: Sequence[str]) -> Texts:
    """Return the -gencode flags among others, as they are written."""
    return tuple(flag for flag in flags if flag.startswith("-gencode"))


def configured_archs(
    tree: SourceTree, cuda: str, definitions: Sequence[str] = ()
) -> str:
    """Return what CMake would build for. ``definitions`` are the user's, as ``-DNAME=VALUE``.

    Raises ProofError if CMake stops, or does not say what archs it uses.
    """
    with ScratchFolder() as folder:
        root = Path(folder, "tree")
        build = Path(folder, "build")
        build.mkdir()
        mirror(tree, {ROOT_FILE: tree.read(ROOT_FILE)}, root)
        given = [
            f"-DPATCHKIT_TREE={root}",
            f"-DPATCHKIT_CUDA={cuda}",
            *definitions,
        ]
        log = build / "trace"
        ended = run_script(
            tree, _SCRIPT, given, folder=build, beside=Path(folder), log=log
        )
    if ended.trouble:
        words = ended.error_text.replace(f"{root}/", "")
        raise ProofError(
            f"CMake stopped in NCCL's build files ({ended.trouble}):\n{words}",
            why="the files were edited by hand, or upstream rewrote them",
            hint="restore them from the release",
        )
    said = [
        line.partition(_USING)[2] for line in ended.text.splitlines() if _USING in line
    ]
    if len(said) != 1:
        raise ProofError(
            f"{ROOT_FILE} says {len(said)} times which archs it uses, expected 1",
            why="upstream rewrote the choice of archs",
        )
    return said[0]
