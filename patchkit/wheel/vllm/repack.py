"""Repack upstream's wheel for one device: its Python and data change, its kernels are checked.

origin → kernels → patched tree → native parts → additions → new wheel → wheelhouse

Each step returns a new value, made from the values of earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.version import Version

from patchkit.apply import apply
from patchkit.digests import sha256_of
from patchkit.durable.paths import is_file
from patchkit.errors import SourceError, StorageError, UsageError
from patchkit.frozen import frozen
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, Severity
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import open_workspace
from patchkit.recipes.vllm.libraries import library_table
from patchkit.source.resolve import Report
from patchkit.source.tree import Sandboxed
from patchkit.target import Target, toolkits
from patchkit.unreached import known_dispatch
from patchkit.wheel.build.machine import staging
from patchkit.wheel.device.fatbin import CodeEntry
from patchkit.wheel.device.first_use import first_use_phrase
from patchkit.wheel.device.libraries import Judged, Use, require_loading
from patchkit.wheel.file.metadata import read_metadata
from patchkit.wheel.file.wheelfile import Facts
from patchkit.wheel.file.write import rewrite_wheel
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.listing import called_entries
from patchkit.wheel.vllm.native_parts import (
    Kernels,
    NativeParts,
    native_parts,
    read_kernels,
)
from patchkit.wheel.vllm.repack_additions import PatchedTree, make_additions
from patchkit.wheel.vllm.repack_origin import Origin
from patchkit.wheel.wheelhouse.contents import add_wheel, check_room, load_manifest


@frozen
class Repacked:
    """A repacked wheel in the wheelhouse; ``fresh`` if this run put it there.

    ``source`` has file name, sha256 and size of the wheel that was repacked.
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
    facts: Facts


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
    """Patch and prove the wheel ``origin``, and put the new wheel into the wheelhouse ``house``.

    ``sandboxed`` says how proofs may run the wheel's own code. With an ``assembler``, PTX in the
    libraries becomes machine code, and libraries for other devices are left out unless
    ``keep_libraries``. Raises ProofError if the kernels do not serve the device, UsageError if
    there is nothing to change, and the errors of ``apply`` and ``add_wheel``.
    """
    # The torch that the wheel requires decides the CUDA of the target.
    torch = read_metadata(origin.wheel).pins.get("torch", "0")
    target = request.target.with_torch(torch)
    request = replace(request, target=target)
    # The version without its digest, which is not known yet.
    version = f"{origin.version.public}+{target.cuda_tag}.{target.name}"
    check_room(house, f"vllm-{version}-{origin.wheel.name.tag}.whl")

    # First of all: kernels that do not serve the device cannot be patched into serving it.
    say(f"reading the device code of {origin.wheel.path.name}")
    kernels = read_kernels(origin.wheel, target, origin.version)
    require_loading(kernels.judged, target, origin.version)

    with staging() as folder:
        say("patching and proving")
        patched = _patch_tree(origin, request, kernels, folder / "tree", sandboxed)

        native = NativeParts()
        if assembler:
            say("assembling machine code")
            native = native_parts(
                origin.wheel,
                kernels,
                target,
                folder / "native",
                assembler,
                report("Assembling PTX"),
                known_dispatch("vllm", origin.version, target),
                keep=keep_libraries,
            )
        if not (patched.outcome.written or native.changes):
            raise _unchanged_error(origin, target, native=assembler is not None)

        new = make_additions(patched, kernels, native)
        wheel = folder / new.filename
        bar = report("Writing")
        rewrite_wheel(
            origin.wheel,
            wheel,
            new.dist_info,
            new.members,
            bar,
            native.dropped,
        )

        digest = sha256_of(wheel)
        size = wheel.stat().st_size
        fresh = not _is_in_wheelhouse(house, new.filename, digest)
        if fresh:
            add_wheel(house, wheel, new.facts, say=say)

    notes = [*_install_notes(patched, kernels), *_native_notes(patched, native)]
    if not native.facts:
        notes += _first_use_notes(origin, target, kernels)
    return Repacked(
        wheel=house / new.filename,
        sha256=digest,
        size=size,
        fresh=fresh,
        version=origin.version,
        source=origin.fields,
        outcome=patched.outcome,
        libraries=kernels.judged,
        notes=tuple(notes),
        facts=new.facts,
    )


def _patch_tree(
    origin: Origin,
    request: Request,
    kernels: Kernels,
    tree: Path,
    sandboxed: Sandboxed,
) -> PatchedTree:
    """Unpack the wheel without its libraries into ``tree``, and apply the fixes."""
    for name, data in origin.wheel.texts():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    recipe = load_recipe("vllm")
    around = _fixes_around(origin, request, kernels)
    effective = replace(request, also=request.also | around)
    outcome = apply(tree / "vllm", recipe, effective, anew=True, sandboxed=sandboxed)
    return PatchedTree(
        origin=origin,
        request=request,
        turned_on=tuple(sorted(around - request.also)),
        workspace=open_workspace(tree / "vllm", "vllm"),
        outcome=outcome,
    )


def _fixes_around(origin: Origin, request: Request, kernels: Kernels) -> set[str]:
    """Return the optional fixes that keep vLLM from choosing kernels that do not load.

    Return none if every kernel loads. ``--only`` and ``--without`` of the request are respected.
    """
    has_lost = any(library.use is Use.PARTLY for library in kernels.judged)
    if request.only or not has_lost:
        return set()

    around = set()
    for fix_id in set(library_table().around) - request.skip:
        fix = load_recipe("vllm").fix(fix_id)
        need = fix.need(origin.version, request.arch, "installed") if fix else None
        if need and need.severity is Severity.OPTIONAL:
            around.add(fix_id)

    return around


def _unchanged_error(origin: Origin, target: Target, *, native: bool) -> UsageError:
    error = UsageError(
        f"no fix changes anything in the wheel of vllm {origin.version} for {target.title}",
        why="the release needs none there, or they were left out",
        hint="install the wheel as it is, make it --native, or choose fixes with --with",
    )
    if native:
        error.why += "; and no machine code could be assembled"
        error.hint = "install the wheel as it is, or choose fixes with --with"
    return error


def _is_in_wheelhouse(house: Path, filename: str, digest: str) -> bool:
    """Return whether the wheelhouse lists a wheel of this name and sha256, and has its file."""
    try:
        wheels = load_manifest(house).wheels
    except (UsageError, SourceError, StorageError):
        return False  # no folder yet, or a change that add_wheel finishes

    path = house / filename
    is_listed = (filename, digest) in [
        (wheel.filename, wheel.sha256) for wheel in wheels
    ]
    return is_listed and is_file(path) and sha256_of(path) == digest


def _install_notes(patched: PatchedTree, kernels: Kernels) -> Iterator[str]:
    """Yield notes for the user who installs the wheel: its origin, CPU, CUDA and kernels."""
    origin = patched.origin
    target = patched.request.target
    if not origin.locked:
        name = origin.wheel.name.filename
        yield f"not upstream's wheel: {name}, sha256:{origin.wheel.sha256}"

    if origin.cpu != target.cpu:
        yield (
            f"for {origin.cpu}, and {target.title} has {target.cpu}: "
            "a wheel for tests elsewhere"
        )

    cuda = kernels.cuda
    if cuda != target.cuda.partition(".")[0]:
        yield (
            f"the kernels are linked with CUDA {cuda} (libcudart.so.{cuda}), not with "
            f"{target.cuda}; the wheel's version says so"
        )

    for library in kernels.judged:
        if library.missed or library.use is Use.PARTLY:
            yield f"{library.name} {library.phrase}"
    for fix_id in patched.turned_on:
        yield f"{fix_id} is on, since kernels that do not load would be chosen and fail"


def _first_use_notes(origin: Origin, target: Target, kernels: Kernels) -> Iterator[str]:
    """Yield notes on the PTX that the device compiles at first use, if the wheel has any."""
    dispatch = known_dispatch("vllm", origin.version, target)
    entries: list[CodeEntry] = []
    for binary in kernels.binaries:
        entries += called_entries(binary, target, dispatch)
    if not entries:
        return

    yield f"{first_use_phrase(entries)}; --native assembles it now"
    oldest = toolkits()[0]
    if any(entry.version > oldest.ptx for entry in entries):
        row = next(row for row in toolkits() if row.cuda == target.cuda)
        yield f"drivers older than {row.driver} do not compile PTX of CUDA {row.cuda}"


def _native_notes(patched: PatchedTree, native: NativeParts) -> Iterator[str]:
    """Yield notes on PTX that was assembled, PTX that could not be, and libraries left out."""
    refused = list(native.refused_notes)
    if native.count:
        end = "" if refused else ": none is compiled at first use"
        yield f"{native.count} fat binaries assembled from upstream's PTX{end}"
    if native.dropped:
        names = [PurePosixPath(path).name for path in native.dropped]
        stems = [name.partition(".")[0] for name in names]
        yield f"left out, as they are for other devices: {', '.join(stems)}"

    title = patched.request.target.title
    for library in native.libraries:
        yield from library.refused_notes
        for kernels in library.unreached:
            yield f"{kernels.name} stays PTX: on {title} {kernels.source} never calls it"
