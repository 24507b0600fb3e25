"""Prove that a library holds the code that its sources were compiled to.

CMake writes down how each source is compiled; the inspector says what was linked. Nothing may be
missing in between, or have another arch. Where CMake names no arch, nvcc has one of its own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from patchkit.errors import BuildError, ProofError
from patchkit.recipes.vllm.archs import Group
from patchkit.recipes.vllm.sources import CudaSource, codes_of, default_codes
from patchkit.target import Load, Target, parse_arch
from patchkit.wheel.device.inspect import Binary, fat_binaries

# nvcc's -gencode arch=compute_121a,code=sm_121a; one code= may hold a list of several.
_CODE = re.compile(r"code=(\S+)")
# CMake puts the objects of a target below CMakeFiles/TARGET.dir/.
_LIBRARY = re.compile(r"-o (?:\S*/)?CMakeFiles/([\w.+-]+)\.dir/")


def compiled_sources(build: Path, source: Path) -> tuple[CudaSource, ...]:
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
        codes = codes_of(_CODE.findall(command))
        sources.append(CudaSource(str(name), library[1], codes or default_codes()))
    return tuple(sources)


def prove_groups(groups: Iterable[Group], sources: Sequence[CudaSource]) -> str:
    """Prove that nvcc compiles each kernel group for the archs of the arch proof; say so.

    A group is known by its first CUDA source; one whose name several sources share is left aside.
    Raises ProofError.
    """
    held = 0
    for group in (group for group in groups if group.archs):
        found = [source for source in sources if f"/{source.source}".endswith(f"/{group.name}.cu")]
        if len(found) != 1:
            continue
        said = {code for arch in group.archs for code in parse_arch(arch).codes}
        if said != found[0].names:
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
    sources: Sequence[CudaSource], binaries: Iterable[Binary], target: Target
) -> tuple[str, ...]:
    """Prove that each library holds what its sources were compiled to; say so of each library.

    Raises ProofError.
    """
    libraries = {PurePosixPath(binary.name).name.partition(".")[0]: binary for binary in binaries}
    by_library: dict[str, list[CudaSource]] = {}
    for source in sources:
        by_library.setdefault(source.library, []).append(source)
    for name in by_library.keys() - libraries.keys():
        raise ProofError(
            f"{name} was compiled, and is not in the wheel",
            why="it was linked, and not installed",
            hint="run again with --fresh",
        )
    proofs = []
    for name, own in sorted(by_library.items()):
        binary, expected = libraries[name], Counter(source.names for source in own)
        # By name: an arch that a fat binary tells also knows whether PTX is beside it.
        linked = Counter(
            frozenset(entry.name for entry in group) for group in fat_binaries(binary.live)
        )
        if missing := expected - linked:
            names, count = next(iter(missing.items()))
            first = next(source.source for source in own if source.names == names)
            raise ProofError(
                f"{binary.name} lacks {count} of {expected[names]} fat binaries with "
                f"{' and '.join(sorted(names))}, what {first} for example was compiled to",
                why="objects of another build were linked",
                hint="run again with --fresh",
            )
        exact = sum(source.load(target) is Load.EXACT for source in own)
        proof = f"{exact} of {len(own)} CUDA sources are exact for {target.title}"
        proofs.append(f"{binary.name}: {proof}")
    return tuple(proofs)
