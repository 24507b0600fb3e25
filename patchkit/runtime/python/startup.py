"""Play on a ``Process`` what torch and vLLM do about libnccl when they start."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError
from patchkit.runtime.python.interpreter import InterpreterFacts
from patchkit.runtime.python.loader import Library, Process, exports, read_library

STEM, SONAME = "libnccl.so", "libnccl.so.2"
_VARIABLE = "VLLM_NCCL_SO_PATH"
_PRELOADED = "LD_PRELOAD, before everything else"
_STARTUP = "loaded when Python started, by a .pth file, sitecustomize or /etc/ld.so.preload"
_SYMBOL = "ncclGetVersion"
# The library that torch loads before all others of its own.
_GLOBAL_DEPS = "libtorch_global_deps.so"
# A row of torch's list of what to preload: a folder below nvidia/, and a pattern.
_ROW = re.compile(r"""["'](?P<folder>\w+)["'][,:]\s*["'](?P<pattern>lib[\w-]+\.so[^"']*)["']""")
# The call: a torch that does not preload may still define the function.
_CALL = re.compile(r"^\s+_preload_cuda_deps\(\)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The path of the copy that somebody takes, None for none, and why."""

    path: str | None
    why: str


def start_process(facts: InterpreterFacts, environment: Mapping[str, str]) -> Process:
    """Return the process before torch is imported. Raises HostError."""
    executable = read_library(facts.executable)
    if executable is None:
        raise HostError(f"{facts.executable}: is not an ELF program, so it is not Python on Linux")
    process = Process(executable=executable, environment=environment, multiarch=facts.multiarch)
    # Paths, or names without a slash, which are searched for.
    preloads = {Path(entry).name for entry in re.split("[: ]+", environment.get("LD_PRELOAD", ""))}
    for path in facts.mapped:
        if Path(path).name.startswith(STEM) or exports(path, _SYMBOL):
            process.open(path, _PRELOADED if Path(path).name in preloads else _STARTUP)
    return process


def torch_choice(process: Process, facts: InterpreterFacts) -> Choice:
    """Return whose functions torch calls, and map what importing torch loads."""
    home = facts.torch_home / "lib"
    libraries = [found for path in sorted(home.glob("*.so*")) if (found := read_library(str(path)))]
    users = [library for library in libraries if _nccl_needs(library)]
    if not users:
        return Choice(
            path=None,
            why=f"no library in {home} needs {SONAME}: torch is built without NCCL, "
            "or has it inside",
        )
    for library in libraries:
        if Path(library.path).name == _GLOBAL_DEPS:
            _map_nccl(process, library)
            # Torch preloads by path if this library brought CUDA's runtime.
            if any(name.startswith("libcudart") for name in library.needed):
                init = facts.torch_home / "__init__.py"
                text = init.read_text(encoding="utf-8", errors="replace")
                if path := find_preloaded(text, facts.cuda, facts.path):
                    why = "preloaded by torch itself, from the first nvidia/nccl/lib on sys.path"
                    process.open(path, why)
    loads = [_map_nccl(process, user) for user in users]
    # A function that is global before torch comes is torch's too, whatever torch loads.
    everybodys = (library for library in process.mapped if library.path == facts.provider)
    # The first library that needs it decides for all: the loader maps one soname once.
    taken = next(everybodys, loads[0])
    if taken is None:
        who = Path(users[0].path).name
        return Choice(path=None, why=f"{who} needs {SONAME}, and the loader finds none")
    return Choice(path=taken.path, why=taken.why)


def _nccl_needs(library: Library) -> list[str]:
    return [name for name in library.needed if name.startswith(STEM)]


def _map_nccl(process: Process, library: Library) -> Library | None:
    found = [process.need(name, library) for name in _nccl_needs(library)]
    return found[0] if found else None


def find_preloaded(text: str, cuda: str, path: Sequence[str]) -> str | None:
    """Return the libnccl that ``torch/__init__.py`` preloads, by its own list of libraries.

    torch stops, silently, at the first library of the list that is in no folder of ``sys.path``.
    """
    major = cuda.partition(".")[0]
    for row in _ROW.finditer(text) if _CALL.search(text) else ():
        folder, pattern = row["folder"], row["pattern"]
        candidates = (
            candidate
            for entry in path
            for place in (f"nvidia/{folder}", f"nvidia/cu{major}", folder)
            # In the order of the file system, unsorted as in torch: pathlib's is not the same.
            for candidate in glob.glob(f"{glob.escape(entry)}/{place}/lib/{pattern}")  # noqa: PTH207
        )
        found = next(candidates, None)
        if found is None or folder == "nccl":
            return found
    return None


def vllm_choice(process: Process, facts: InterpreterFacts) -> Choice:
    """Return what vLLM's own communicator loads, after torch."""
    path = process.environment.get(_VARIABLE)
    if not path and not facts.cuda:
        return Choice(path=None, why="torch is built without CUDA, so vLLM looks for no libnccl")
    if path and "/" in path:
        found = process.open(path, f"{_VARIABLE} names it")
        why = f"{_VARIABLE} names it" if found else f"{_VARIABLE} is {path}, which cannot be loaded"
        return Choice(path=found.path if found else None, why=why)
    name = path or SONAME
    known = next((library for library in process.mapped if name in library.names), None)
    caller = read_library(facts.caller) if facts.caller else None
    found = known or process.need(name, caller or process.executable)
    if found is None:
        return Choice(path=None, why=f"vLLM asks for {name}, and the loader finds none")
    how = "which is loaded already" if known else f"found by {found.why}"
    return Choice(path=found.path, why=f"vLLM asks for {name}, {how}")
