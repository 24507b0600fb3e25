"""Which CUDA sources a release compiles into which library, and what each of them is compiled to.

CMake runs as in ``archs.py``. What a build writes before it globs for sources, Marlin kernels, is
written by the release's own generators, by name alone. Sources of flash-attention are in no tree:
``build.toml`` says how many there are where somebody counted them.
"""

from __future__ import annotations

import builtins
import importlib
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import PurePosixPath
from types import SimpleNamespace

from patchkit.errors import UsageError
from patchkit.paths import RECIPES
from patchkit.proof.cmake import Traced
from patchkit.proof.questions import ask
from patchkit.proof.upstream_code import execute
from patchkit.recipes.vllm.archs import cmake_texts, traced, unreadable
from patchkit.recipes.vllm.build import known_externals
from patchkit.recipes.vllm.leave_out import asked_targets
from patchkit.records import read_toml
from patchkit.source.tree import SourceTree
from patchkit.target import Arch, Load, Target, load, load_ptx, parse_arch

Codes = frozenset[tuple[str, Arch]]
"""Kind ("sass" or "ptx") and arch of the entries of one fat binary."""

_NAME = re.compile(r"\b(sm|compute)_(\d{1,3})(\d)([af]?)\b")
_GENERATOR = "generate_kernels.py"  # Marlin's; Machete's asks CUTLASS, and is for 9.x alone
# Calls that arch_trace.cmake adds for the trace alone.
_CODE, _LIBRARY = "patchkit_code", "patchkit_library"


@dataclass(frozen=True, slots=True)
class CudaSource:
    """A CUDA source, the library that it goes into, and what it is compiled to."""

    source: str
    library: str
    codes: Codes

    @property
    def names(self) -> frozenset[str]:
        """Return its codes as nvcc names them: ``sm_121a``, ``compute_89``."""
        prefixes = {"sass": "sm", "ptx": "compute"}
        return frozenset(f"{prefixes[kind]}_{arch.gencode}" for kind, arch in self.codes)

    def load(self, target: Target) -> Load:
        """Return the best way that its code reaches a device."""
        return max((_reach(code, target) for code in self.codes), default=Load.NONE)

    def dead(self, target: Target) -> bool:
        """Return whether nothing of it is meant for a device: nvcc's own arch is for none."""
        return self.load(target) is Load.NONE or self.codes == default_codes()

    def foreign(self, target: Target) -> bool:
        """Return whether it has machine code that the device does not load."""
        return any(kind == "sass" and not _reach((kind, arch), target) for kind, arch in self.codes)


def codes_of(names: Iterable[str]) -> Codes:
    """Return the codes that texts name as nvcc does: ``sm_121a``, ``[sm_120f,compute_120f]``."""
    return frozenset(
        ("sass" if match[1] == "sm" else "ptx", parse_arch(f"{match[2]}.{match[3]}{match[4]}"))
        for name in names
        for match in _NAME.finditer(name)
    )


@cache
def default_codes() -> Codes:
    """Return what nvcc compiles a source to whose command line names no arch."""
    return codes_of(read_toml(list[str], RECIPES / "toolchain.toml", key="default_codes"))


def _reach(code: tuple[str, Arch], target: Target) -> Load:
    kind, arch = code
    return (load if kind == "sass" else load_ptx)(arch, target.capability)


def planned_sources(
    tree: SourceTree, target: Target, arch_list: str, cuda: str
) -> tuple[CudaSource, ...]:
    """Return what CMake compiles of the libraries that setup.py asks for, as ``evaluate`` does.

    ``build.toml`` knows of sources of other projects that are not named in the tree. Raises
    ProofError.
    """
    texts, gencode = cmake_texts(tree), target.gencode_flags(arch_list)
    calls = traced(tree, texts, gencode, cuda)
    if generated := _generated(tree, calls):
        calls = traced(tree, texts, gencode, cuda, generated)
    asked = asked_targets(tree)
    found = (*_compiled(calls), *_counted(tree, target))
    return tuple(source for source in found if source.library in asked)


def not_counted(tree: SourceTree, sources: Sequence[CudaSource], target: Target) -> list[str]:
    """Return libraries that setup.py asks for, whose sources nobody counted."""
    asked, counted = asked_targets(tree), {source.library for source in sources}
    return [
        library
        for external in known_externals()
        for library in external.elsewhere
        if library in asked - counted and external.serves(target.major, tree.version)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryCount:
    """CUDA sources of one library, by how their code reaches a device.

    ``family`` have machine code that is not for the very device, and loads; ``ptx`` are those that
    the device compiles at first use, ``dead`` those with no code that is meant for it. ``foreign``
    of them all have machine code for other devices.
    """

    library: str
    sources: int
    exact: int
    family: int
    ptx: int
    dead: int
    foreign: int

    @property
    def in_vain(self) -> bool:
        return self.dead == self.sources


def counts(sources: Iterable[CudaSource], target: Target) -> list[LibraryCount]:
    """Return a count of each library, by name."""
    by_library: dict[str, list[CudaSource]] = {}
    for source in sources:
        by_library.setdefault(source.library, []).append(source)
    return [_count(name, own, target) for name, own in sorted(by_library.items())]


def check_in_vain(tree: SourceTree, target: Target, arch_list: str) -> None:
    """Raise UsageError for a library none of whose sources has code for the device."""
    found = counts(planned_sources(tree, target, arch_list, target.cuda), target)
    for count in (count for count in found if count.in_vain):
        raise UsageError(
            f"{count.library} would be compiled in vain: none of its {count.sources} CUDA sources "
            f"has code for {target.title}",
            why="what CMake makes of the arch list leaves them to nvcc's own, or to other devices'",
            hint=_way_out(count.library),
        )


def _way_out(library: str) -> str:
    for external in known_externals():
        if library in external.targets:
            return f"with all fixes, or with --without {external.option}, it is not built"
    return "`patchkit archs` shows which list its sources have"


def _count(name: str, sources: Sequence[CudaSource], target: Target) -> LibraryCount:
    dead = sum(source.dead(target) for source in sources)
    loads = Counter(source.load(target) for source in sources if not source.dead(target))
    return LibraryCount(
        library=name,
        sources=len(sources),
        exact=loads[Load.EXACT],
        family=loads[Load.FAMILY] + loads[Load.COMPATIBLE],
        ptx=loads[Load.JIT],
        dead=dead,
        foreign=sum(source.foreign(target) for source in sources),
    )


def _compiled(calls: Iterable[Traced]) -> Iterator[CudaSource]:
    """Yield the CUDA sources of each library that CMake was told of, each of them once."""
    codes: defaultdict[str, set[str]] = defaultdict(set)
    libraries: dict[tuple[str, str], None] = {}
    for call in calls:
        if call.command in (_CODE, _LIBRARY):
            if not (items := _items(call.arguments)):
                raise unreadable(call)
            first, *named = items
            for source in (item for item in named if item.endswith(".cu")):
                if call.command == _CODE:
                    codes[source].add(first)
                else:
                    libraries[first, source] = None
    for library, source in libraries:
        yield CudaSource(source, library, codes_of(codes[source]) or default_codes())


def _counted(tree: SourceTree, target: Target) -> Iterator[CudaSource]:
    """Yield the sources of other projects that somebody counted, at the pin of the release."""
    for external in known_externals():
        pin = external.pin_of(tree.version)
        for counted in external.count:
            if pin is not None and counted.pin == pin.pin and target.name in counted.targets:
                codes = codes_of(counted.codes) or default_codes()
                for number in range(counted.sources):
                    yield CudaSource(f"{external.name}/{number}", counted.library, codes)


def _generated(tree: SourceTree, calls: Iterable[Traced]) -> list[str]:
    """Return the CUDA sources that the release's generators write, as CMake starts them."""
    questions = []
    for call in calls:
        if call.command == "execute_process" and call.where[0].endswith("CMakeLists.txt"):
            words = _items(call.arguments)
            for place, word in enumerate(words):
                if PurePosixPath(word).name == _GENERATOR:
                    rest = words[place + 1 :]
                    ends = [i for i, word in enumerate(rest) if word.endswith("_VARIABLE")]
                    if not ends:
                        raise unreadable(call)
                    questions.append(partial(_written, tree, word, rest[: ends[0]]))
    written = ask(tree, questions, list[str]) if questions else []
    return sorted({path for paths in written for path in paths if path.endswith(".cu")})


def _written(tree: SourceTree, script: str, arguments: Sequence[str]) -> list[str]:
    """Run a generator that can write nothing; return the names of the files that it opens."""
    opened: list[str] = []
    given = {
        "sys": SimpleNamespace(argv=[script, *arguments]),
        "glob": SimpleNamespace(glob=lambda _pattern: []),
        "subprocess": SimpleNamespace(call=lambda _command: 0),
        "jinja2": SimpleNamespace(
            Template=lambda _text: SimpleNamespace(render=lambda **_named: "")
        ),
    }

    def imported(name: str, *_rest: object) -> object:
        return given[name] if name in given else importlib.import_module(name)

    def noted(path: str, *_mode: object) -> io.StringIO:
        opened.append(path)
        return io.StringIO()

    execute(
        compile(tree.read(script), script, "exec"),
        {
            "__name__": "__main__",
            "__file__": script,
            "__builtins__": {**vars(builtins), "open": noted, "__import__": imported},
        },
    )
    return opened


def _items(arguments: Iterable[str]) -> list[str]:
    """Return what a list of CMake's holds, however it was handed over."""
    return [item for argument in arguments for item in argument.split(";") if item]
