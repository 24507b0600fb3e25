"""Ask a Python for its environment, importing nothing, and play what torch and vLLM do there."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patchkit import elf, process
from patchkit.errors import HostError, SourceError
from patchkit.records import RecordError, record

STEM, SONAME = "libnccl.so", "libnccl.so.2"
_VARIABLE = "VLLM_NCCL_SO_PATH"
_PRELOADED = "LD_PRELOAD, before everything else"
_STARTUP = (
    "loaded when Python started, by a .pth file, sitecustomize or /etc/ld.so.preload"
)
_OF_TORCH = "preloaded by torch itself, from the first nvidia/nccl/lib on sys.path"
_SYMBOL = "ncclGetVersion"
# The library that torch loads before all others of its own.
_GLOBAL_DEPS = "libtorch_global_deps.so"
# A library in the current folder has no path.
_RESOLVED = re.compile(r"\s*(?P<name>\S+)(?: => (?P<path>\S.*))? \(0x[0-9a-f]+\)")
# A row of torch's list of what to preload: a folder below nvidia/, and a pattern.
_ROW = re.compile(
    r"""["'](?P<folder>\w+)["'][,:]\s*["'](?P<pattern>lib[\w-]+\.so[^"']*)["']"""
)
# The call: a torch that does not preload may still define the function.
_CALL = re.compile(r"^\s+_preload_cuda_deps\(\)", re.MULTILINE)
_SCRIPT = Path(__file__).with_name("interpreter_facts.py")
# What Python runs as vLLM: a venv that was moved has no program of the right path.
VLLM = ("-m", "vllm.entrypoints.cli.main")
_HINT = "name the Python of vLLM with --python, for example venv/bin/python"
_CUDA = re.compile(r"""^cuda\b[^=]*=\s*["'](?P<version>[\d.]+)["']""", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterFacts:
    """The answer of ``interpreter_facts``; ``asked`` is the library that vLLM's name leads to."""

    executable: str
    path: tuple[str, ...]
    torch: str | None
    vllm: str | None
    mapped: tuple[str, ...]
    provider: str | None
    asked: str | None

    @property
    def torch_home(self) -> Path:
        assert self.torch is not None
        return Path(self.torch).parent

    @property
    def cuda(self) -> str:
        """Return the CUDA that torch is built for, "" for a build without it."""
        place = self.torch_home / "version.py"
        text = (
            place.read_text(encoding="utf-8", errors="replace")
            if place.is_file()
            else ""
        )
        match = _CUDA.search(text)
        return match["version"] if match else ""


def ask_interpreter(python: str, environment: Mapping[str, str]) -> InterpreterFacts:
    """Start a Python with these variables. Raises HostError."""
    code = _SCRIPT.read_text(encoding="utf-8")
    # Not isolated: variables, .pth files and sitecustomize decide what vLLM would load.
    answer = process.ask(
        python, code, env=environment, isolated=False, timeout=60, hint=_HINT
    )
    try:
        return record(InterpreterFacts, answer)
    except RecordError as error:
        raise HostError(f"{python}: odd answer: {error}", hint=_HINT) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The path of the copy that somebody takes, None for none, and why."""

    path: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Mapped:
    """A libnccl in the process, and why it is there."""

    path: str
    why: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A Python that starts torch and vLLM; ``mapped`` are the libnccl in it, in their order."""

    facts: InterpreterFacts
    environment: Mapping[str, str]
    mapped: list[Mapped] = field(default_factory=list)

    def open(self, path: str, why: str, name: str = "") -> Mapped | None:
        """Map a path as ``dlopen`` does. The same file is not mapped twice, a copy of it is."""
        place = os.path.abspath(path)  # noqa: PTH100  (LD_LIBRARY_PATH may name the current folder)
        library, own = read_dynamic(place), read_dynamic(self.facts.executable)
        if library is None or (own and library.machine != own.machine):
            return None
        for known in self.mapped:
            # As glibc: by device and inode, not by name.
            if Path(known.path).samefile(place):
                return known
        self.mapped.append(Mapped(place, why, frozenset({library.soname, name} - {""})))
        return self.mapped[-1]

    def need(self, name: str, path: str, library: elf.Dynamic) -> Mapped | None:
        """Map what a library needs by a name without a slash."""
        for known in self.mapped:
            if name in known.names:
                return known
        output = process.attempt("ldd", path, env=self.environment).output
        for match in filter(None, map(_RESOLVED.fullmatch, output.splitlines())):
            if match["name"] == name:
                found = match["path"] or name
                folder, (origin, who) = (
                    os.path.realpath(Path(found).parent),
                    os.path.split(path),
                )
                reasons = {
                    f"DT_RPATH of {who}, before LD_LIBRARY_PATH": library.rpath,
                    "LD_LIBRARY_PATH": self.library_path(),
                    f"DT_RUNPATH of {who}, after LD_LIBRARY_PATH": library.runpath,
                }
                for why, folders in reasons.items():
                    places = (
                        re.sub(r"\$ORIGIN|\$\{ORIGIN\}", origin, it) for it in folders
                    )
                    if folder in map(os.path.realpath, places):
                        return self.open(found, why, name)
                return self.open(found, "the system's ld.so.cache or folders", name)
        return None

    def library_path(self) -> list[str]:
        """Return the folders of LD_LIBRARY_PATH; an empty entry is the current one."""
        value = self.environment.get("LD_LIBRARY_PATH", "")
        return [folder or "." for folder in re.split("[:;]", value)] if value else []


def read_dynamic(path: str) -> elf.Dynamic | None:
    """Return None for a file that is not a whole ELF file: the loader would refuse it as well."""
    try:
        return elf.read_dynamic(Path(path))
    except (SourceError, OSError):
        return None


def start_process(facts: InterpreterFacts, environment: Mapping[str, str]) -> Process:
    """Return the process before torch is imported."""
    started = Process(facts=facts, environment=environment)
    # Paths, or names without a slash, which are searched for.
    preloads = {
        Path(entry).name
        for entry in re.split("[: ]+", environment.get("LD_PRELOAD", ""))
    }
    for path in facts.mapped:
        try:
            brings_nccl = Path(path).name.startswith(STEM) or elf.exports(
                Path(path), _SYMBOL
            )
        except (SourceError, OSError):  # a damaged one does not
            brings_nccl = False
        if brings_nccl:
            started.open(path, _PRELOADED if Path(path).name in preloads else _STARTUP)
    return started


def torch_choice(started: Process) -> Choice:
    """Return whose functions torch calls, and map what importing torch loads."""
    facts = started.facts
    home = facts.torch_home / "lib"
    read = ((str(path), read_dynamic(str(path))) for path in sorted(home.glob("*.so*")))
    libraries = {path: library for path, library in read if library}
    needs = {
        path: [name for name in library.needed if name.startswith(STEM)]
        for path, library in libraries.items()
    }
    users = [path for path in libraries if needs[path]]
    if not users:
        return Choice(
            path=None,
            why=f"no library in {home} needs {SONAME}: torch is built without NCCL, "
            "or has it inside",
        )
    if deps := libraries.get(first := str(home / _GLOBAL_DEPS)):
        for name in needs[first]:
            started.need(name, first, deps)
        # Torch preloads by path if this library brought CUDA's runtime.
        if any(name.startswith("libcudart") for name in deps.needed):
            text = (facts.torch_home / "__init__.py").read_text(
                encoding="utf-8", errors="replace"
            )
            if found := find_preloaded(text, facts.cuda, facts.path):
                started.open(found, _OF_TORCH)
    loads = [
        started.need(name, path, libraries[path])
        for path in users
        for name in needs[path]
    ]
    # A function that is global before torch comes is torch's too, whatever torch loads.
    everybodys = (
        library for library in started.mapped if library.path == facts.provider
    )
    # The first library that needs it decides for all: the loader maps one soname once.
    taken = next(everybodys, loads[0])
    if taken is None:
        who = Path(users[0]).name
        return Choice(path=None, why=f"{who} needs {SONAME}, and the loader finds none")
    return Choice(path=taken.path, why=taken.why)


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


def vllm_choice(started: Process) -> Choice:
    """Return what vLLM's own communicator loads, after torch."""
    path = started.environment.get(_VARIABLE)
    if not path and not started.facts.cuda:
        return Choice(
            path=None, why="torch is built without CUDA, so vLLM looks for no libnccl"
        )
    if path and "/" in path:
        found = started.open(path, f"{_VARIABLE} names it")
        why = (
            f"{_VARIABLE} names it"
            if found
            else f"{_VARIABLE} is {path}, which cannot be loaded"
        )
        return Choice(path=found.path if found else None, why=why)
    name = path or SONAME
    known = next((library for library in started.mapped if name in library.names), None)
    if known:
        return Choice(
            path=known.path, why=f"vLLM asks for {name}, which is loaded already"
        )
    # The Python itself has tried that.
    if started.facts.asked and (
        found := started.open(started.facts.asked, "vLLM loads it", name)
    ):
        return Choice(
            path=found.path, why=f"vLLM asks for {name}, and the loader finds it"
        )
    return Choice(path=None, why=f"vLLM asks for {name}, and the loader finds none")
