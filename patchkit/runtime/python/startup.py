"""Ask a Python for its environment, importing nothing, and play what torch and vLLM do there."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path

from patchkit import elf, process
from patchkit.errors import HostError, SourceError
from patchkit.frozen import frozen
from patchkit.records import RecordError, record

Environment = Mapping[str, str]
STEM = "libnccl.so"
SONAME = "libnccl.so.2"
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
_ORIGIN = re.compile(r"\$ORIGIN|\$\{ORIGIN\}")
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


@frozen
class InterpreterFacts:
    """The answer of ``interpreter_facts``.

    ``mapped`` are the files that Python has mapped when it has started. ``provider`` is the library
    whose ncclGetVersion is global. ``asked`` is the library that vLLM gets by the name it loads.
    """

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
        if not place.is_file():
            return ""

        match = _CUDA.search(place.read_text(encoding="utf-8", errors="replace"))
        return match["version"] if match else ""


def ask_interpreter(python: str, environment: Environment) -> InterpreterFacts:
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


@dataclass(frozen=True, slots=True)
class Choice:
    """The path of the libnccl that torch or vLLM takes, None for none, and why."""

    path: str | None
    why: str


@frozen
class Mapped:
    """A libnccl in the process, and why it is there."""

    path: str
    why: str
    names: frozenset[str]


@frozen
class Process:
    """A Python that starts torch and vLLM.

    ``mapped`` are the libnccl files in it, in the order in which they came.
    """

    facts: InterpreterFacts
    environment: Environment
    mapped: list[Mapped] = field(default_factory=list)

    def map_file(self, path: str, why: str, name: str = "") -> Mapped | None:
        """Map a path as ``dlopen`` does. The same file is not mapped twice, a copy of it is."""
        place = os.path.abspath(path)  # noqa: PTH100  (LD_LIBRARY_PATH may name the current folder)
        library = read_library(place)
        program = read_library(self.facts.executable)
        if library is None or (program and library.machine != program.machine):
            return None

        for mapped in self.mapped:
            # As glibc: by device and inode, not by name.
            if Path(mapped.path).samefile(place):
                return mapped

        names = frozenset({library.soname, name} - {""})
        mapped = Mapped(path=place, why=why, names=names)
        self.mapped.append(mapped)
        return mapped

    def map_needed(self, name: str, user: str) -> Mapped | None:
        """Map what a library, whose path is ``user``, needs by a name without a slash."""
        for mapped in self.mapped:
            if name in mapped.names:
                return mapped

        place = self._resolve(name, user)
        if place is None:
            return None

        return self.map_file(place, self._why_there(place, user), name)

    def _resolve(self, name: str, user: str) -> str | None:
        """Return the file that the dynamic loader takes for a name, None for none."""
        output = process.attempt("ldd", user, env=self.environment).output

        for line in output.splitlines():
            match = _RESOLVED.fullmatch(line)
            if match and match["name"] == name:
                return match["path"] or name

        return None

    def _why_there(self, place: str, user: str) -> str:
        """Return what leads the loader from a library to a file, in the loader's order."""
        library = elf.read_dynamic(Path(user))
        origin, user_name = os.path.split(user)
        folders_by_reason = {
            f"DT_RPATH of {user_name}, before LD_LIBRARY_PATH": library.rpath,
            "LD_LIBRARY_PATH": self.library_path(),
            f"DT_RUNPATH of {user_name}, after LD_LIBRARY_PATH": library.runpath,
        }

        folder = os.path.realpath(Path(place).parent)
        for reason, folders in folders_by_reason.items():
            for entry in folders:
                searched = _ORIGIN.sub(lambda _match: origin, entry)
                if os.path.realpath(searched) == folder:
                    return reason

        return "the system's ld.so.cache or folders"

    def library_path(self) -> list[str]:
        """Return the folders of LD_LIBRARY_PATH; an empty entry is the current one."""
        value = self.environment.get("LD_LIBRARY_PATH")
        if not value:
            return []

        return [folder or "." for folder in re.split("[:;]", value)]


def read_library(path: str) -> elf.Dynamic | None:
    """Return None for a file that is not a whole ELF file: the loader would refuse it as well."""
    try:
        return elf.read_dynamic(Path(path))
    except (SourceError, OSError):
        return None


def start_process(facts: InterpreterFacts, environment: Environment) -> Process:
    """Return the process before torch is imported."""
    started = Process(facts=facts, environment=environment)
    entries = re.split("[: ]+", environment.get("LD_PRELOAD", ""))

    # Paths, or names without a slash, which are searched for.
    preloaded_names = {Path(entry).name for entry in entries}

    for path in facts.mapped:
        if _brings_nccl(Path(path)):
            is_preloaded = Path(path).name in preloaded_names
            started.map_file(path, _PRELOADED if is_preloaded else _STARTUP)

    return started


def _brings_nccl(path: Path) -> bool:
    if path.name.startswith(STEM):
        return True

    try:
        return elf.exports(path, _SYMBOL)
    except (SourceError, OSError):  # a damaged one does not
        return False


def choose_for_torch(started: Process) -> Choice:
    """Return whose functions torch calls, and map what importing torch loads."""
    home = started.facts.torch_home / "lib"
    names_by_user = {path: _needed_nccl(path) for path in sorted(home.glob("*.so*"))}
    users = [path for path, names in names_by_user.items() if names]
    if not users:
        reason = "torch is built without NCCL, or has it inside"
        return Choice(None, f"no library in {home} needs {SONAME}: {reason}")

    _load_global_deps(started, home / _GLOBAL_DEPS)
    loads = [
        started.map_needed(name, str(path))
        for path in users
        for name in names_by_user[path]
    ]

    for mapped in started.mapped:
        # A function that is global before torch comes is torch's too, whatever torch loads.
        if mapped.path == started.facts.provider:
            return Choice(mapped.path, mapped.why)

    # The first library that needs it decides for all: the loader maps one soname once.
    first = loads[0]
    if first is None:
        return Choice(
            None, f"{users[0].name} needs {SONAME}, and the loader finds none"
        )
    return Choice(first.path, first.why)


def _needed_nccl(path: Path) -> list[str]:
    """Return the names of the libnccl that a library needs."""
    library = read_library(str(path))
    needed = library.needed if library else ()
    return [name for name in needed if name.startswith(STEM)]


def _load_global_deps(started: Process, place: Path) -> None:
    """Load the library that torch loads before all others, and what torch preloads for it."""
    library = read_library(str(place))
    if library is None:
        return

    for name in _needed_nccl(place):
        started.map_needed(name, str(place))

    # Torch preloads by path if this library brought CUDA's runtime.
    if not any(name.startswith("libcudart") for name in library.needed):
        return

    facts = started.facts
    init = facts.torch_home / "__init__.py"
    text = init.read_text(encoding="utf-8", errors="replace")
    if preloaded := find_preloaded(text, facts.cuda, facts.path):
        started.map_file(preloaded, _OF_TORCH)


def find_preloaded(text: str, cuda: str, path: Sequence[str]) -> str | None:
    """Return the libnccl that ``torch/__init__.py`` preloads, by its own list of libraries.

    torch stops, silently, at the first library of the list that is in no folder of ``sys.path``.
    """
    if not _CALL.search(text):
        return None

    major = cuda.partition(".")[0]
    for row in _ROW.finditer(text):
        folder = row["folder"]
        places = (f"nvidia/{folder}", f"nvidia/cu{major}", folder)
        patterns = (
            f"{glob.escape(entry)}/{place}/lib/{row['pattern']}"
            for entry, place in product(path, places)
        )

        # In the order of the file system, unsorted as in torch: pathlib's is not the same.
        candidates = chain.from_iterable(map(glob.iglob, patterns))
        library = next(candidates, None)

        if library is None or folder == "nccl":
            return library

    return None


def choose_for_vllm(started: Process) -> Choice:
    """Return what vLLM's own communicator loads, after torch."""
    named = started.environment.get(_VARIABLE)
    if not named and not started.facts.cuda:
        return Choice(None, "torch is built without CUDA, so vLLM looks for no libnccl")
    if named and "/" in named:
        return _choose_named(started, named)

    name = named or SONAME
    for mapped in started.mapped:
        if name in mapped.names:
            why = f"vLLM asks for {name}, which is loaded already"
            return Choice(mapped.path, why)

    # The Python itself has tried that.
    asked = started.facts.asked
    library = started.map_file(asked, "vLLM loads it", name) if asked else None

    if library is None:
        return Choice(None, f"vLLM asks for {name}, and the loader finds none")
    return Choice(library.path, f"vLLM asks for {name}, and the loader finds it")


def _choose_named(started: Process, path: str) -> Choice:
    """Return the copy that VLLM_NCCL_SO_PATH names, if it can be loaded."""
    why = f"{_VARIABLE} names it"
    library = started.map_file(path, why)

    if library is None:
        return Choice(None, f"{_VARIABLE} is {path}, which cannot be loaded")

    return Choice(library.path, why)
