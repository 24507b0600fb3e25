"""Repack upstream's wheel for one device: its Python and data change, its kernels are checked.

origin → kernels load? → staged tree → apply, proofs → additions → rewrite → wheelhouse
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.version import Version

from patchkit.apply import apply
from patchkit.digests import sha256_of
from patchkit.durable.paths import is_file
from patchkit.elf import by_version, damaged
from patchkit.errors import SourceError, StorageError, UsageError
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, Severity
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import open_workspace
from patchkit.recipes.vllm.libraries import library_table
from patchkit.source.archive import Progress
from patchkit.source.tree import Sandboxed
from patchkit.target import Target, toolkits
from patchkit.unreached import known_dispatch
from patchkit.wheel.build.machine import staging
from patchkit.wheel.device.first_use import first_use_phrase
from patchkit.wheel.device.inspect import Binary, inspect_wheel
from patchkit.wheel.device.libraries import (
    Judged,
    Use,
    cuda_major,
    judge_libraries,
    needed_versions,
    require_loading,
)
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.metadata import read_metadata
from patchkit.wheel.file.write import rewrite_wheel
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.listing import called_entries
from patchkit.wheel.vllm.native_parts import native_parts
from patchkit.wheel.vllm.repack_additions import Additions, PatchedTree, make_additions
from patchkit.wheel.vllm.repack_origin import Origin
from patchkit.wheel.wheelhouse.contents import add_wheel, check_room, load_manifest

Report = Callable[[str], Progress]
_DIST_INFO = "vllm-*.dist-info"
_NEEDED = (
    *("vllm/__init__.py", "vllm/_version.py"),
    *(f"{_DIST_INFO}/METADATA", f"{_DIST_INFO}/WHEEL"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repacked:
    """A wheel in the wheelhouse; ``fresh`` if this run put it there.

    ``source`` has the file name, sha256 and size of the wheel that it was made from.
    """

    wheel: Path
    sha256: str
    size: int
    fresh: bool
    version: Version
    source: Mapping[str, Any]
    outcome: Applied
    libraries: tuple[Judged, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]


def repack_wheel(
    origin: Origin,
    request: Request,
    house: Path,
    *,
    report: Report,
    sandboxed: Sandboxed = Sandboxed.ALWAYS,
    assembler: Assembler | None = None,
    keep_libraries: bool = False,
    say: Callable[[str], None] = lambda _line: None,
) -> Repacked:
    """Patch, prove and write a wheel anew, and put it into the wheelhouse.

    ``sandboxed`` says how proofs may run the wheel's own code. With an ``assembler`` the libraries
    become native, and those for other devices leave unless they are to be kept. Raises ProofError
    if the kernels do not serve the device, UsageError if there is nothing to change; and what
    ``apply`` and ``add_wheel`` raise.
    """
    # The CUDA of the torch that the wheel names, of which its label is.
    target = request.target.with_torch(
        read_metadata(origin.wheel).pins.get("torch", "0")
    )
    request = replace(request, target=target)
    # What the wheel will be called, but for what only the work can tell.
    version = f"{origin.version.public}+{target.cuda_tag}.{target.name}"
    check_room(house, f"vllm-{version}-{origin.wheel.name.tag}.whl")
    # First of all: kernels that do not serve the device cannot be patched into serving it.
    say(f"reading the device code of {origin.wheel.path.name}")
    binaries = inspect_wheel(origin.wheel)
    judged = judge_libraries(binaries, target, origin.version)
    require_loading(judged, target, origin.version)
    with staging() as folder:
        say("patching and proving")
        patched = _patch_tree(
            origin, request, folder / "tree", binaries, judged, sandboxed
        )
        if assembler:
            say("assembling machine code")
            parts = native_parts(
                origin.wheel,
                binaries,
                judged,
                target,
                folder / "native",
                assembler,
                report("Assembling PTX"),
                known_dispatch("vllm", origin.version, target),
                keep=keep_libraries,
            )
            patched = replace(patched, native=parts)
        if not (patched.outcome.written or patched.native.changes):
            raise _unchanged_error(origin, target, native=assembler is not None)
        new = make_additions(patched)
        # Again with the whole name, in which the CUDA of the kernels may be another one.
        check_room(house, new.filename)
        wheel = folder / new.filename
        dropped = patched.native.dropped
        rewrite_wheel(
            origin.wheel, wheel, new.dist_info, new.members, report("Writing"), dropped
        )
        digest, size = sha256_of(wheel), wheel.stat().st_size
        if fresh := not _is_in_wheelhouse(house, new, digest):
            add_wheel(house, wheel, new.facts, say=say)
    return Repacked(
        wheel=house / new.filename,
        sha256=digest,
        size=size,
        fresh=fresh,
        version=origin.version,
        source=origin.fields,
        outcome=patched.outcome,
        libraries=judged,
        notes=(*_install_notes(patched, judged), *_native_notes(patched, binaries)),
        facts=new.facts,
    )


def _patch_tree(
    origin: Origin,
    asked: Request,
    tree: Path,
    binaries: tuple[Binary, ...],
    judged: tuple[Judged, ...],
    sandboxed: Sandboxed,
) -> PatchedTree:
    """Unpack what fixes can read, which is no library, and apply them."""
    for name, data in origin.wheel.texts():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for pattern in _NEEDED:
        if len(found := list(tree.glob(pattern))) != 1:
            raise damaged(
                str(origin.wheel.path), f"it has {pattern} {len(found)} times"
            )
    recipe = load_recipe("vllm")
    wanted = set()
    # Fixes that keep vLLM from kernels that do not load; what --only or --without name stays so.
    lost = any(library.use is Use.PARTLY for library in judged) and not asked.only
    for fix_id in library_table().around if lost else ():
        fix = recipe.fix(fix_id)
        need = fix.need(origin.version, asked.arch, "installed") if fix else None
        if need and need.severity is Severity.OPTIONAL and fix_id not in asked.skip:
            wanted.add(fix_id)
    request = replace(asked, also=asked.also | wanted)
    outcome = apply(tree / "vllm", recipe, request, anew=True, sandboxed=sandboxed)
    (dist_info,) = tree.glob(_DIST_INFO)
    metadata = HeaderParser().parsestr(
        (dist_info / "METADATA").read_text(encoding="utf-8")
    )
    tag, needed = origin.wheel.name.tag, needed_versions(binaries).get("GLIBC", "")
    promised = library_rules().promised_glibc(tag)
    # The libraries may need a newer glibc than the file name says.
    if promised and by_version(needed) > by_version(f"GLIBC_{promised}"):
        glibc = "_".join(re.findall(r"\d+", needed)[:2])
        tag = f"{tag.rpartition('-')[0]}-manylinux_{glibc}_{origin.cpu}"
    return PatchedTree(
        origin=origin,
        asked=asked,
        request=request,
        workspace=open_workspace(tree / "vllm"),
        outcome=outcome,
        recipe=recipe.digest,
        dist_info=dist_info.name,
        license=metadata.get("License-Expression", "NOASSERTION"),
        cuda=cuda_major(binaries),
        tag=tag,
        libraries={library.name: library.use.value for library in judged},
    )


def _unchanged_error(origin: Origin, target: Target, *, native: bool) -> UsageError:
    why = "the release needs none there, or they were left out"
    hint = "install the wheel as it is, make it --native, or choose fixes with --with"
    if native:
        why += "; and no machine code could be assembled"
        hint = "install the wheel as it is, or choose fixes with --with"
    return UsageError(
        f"no fix changes anything in the wheel of vllm {origin.version} for {target.title}",
        why=why,
        hint=hint,
    )


def _is_in_wheelhouse(house: Path, new: Additions, digest: str) -> bool:
    """Check whether the wheelhouse already has this very wheel."""
    try:
        listed = {entry.filename: entry.sha256 for entry in load_manifest(house).wheels}
    except (UsageError, SourceError, StorageError):
        return False  # no folder yet, or a change that add_wheel finishes
    path = house / new.filename
    return (
        listed.get(new.filename) == digest
        and is_file(path)
        and sha256_of(path) == digest
    )


def _install_notes(patched: PatchedTree, judged: tuple[Judged, ...]) -> Iterator[str]:
    """Yield what somebody who installs the wheel has to know."""
    origin, target = patched.origin, patched.request.target
    name, cpu = origin.wheel.name, origin.cpu
    if not origin.locked:
        yield f"not upstream's wheel: {name.filename}, sha256:{origin.wheel.sha256}"
    if cpu != target.cpu:
        yield f"for {cpu}, and {target.title} has {target.cpu}: a wheel for tests elsewhere"
    if patched.cuda != target.cuda.partition(".")[0]:
        yield (
            f"the kernels are linked with CUDA {patched.cuda} (libcudart.so.{patched.cuda}), not "
            f"with {target.cuda}; the wheel's version says so"
        )
    for library in judged:
        if library.missed or library.use is Use.PARTLY:
            yield f"{library.name} {library.phrase}"
    for fix_id in sorted(patched.request.also - patched.asked.also):
        yield f"{fix_id} is on, since kernels that do not load would be chosen and fail"


def _native_notes(patched: PatchedTree, binaries: Iterable[Binary]) -> Iterator[str]:
    """Yield what the device compiles at first use, or what became of that."""
    target, native = patched.request.target, patched.native
    if not native.facts:
        dispatch = known_dispatch("vllm", patched.origin.version, target)
        calls = [called_entries(binary, target, dispatch) for binary in binaries]
        entries = [entry for of_binary in calls for entry in of_binary]
        if entries:
            yield f"{first_use_phrase(entries)}; --native assembles it now"
        row = next(row for row in toolkits() if row.cuda == target.cuda)
        if any(entry.version > toolkits()[0].ptx for entry in entries):
            yield f"drivers older than {row.driver} do not compile PTX of CUDA {row.cuda}"
        return
    count = sum(len(library.ptx) for library in native.libraries)
    if count:
        left = any(library.refused for library in native.libraries)
        none = "" if left else ": none is compiled at first use"
        yield f"{count} fat binaries assembled from upstream's PTX{none}"
    if native.dropped:
        names = ", ".join(
            PurePosixPath(path).name.partition(".")[0] for path in native.dropped
        )
        yield f"left out, as they are for other devices: {names}"
    for library in native.libraries:
        yield from (f"{why}; it is compiled at first use" for why in library.refused)
        for kernels in library.unreached:
            yield f"{kernels.name} stays PTX: on {target.title} {kernels.source} never calls it"
