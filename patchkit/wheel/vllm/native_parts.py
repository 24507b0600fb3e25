"""Make the native parts of a wheel of vLLM: what is assembled in it, and what leaves it.

What leaves are libraries for other devices alone, and only if every import of them may fail.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from patchkit.edit.python import parsed
from patchkit.errors import ProofError
from patchkit.recipes.vllm.build import known_externals
from patchkit.source.fetch import Progress
from patchkit.target import Target
from patchkit.unreached import NOTHING_READ, Dispatch
from patchkit.wheel.device.first_use import jit_entries
from patchkit.wheel.device.inspect import Binary
from patchkit.wheel.device.libraries import Judged, Use
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.make import NativeLibrary, make_native, native_facts
from patchkit.wheel.vllm.upstream_parts import members_of

# Handlers of an import that is missing: ImportError and what it derives from.
_CATCHING = {"", "ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeParts:
    """The libraries of a wheel that were made native, and the members that leave it."""

    libraries: tuple[NativeLibrary, ...] = ()
    dropped: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> bool:
        """Return whether anything of the wheel is another than upstream's."""
        return bool(self.dropped) or any(library.path for library in self.libraries)


def native_parts(
    wheel: WheelFile,
    binaries: Sequence[Binary],
    judged: Iterable[Judged],
    target: Target,
    folder: Path,
    assembler: Assembler,
    progress: Progress,
    dispatch: Dispatch = NOTHING_READ,
    *,
    keep: bool = False,
) -> NativeParts:
    """Assemble what the device would compile in a wheel's libraries; files go below ``folder``.

    What ``dispatch`` never calls stays PTX. ``keep`` leaves the libraries for other devices in.
    Raises ProofError if the wheel's Python cannot do without one of them, and what ``make_native``
    raises.
    """
    idle = () if keep else tuple(each.name for each in judged if each.use is Use.OTHER)
    prove_unneeded(wheel, idle)
    names = [b.name for b in binaries if b.name not in idle and jit_entries(b, target)]
    files = wheel.extract(names, folder / "old")
    made = make_native(files, target, folder, assembler, progress, dispatch)
    return NativeParts(
        libraries=made, dropped=idle, facts=native_facts(made, assembler, idle)
    )


def prove_unneeded(wheel: WheelFile, libraries: Collection[str]) -> None:
    """Prove that vLLM starts without some libraries: each import of one may fail, or is its own.

    Raises ProofError that names the import.
    """
    modules = {PurePosixPath(path).name.partition(".")[0]: path for path in libraries}
    own = [set(members_of(known, wheel.members)) for known in known_externals()]
    for path in (
        [path for path in wheel.members if path.endswith(".py")] if modules else ()
    ):
        text = wheel.text(path)
        if not any(module in text for module in modules):
            continue
        for name, line in _needed_imports(
            parsed(path, text), modules.keys(), guarded=False
        ):
            if not any({path, modules[name]} <= parts for parts in own):
                raise ProofError(
                    f"{path}:{line}: imports {name} and does not do without it",
                    why="this release needs the library even where no device loads it",
                    hint="keep it: --keep-libraries",
                )


def _needed_imports(
    node: ast.AST, modules: Collection[str], *, guarded: bool
) -> Iterator[tuple[str, int]]:
    """Yield module and line of each import that runs with the file and must not fail."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                pass  # runs when it is called
            case ast.Import() | ast.ImportFrom():
                origin = child.module or "" if isinstance(child, ast.ImportFrom) else ""
                named = ".".join(
                    [origin, *(alias.name for alias in child.names)]
                ).split(".")
                for name in set(named) & set(modules) if not guarded else ():
                    yield name, child.lineno
            case ast.Try():
                caught = {
                    ast.unparse(kind).rpartition(".")[2] if kind else ""
                    for handler in child.handlers
                    for kind in getattr(handler.type, "elts", [handler.type])
                }
                body = ast.Module(child.body, [])
                yield from _needed_imports(
                    body, modules, guarded=guarded or bool(caught & _CATCHING)
                )
                rest = ast.Module(
                    [*child.handlers, *child.orelse, *child.finalbody], []
                )  # type: ignore[list-item]
                yield from _needed_imports(rest, modules, guarded=guarded)
            case _:
                yield from _needed_imports(child, modules, guarded=guarded)
