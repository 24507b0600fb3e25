"""Prove that a library holds the code that its sources were compiled to.

CMake writes down how each source is compiled; the inspector says what was linked. Nothing may be
missing in between, or have another arch.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from patchkit.errors import BuildError, ProofError
from patchkit.recipes.vllm.archs import Group
from patchkit.target import Arch, Load, Target, parse_arch
from patchkit.wheel.device.inspect import Binary, arch_name, fat_binaries, reach

Codes = frozenset[tuple[str, Arch]]
"""Kind ("sass" or "ptx") and arch of the entries of one fat binary."""

Names = frozenset[str]
"""Such codes as nvcc names them: ``sm_121a``, ``compute_89``."""

# nvcc's -gencode arch=compute_121a,code=sm_121a; one code= may hold a list of several.
_CODE = re.compile(r"code=(\S+)")
_NUMBER = re.compile(r"\b(sm|compute)_(\d+)(\d)([af]?)\b")
# CMake puts the objects of a target below CMakeFiles/TARGET.dir/.
_LIBRARY = re.compile(r"-o (?:\S*/)?CMakeFiles/([\w.+-]+)\.dir/")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A CUDA source, the library that it goes into, and what it was compiled to."""

    source: str
    library: str
    codes: Codes

    @property
    def names(self) -> Names:
        return _names(self.codes)

    def load(self, target: Target) -> Load:
        return max((reach(kind, arch, target) for kind, arch in self.codes), default=Load.NONE)


def compiled_sources(build: Path, source: Path) -> tuple[Compiled, ...]:
    """Read the CUDA sources below ``build`` from CMake's compile_commands.json.

    Paths are relative to ``source`` where they are in it. Raises BuildError if there is none.
    """
    found = sorted(build.rglob("compile_commands.json"))
    if not found:
        raise BuildError(f"{build}: CMake left no compile_commands.json")
    sources = []
    for entry in json.loads(found[0].read_text(encoding="utf-8")):
        path, command = Path(entry["file"]), entry["command"]
        if path.suffix != ".cu":
            continue
        library = _LIBRARY.search(command)
        if library is None:
            raise BuildError(f"{path}: CMake does not say which library it is for")
        name = path.relative_to(source) if path.is_relative_to(source) else path
        codes = frozenset(
            ("sass" if match[1] == "sm" else "ptx", parse_arch(f"{match[2]}.{match[3]}{match[4]}"))
            for names in _CODE.findall(command)
            for match in _NUMBER.finditer(names)
        )
        sources.append(Compiled(str(name), library[1], codes))
    return tuple(sources)


def prove_groups(groups: Iterable[Group], sources: Sequence[Compiled]) -> str:
    """Prove that nvcc compiles each kernel group for the archs of the arch proof; say so.

    A group is known by its first CUDA source; one whose name several sources share is left aside.
    Raises ProofError.
    """
    held = 0
    for group in (group for group in groups if group.archs):
        found = [source for source in sources if f"/{source.source}".endswith(f"/{group.name}.cu")]
        if len(found) != 1:
            continue
        said = {arch_name("sass", parse_arch(arch)) for arch in group.archs}
        if said != {name for name in found[0].names if name.startswith("sm_")}:
            raise ProofError(
                f"{found[0].source} is compiled for {' and '.join(sorted(found[0].names))}, and "
                f"{group.where} says {' and '.join(sorted(said))}",
                why="CMake was given another arch list, or other files than those that were proved",
                hint="run again with --fresh",
            )
        held += 1
    # A comparison of nothing must not pass for a proof.
    if not held:
        raise ProofError("no kernel group of the arch proof is among what CMake compiles")
    return f"{held} kernel groups are compiled for the archs that were proved"


def prove_compiled(
    sources: Sequence[Compiled], binaries: Iterable[Binary], target: Target
) -> tuple[str, ...]:
    """Prove that each library holds what its sources were compiled to; say so of each library.

    Raises ProofError.
    """
    libraries = {PurePosixPath(binary.name).name.partition(".")[0]: binary for binary in binaries}
    by_library: dict[str, list[Compiled]] = {}
    for source in sources:
        by_library.setdefault(source.library, []).append(source)
    for name in by_library.keys() - libraries.keys():
        raise ProofError(
            f"{name} was compiled, and is not in the wheel",
            why="it was linked, and not installed",
            hint="run again with --fresh",
        )
    return tuple(_proved(libraries[name], own, target) for name, own in sorted(by_library.items()))


def _proved(binary: Binary, sources: list[Compiled], target: Target) -> str:
    wanted = Counter(source.names for source in sources)
    # By name: an arch that a fat binary tells also knows whether PTX is beside it.
    linked = Counter(
        _names((entry.kind, entry.arch) for entry in group) for group in fat_binaries(binary.live)
    )
    if missing := wanted - linked:
        names, count = next(iter(missing.items()))
        first = next(source.source for source in sources if source.names == names)
        raise ProofError(
            f"{binary.name} lacks {count} of {wanted[names]} fat binaries with "
            f"{' and '.join(sorted(names)) or 'nothing'}, what {first} for example was compiled to",
            why="objects of another build were linked",
            hint="run again with --fresh",
        )
    exact = sum(source.load(target) is Load.EXACT for source in sources)
    return f"{binary.name}: {exact} of {len(sources)} CUDA sources are exact for {target.title}"


def _names(codes: Iterable[tuple[str, Arch]]) -> Names:
    return frozenset(arch_name(kind, arch) for kind, arch in codes)
