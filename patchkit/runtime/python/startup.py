"""Play on a ``Process`` what torch and vLLM do about libnccl when they start."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError
from patchkit.runtime.python.interpreter import InterpreterFacts
from patchkit.runtime.python.loader import Loadable, Mapped, Process, exports, read_loadable

STEM, SONAME = "libnccl.so", "libnccl.so.2"
VARIABLE = "VLLM_NCCL_SO_PATH"
PRELOAD = "LD_PRELOAD"
PRELOADED = f"{PRELOAD}, before everything else"
STARTUP = "loaded when Python started, by a .pth file, sitecustomize or /etc/ld.so.preload"
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


def started(facts: InterpreterFacts, environment: Mapping[str, str]) -> Process:
    """Return the process before torch is imported. Raises HostError."""
    executable = read_loadable(facts.executable)
    if executable is None:
        raise HostError(f"{facts.executable}: is not an ELF program, so it is not Python on Linux")
    process = Process(executable=executable, environment=environment, multiarch=facts.multiarch)
    for path in facts.mapped:
        if Path(path).name.startswith(STEM) or exports(path, _SYMBOL):
            # By name: an entry of LD_PRELOAD without a slash is searched for.
            asked = any(Path(path).name == Path(entry).name for entry in preloads(environment))
            process.open(path, PRELOADED if asked else STARTUP)
    return process


def preloads(environment: Mapping[str, str]) -> list[str]:
    """Return the entries of LD_PRELOAD: paths, or names that the loader looks for."""
    return re.split("[: ]+", environment.get(PRELOAD, ""))


def torch_choice(process: Process, facts: InterpreterFacts) -> Choice:
    """Return whose functions torch calls, and map what importing torch loads."""
    home = facts.torch_home / "lib"
    libraries = [
        found for path in sorted(home.glob("*.so*")) if (found := read_loadable(str(path)))
    ]
    users = [library for library in libraries if any(_nccl_needs(library))]
    deps = [library for library in libraries if library.name == _GLOBAL_DEPS]
    if not users:
        return Choice(
            path=None,
            why=f"no library in {home} needs {SONAME}: torch is built without NCCL, "
            "or has it inside",
        )
    for library in deps:
        _map_nccl(process, library)
        _map_preloaded(process, facts, library)
    loads = [_map_nccl(process, user) for user in users]
    # A function that is global before torch comes is torch's too, whatever torch loads.
    everybodys = (each for each in process.mapped if each.path == facts.provider)
    # The first library that needs it decides for all: the loader maps one soname once.
    taken = next(everybodys, loads[0])
    if taken is None:
        return Choice(path=None, why=f"{users[0].name} needs {SONAME}, and the loader finds none")
    return Choice(path=taken.path, why=taken.why)


def _nccl_needs(library: Loadable) -> Iterator[str]:
    return (name for name in library.needed if name.startswith(STEM))


def _map_nccl(process: Process, library: Loadable) -> Mapped | None:
    found = [process.need(name, library) for name in _nccl_needs(library)]
    return found[0] if found else None


def _map_preloaded(process: Process, facts: InterpreterFacts, deps: Loadable) -> None:
    """Map the copy that torch loads by its path, if its first library brought CUDA's runtime."""
    if any(name.startswith("libcudart") for name in deps.needed):
        text = (facts.torch_home / "__init__.py").read_text(encoding="utf-8", errors="replace")
        if found := preloaded(text, facts.cuda, facts.path):
            process.open(
                found, "preloaded by torch itself, from the first nvidia/nccl/lib on sys.path"
            )


def preloaded(text: str, cuda: str, path: Sequence[str]) -> str | None:
    """Return the libnccl that ``torch/__init__.py`` preloads, by its own list of libraries.

    torch stops, silently, at the first library of the list that is in no folder of ``sys.path``.
    """
    if not _CALL.search(text):
        return None
    for row in _ROW.finditer(text):
        found = next(_torch_candidates(row["folder"], row["pattern"], cuda, path), None)
        if found is None or row["folder"] == "nccl":
            return found
    return None


def _torch_candidates(folder: str, pattern: str, cuda: str, path: Sequence[str]) -> Iterator[str]:
    major = cuda.partition(".")[0]
    for entry in path:
        for place in (f"nvidia/{folder}", f"nvidia/cu{major}", folder):
            # In the order of the file system, unsorted as in torch: pathlib's is not the same.
            yield from glob.glob(f"{glob.escape(entry)}/{place}/lib/{pattern}")  # noqa: PTH207


def vllm_choice(process: Process, facts: InterpreterFacts) -> Choice:
    """Return what vLLM's own communicator loads, after torch."""
    named = process.environment.get(VARIABLE)
    if not named and not facts.cuda:
        return Choice(path=None, why="torch is built without CUDA, so vLLM looks for no libnccl")
    if named and "/" in named:
        found = process.open(named, f"{VARIABLE} names it")
        why = f"{VARIABLE} names it" if found else f"{VARIABLE} is {named}, which cannot be loaded"
        return Choice(path=found.path if found else None, why=why)
    return _by_name(process, facts, named or SONAME)


def _by_name(process: Process, facts: InterpreterFacts, name: str) -> Choice:
    known = next((each for each in process.mapped if name in each.names), None)
    caller = read_loadable(facts.caller) if facts.caller else None
    found = known or process.need(name, caller or process.executable)
    if found is None:
        return Choice(path=None, why=f"vLLM asks for {name}, and the loader finds none")
    asks = f"vLLM asks for {name}, "
    return Choice(
        path=found.path,
        why=asks + ("which is loaded already" if known else f"found by {found.why}"),
    )
