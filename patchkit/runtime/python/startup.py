"""Work out which libnccl torch and vLLM would load in a Python environment, importing neither.

A Python is asked for its paths and mapped files; the loading by torch and vLLM is simulated.
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import field
from itertools import chain, product
from pathlib import Path

from patchkit import elf, process
from patchkit.errors import HostError, SourceError
from patchkit.frozen import Texts, Values, frozen, positional
from patchkit.records import RecordError, record
from patchkit.runtime.python.distributions import read_lines

STEM = "libnccl.so"
SONAME = "libnccl.so.2"
_VARIABLE = "VLLM_NCCL_SO_PATH"
_PRELOADED = "LD_PRELOAD, before everything else"
_STARTUP = (
    "loaded when Python started, by a .pth file, sitecustomize or /etc/ld.so.preload"
)
_OF_TORCH = "preloaded by torch itself, from the first nvidia/nccl/lib on sys.path"
# The first of its own libraries that torch loads.
_GLOBAL_DEPS = "libtorch_global_deps.so"
# A line of ldd. A library that was found in the current folder has a name, and no path.
_RESOLVED = r"\s*(?P<name>\S+)(?: => (?P<path>\S.*))? \(0x[0-9a-f]+\)"
_ORIGIN = r"\$ORIGIN|\$\{ORIGIN\}"
# A row of torch's list of what to preload: a folder below nvidia/, and a pattern.
_ROW = r"""["'](?P<folder>\w+)["'][,:]\s*["'](?P<pattern>lib[\w-]+\.so[^"']*)["']"""
# Search for the call: a torch that does not preload may still define the function.
_CALL = re.compile(r"^\s+_preload_cuda_deps\(\)", re.MULTILINE)
_SCRIPT = Path(__file__).with_name("interpreter_facts.py")
# Start vLLM as a module: in a venv that was moved, the script bin/vllm names the old venv's Python.
VLLM = ("-m", "vllm.entrypoints.cli.main")
_HINT = "name the Python of vLLM with --python, for example venv/bin/python"
_CUDA = re.compile(r"""^cuda\b[^=]*=\s*["'](?P<version>[\d.]+)["']""", re.MULTILINE)


@frozen
class InterpreterFacts:
    """The answer of ``interpreter_facts``.

    ``torch`` and ``vllm`` are the paths of their ``__init__.py``, None if not installed. ``mapped``
    are the files that Python has mapped right after it started. ``provider`` is the library that
    defines the global ncclGetVersion. ``asked`` is the library that ``dlopen`` finds for the name
    that vLLM passes to it; None if it finds none, or if VLLM_NCCL_SO_PATH is a path.
    """

    executable: str
    path: Texts
    torch: str | None
    vllm: str | None
    mapped: Texts
    provider: str | None
    asked: str | None

    @property
    def torch_home(self) -> Path:
        assert self.torch is not None
        return Path(self.torch).parent

    @property
    def cuda(self) -> str:
        """Return the CUDA version that torch is built for, ``13.0``; "" if for none."""
        lines = read_lines(self.torch_home / "version.py")
        match = _CUDA.search("\n".join(lines))
        return match["version"] if match else ""


def ask_interpreter(python: str, environment: Values) -> InterpreterFacts:
    """Start a Python under these variables and return its facts.

    Raises HostError if it cannot be run or its answer is malformed.
    """
    code = _SCRIPT.read_text(encoding="utf-8")

    # Not isolated: variables, .pth files and sitecustomize decide what vLLM would load.
    answer = process.ask(
        python, code, env=environment, isolated=False, timeout=60, hint=_HINT
    )

    try:
        return record(InterpreterFacts, answer)
    except RecordError as error:
        raise HostError(f"{python}: odd answer: {error}", hint=_HINT) from None


@positional
class Choice:
    """The path of the libnccl that torch or vLLM loads (None if it loads none), and the reason."""

    path: str | None
    why: str


@frozen
class Mapped:
    """A mapped libnccl: its path, the reason, and its names (its soname and the requested name)."""

    path: str
    why: str
    names: frozenset[str]


@frozen
class SimulatedProcess:
    """A simulated process in which a Python imports torch and vLLM.

    ``mapped`` lists the libnccl files that it has mapped, in the order of loading.
    """

    facts: InterpreterFacts
    environment: Values
    mapped: list[Mapped] = field(default_factory=list)

    def map_file(self, path: str, why: str, name: str = "") -> Mapped | None:
        """Map a library by its path, as ``dlopen`` does; return it, or None if it cannot be loaded.

        A file that is mapped already, under any path, is not mapped again. A copy of the file is.
        """
        place = os.path.abspath(path)  # noqa: PTH100  (LD_LIBRARY_PATH may name the current folder)
        library = read_library(place)
        if library is None:
            return None

        for mapped in self.mapped:
            # glibc too compares files by device and inode, not by name.
            if Path(mapped.path).samefile(place):
                return mapped

        names = frozenset({library.soname, name} - {""})
        mapped = Mapped(path=place, why=why, names=names)
        self.mapped.append(mapped)
        return mapped

    def map_needed(self, name: str, user: str) -> Mapped | None:
        """Map the library ``name`` that the library at the path ``user`` needs (DT_NEEDED).

        Return it, or None if the dynamic loader does not find it or cannot load it.
        """
        for mapped in self.mapped:
            if name in mapped.names:
                return mapped

        place = self._resolve(name, user)
        if place is None:
            return None

        return self.map_file(place, self._why_there(place, user), name)

    def _resolve(self, name: str, user: str) -> str | None:
        """Return the path that ``ldd`` gives for a name that ``user`` needs, None if none."""
        output = process.attempt("ldd", user, env=self.environment).output

        for line in output.splitlines():
            match = re.fullmatch(_RESOLVED, line)
            if match and match["name"] == name:
                return match["path"] or name

        return None

    def _why_there(self, place: str, user: str) -> str:
        """Return why the loader, on behalf of the library ``user``, finds a file in its folder.

        The reasons are tried in the order in which the loader searches.
        """
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
                searched = re.sub(_ORIGIN, lambda _match: origin, entry)
                if os.path.realpath(searched) == folder:
                    return reason

        return "the system's ld.so.cache or folders"

    def library_path(self) -> list[str]:
        """Return the folders of LD_LIBRARY_PATH; an empty entry is the current folder."""
        value = self.environment.get("LD_LIBRARY_PATH")
        if not value:
            return []

        return [folder or "." for folder in re.split("[:;]", value)]


def read_library(path: str) -> elf.Dynamic | None:
    """Read the dynamic section of a library; return None if it is no complete ELF file."""
    try:
        return elf.read_dynamic(Path(path))
    except (SourceError, OSError):
        return None


def start_process(facts: InterpreterFacts, environment: Values) -> SimulatedProcess:
    """Return the process as it is before torch is imported, with each libnccl mapped so far."""
    started = SimulatedProcess(facts=facts, environment=environment)
    entries = re.split("[: ]+", environment.get("LD_PRELOAD", ""))

    # An entry is a path or a name without a slash, so compare file names only.
    preloaded_names = {Path(entry).name for entry in entries}

    for path in facts.mapped:
        if Path(path).name.startswith(STEM):
            is_preloaded = Path(path).name in preloaded_names
            started.map_file(path, _PRELOADED if is_preloaded else _STARTUP)

    return started


def choose_for_torch(started: SimulatedProcess) -> Choice:
    """Map each libnccl that ``import torch`` loads; return the one whose functions torch calls."""
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
        # If ncclGetVersion is global before torch is imported, torch uses that, whatever it loads.
        if mapped.path == started.facts.provider:
            return Choice(mapped.path, mapped.why)

    # The first library that needs libnccl decides for all: the loader maps a soname only once.
    first = loads[0]
    if first is None:
        return Choice(
            None, f"{users[0].name} needs {SONAME}, and the loader finds none"
        )
    return Choice(first.path, first.why)


def _needed_nccl(path: Path) -> list[str]:
    """Return the libnccl names in the DT_NEEDED entries of a library; none if it is unreadable."""
    library = read_library(str(path))
    needed = library.needed if library else ()
    return [name for name in needed if name.startswith(STEM)]


def _load_global_deps(started: SimulatedProcess, place: Path) -> None:
    """Map the libnccl that torch loads before its other libraries.

    ``place`` is the path of libtorch_global_deps.so. Its own dependencies are mapped first. If it
    needs libcudart, torch then preloads a libnccl from ``sys.path``, which is mapped too. Does
    nothing if the file is missing or is no ELF file.
    """
    library = read_library(str(place))
    if library is None:
        return

    for name in _needed_nccl(place):
        started.map_needed(name, str(place))

    # torch preloads only if this library has loaded CUDA's runtime.
    if not any(name.startswith("libcudart") for name in library.needed):
        return

    facts = started.facts
    text = "\n".join(read_lines(facts.torch_home / "__init__.py"))
    if preloaded := find_preloaded(text, facts.cuda, facts.path):
        started.map_file(preloaded, _OF_TORCH)


def find_preloaded(text: str, cuda: str, path: Sequence[str]) -> str | None:
    """Return the path of the libnccl that torch preloads, None if it preloads none.

    ``text`` is ``torch/__init__.py``, which lists the libraries to preload. ``cuda`` is the CUDA
    version of torch, ``path`` is ``sys.path``. torch goes through the list and stops silently at
    the first library that is in no folder of ``sys.path``.
    """
    if not _CALL.search(text):
        return None

    major = cuda.partition(".")[0]
    for row in re.finditer(_ROW, text):
        folder = row["folder"]
        places = (f"nvidia/{folder}", f"nvidia/cu{major}", folder)
        patterns = (
            f"{glob.escape(entry)}/{place}/lib/{row['pattern']}"
            for entry, place in product(path, places)
        )

        # Like torch, take glob's own unsorted order; pathlib's differs.
        candidates = chain.from_iterable(map(glob.iglob, patterns))
        library = next(candidates, None)

        if library is None or folder == "nccl":
            return library

    return None


def choose_for_vllm(started: SimulatedProcess) -> Choice:
    """Return the libnccl that vLLM's own communicator loads, and map it.

    Call ``choose_for_torch`` first: vLLM gets a library that torch has loaded under that name.
    """
    named = started.environment.get(_VARIABLE)
    if not named and not started.facts.cuda:
        return Choice(None, "torch is built without CUDA, so vLLM looks for no libnccl")
    if named and "/" in named:
        library = started.map_file(named, f"{_VARIABLE} names it")
        if library is None:
            return Choice(None, f"{_VARIABLE} is {named}, which cannot be loaded")

        return Choice(library.path, f"{_VARIABLE} names it")

    name = named or SONAME
    for mapped in started.mapped:
        if name in mapped.names:
            why = f"vLLM asks for {name}, which is loaded already"
            return Choice(mapped.path, why)

    # The Python that was asked has tried to load this name.
    asked = started.facts.asked
    library = started.map_file(asked, "vLLM loads it", name) if asked else None

    if library is None:
        return Choice(None, f"vLLM asks for {name}, and the loader finds none")
    return Choice(library.path, f"vLLM asks for {name}, and the loader finds it")
