"""Make the native parts of a wheel: assemble libraries, and leave some out.

A library leaves if it is for other devices alone, and if every import of it may fail.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from dataclasses import field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from patchkit.edit.python import parsed
from patchkit.errors import ProofError
from patchkit.frozen import Texts, frozen
from patchkit.recipes.vllm.build import KnownSource, known_externals
from patchkit.source.fetch import Progress
from patchkit.target import Target
from patchkit.wheel.device.inspect import Binaries, inspect_wheel, jit_entries
from patchkit.wheel.device.libraries import Judgements, Use, cuda_major, judge_libraries
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import Facts, WheelFile
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.make import NativeLibraries, make_native, native_facts

# Handlers of an import that is missing: ImportError and what it derives from.
_CATCHING = {"", "ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


@frozen
class Kernels:
    """The libraries of a wheel, each judged on the device."""

    binaries: Binaries
    judged: Judgements

    @property
    def cuda(self) -> str:
        """Return the major version of the CUDA that the libraries are linked with.

        Return "" for libraries that no table knows, if they need none or several.
        """
        majors = {str(major) for binary in self.binaries for major in binary.cuda}
        if self.judged or len(majors) == 1:
            return cuda_major(self.binaries)
        return ""


def read_kernels(wheel: WheelFile, target: Target) -> Kernels:
    """Read the libraries of a wheel. Raises SourceError for a damaged one."""
    binaries = inspect_wheel(wheel)
    judged = judge_libraries(binaries, target, wheel.name)
    return Kernels(binaries=binaries, judged=judged)


@frozen
class NativeParts:
    """The libraries of a wheel that were made native, and the members that leave it.

    Empty for a wheel that is not made native.
    """

    libraries: NativeLibraries = ()
    dropped: Texts = ()
    facts: Facts = field(default_factory=dict)

    @property
    def members(self) -> dict[str, bytes]:
        """The new libraries, by their path in the wheel."""
        return {
            library.name: library.path.read_bytes()
            for library in self.libraries
            if library.path
        }

    @property
    def changes(self) -> bool:
        """True if the wheel has other libraries than upstream's."""
        return bool(self.dropped) or any(library.path for library in self.libraries)

    @property
    def count(self) -> int:
        """The number of fat binaries that were assembled."""
        return sum(len(library.ptx) for library in self.libraries)

    @property
    def refused_notes(self) -> list[str]:
        """Sentences about the PTX that the device still compiles."""
        return [note for library in self.libraries for note in library.refused_notes]


def native_parts(
    wheel: WheelFile,
    kernels: Kernels,
    target: Target,
    folder: Path,
    assembler: Assembler,
    progress: Progress,
    *,
    keep: bool,
) -> NativeParts:
    """Assemble the PTX in a wheel's libraries that the device would compile, into ``folder``.

    ``keep`` leaves the libraries for other devices in. Raises ProofError if the wheel's Python
    cannot do without one of them, and the errors of ``make_native``.
    """
    dropped: Texts = ()
    if not keep:
        dropped = tuple(
            library.name for library in kernels.judged if library.use is Use.OTHER
        )
        prove_unneeded(wheel, dropped)

    names = [
        binary.name
        for binary in kernels.binaries
        if binary.name not in dropped
        and jit_entries(binary, target)
        and not library_rules().is_closed(wheel.name.project, binary.name)
    ]
    files = wheel.extract(names, folder / "old")
    made = make_native(files, target, folder, assembler, progress)
    facts = native_facts(made, assembler, dropped)
    return NativeParts(libraries=made, dropped=dropped, facts=facts)


def prove_unneeded(wheel: WheelFile, libraries: Collection[str]) -> None:
    """Prove that a package starts without some libraries.

    Each import of one may fail, or stands in a file of the project that the library belongs to.
    Raises ProofError that names the import.
    """
    if not libraries:
        return

    paths = {PurePosixPath(path).name.partition(".")[0]: path for path in libraries}
    projects = [set(members_of(known, wheel.members)) for known in known_externals()]
    for path in wheel.members:
        if not path.endswith(".py"):
            continue

        text = wheel.text(path)
        if not any(module in text for module in paths):
            continue

        for name, line in _needed_imports(parsed(path, text)):
            is_internal = any({path, paths.get(name)} <= part for part in projects)
            if name in paths and not is_internal:
                raise ProofError(
                    f"{path}:{line}: imports {name} and does not do without it",
                    why="this release needs the library even where no device loads it",
                    hint="keep it: --keep-libraries",
                )


def members_of(known: KnownSource, paths: Iterable[str]) -> Texts:
    """Return the paths of a wheel that belong to a source, in their order."""
    return tuple(
        path
        for path in paths
        if any(fnmatchcase(path, part) for part in known.installed)
    )


def _needed_imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield name and line of each import that runs when the file is imported and must succeed."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            return  # runs when it is called
        case ast.Import() | ast.ImportFrom():
            parts = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                parts.append(node.module or "")
            for name in ".".join(parts).split("."):
                yield name, node.lineno

    guarded: list[ast.stmt] = []
    if isinstance(node, ast.Try) and _catches_import(node):
        guarded = node.body
    for child in ast.iter_child_nodes(node):
        if child not in guarded:
            yield from _needed_imports(child)


def _catches_import(node: ast.Try) -> bool:
    for handler in node.handlers:
        for kind in getattr(handler.type, "elts", [handler.type]):
            name = ast.unparse(kind).rpartition(".")[2] if kind else ""
            if name in _CATCHING:
                return True

    return False
