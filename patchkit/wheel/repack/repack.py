"""Upstream's wheel, patched for one device: its Python and data change, its kernels are checked.

origin → kernels load? → staged tree → apply, proofs → edition → rewrite → wheelhouse
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from patchkit.apply import Outcome, apply, open_workspace, request_fields
from patchkit.digests import sha256_of
from patchkit.durable.names import is_file
from patchkit.elf import by_version, damaged
from patchkit.errors import DriftError, SourceError, StorageError, UsageError
from patchkit.patching.fix import Request, Severity, State
from patchkit.patching.recipe import load_recipe
from patchkit.quoting import quoted
from patchkit.source.tree import Sandboxed
from patchkit.wheel.build.work import staging
from patchkit.wheel.device.inspect import Binary, inspect
from patchkit.wheel.device.libraries import (
    Judged,
    Use,
    cuda_major,
    judge,
    require_loading,
    told,
    torch_without_cuda,
    ways_around,
)
from patchkit.wheel.file.members import texts
from patchkit.wheel.file.rewrite import Progress, rewrite
from patchkit.wheel.repack.additions import Draft, Edition, edition
from patchkit.wheel.repack.upstream import Origin, find_wheel, locked_wheels
from patchkit.wheel.wheelhouse.contents import add, entries, make_room

Report = Callable[[str], Progress]
_MANYLINUX = re.compile(r"manylinux(?P<policy>1|2010|2014|_2_\d+)_(?P<cpu>\w+)")
_HOME = "vllm-*.dist-info"
_NEEDED = ("vllm/__init__.py", "vllm/_version.py", f"{_HOME}/METADATA", f"{_HOME}/WHEEL")
_IN_EFFECT = (State.APPLIED, State.UPSTREAM)
_POLICIES = {"1": 5, "2010": 12, "2014": 17}  # the minor of glibc 2; PEP 513, 571, 599


@dataclass(frozen=True, slots=True, kw_only=True)
class Repacked:
    """A wheel in the wheelhouse; ``fresh`` if this run put it there."""

    wheel: Path
    sha256: str
    size: int
    fresh: bool
    origin: Origin
    outcome: Outcome
    libraries: tuple[Judged, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]


def repack(
    origin: Origin,
    request: Request,
    house: Path,
    *,
    report: Report,
    offline: bool = False,
    sandboxed: Sandboxed = Sandboxed.ALWAYS,
    say: Callable[[str], None] = lambda _line: None,
) -> Repacked:
    """Patch, prove and write a wheel anew, and put it into the wheelhouse.

    ``sandboxed`` says how proofs may run the wheel's own code. Raises ProofError if the kernels do
    not serve the device, UsageError if there is nothing to change or the wheel is a repack of
    another kind; and what ``apply`` and ``add`` raise.
    """
    make_room(house, _expected(origin, request))
    given = origin
    if given.facts is not None:
        _check_request(given, request)
        origin = find_wheel(
            f"vllm=={given.version.public}",
            given.machine,
            offline=offline,
            report=report,
            check=load_recipe("vllm").check,
        )
    binaries = inspect(origin.path)
    judged = judge(origin.path, binaries, request.target, origin.version)
    require_loading(judged, request.target, origin.version)
    with staging() as folder:
        draft = _draft(origin, request, folder / "tree", binaries, judged, sandboxed)
        notes, made = tuple(_notes(draft, judged)), edition(draft)
        make_room(house, made.filename)
        wheel = folder / made.filename
        rewrite(origin.path, wheel, made.home, made.members, report("Writing"))
        digest, size = sha256_of(wheel), wheel.stat().st_size
        _check_same(given, made, digest)
        fresh = not _held(house, made.filename, digest)
        if fresh:
            add(house, wheel, made.facts, say=say)
    return Repacked(
        wheel=house / made.filename,
        sha256=digest,
        size=size,
        fresh=fresh,
        origin=origin,
        outcome=draft.outcome,
        libraries=judged,
        notes=notes,
        facts=made.facts,
    )


def _expected(origin: Origin, request: Request) -> str:
    """What the wheel will be called, but for what only the work can tell."""
    target = request.target
    version = f"{origin.version.public}+{target.cuda_tag}.{target.name}"
    return f"vllm-{version}-{origin.name.tag}.whl"


def _draft(
    origin: Origin,
    request: Request,
    tree: Path,
    binaries: tuple[Binary, ...],
    judged: tuple[Judged, ...],
    sandboxed: Sandboxed,
) -> Draft:
    _stage(origin.path, tree)
    package = tree / "vllm"
    full = _around(request, judged, origin.version)
    outcome = apply(package, load_recipe("vllm"), full, anew=True, sandboxed=sandboxed)
    if not outcome.written:
        raise UsageError(
            f"no fix changes anything in the wheel of vllm {origin.version} for "
            f"{request.target.title}",
            why="the release needs none there, or they were left out",
            hint="install the wheel as it is, or choose fixes with --with",
        )
    return Draft(
        origin=origin,
        asked=request,
        request=full,
        workspace=open_workspace(package),
        outcome=outcome,
        cuda=cuda_major(binaries),
        tag=_tag(origin, binaries),
        libraries={each.name: each.use.value for each in judged},
    )


def _around(request: Request, judged: Iterable[Judged], version: Version) -> Request:
    """The request, with optional fixes that keep vLLM from kernels that do not load.

    What is named with --only or --without stays as it is.
    """
    recipe, wanted = load_recipe("vllm"), set()
    for fix_id in ways_around(judged) if not request.only else ():
        fix = recipe.fix(fix_id)
        need = fix.need(version, request.arch, "installed") if fix else None
        if need and need.severity is Severity.OPTIONAL and fix_id not in request.skip:
            wanted.add(fix_id)
    return replace(request, also=request.also | wanted)


def _stage(wheel: Path, tree: Path) -> None:
    """Unpack what fixes can read; no fix looks at libraries."""
    for name, data in texts(wheel):
        place = tree / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    for pattern in _NEEDED:
        if len(found := list(tree.glob(pattern))) != 1:
            raise damaged(str(wheel), f"it has {pattern} {len(found)} times")


def _tag(origin: Origin, binaries: tuple[Binary, ...]) -> str:
    """The tag of the file name, with a newer glibc where the libraries need one."""
    interpreter, abi, platform = origin.name.tag.split("-")
    match = _MANYLINUX.fullmatch(platform)
    if match is None:
        return origin.name.tag
    policy = match["policy"]
    promised = _POLICIES.get(policy) or int(policy.rpartition("_")[2])
    highest = max((b.library.highest("GLIBC") for b in binaries), key=by_version, default="")
    needed = [int(part) for part in re.findall(r"\d+", highest)]
    if needed[:1] == [2] and needed[1] > promised:
        platform = f"manylinux_2_{needed[1]}_{match['cpu']}"
    return f"{interpreter}-{abi}-{platform}"


def _check_request(given: Origin, request: Request) -> None:
    """Raise UsageError unless patchkit made the wheel of upstream's, for the same request."""
    facts = given.facts or {}
    lock = locked_wheels()[given.machine].get(given.version.public)
    said = {key: facts.get(key) for key in ("made", "request", "source")}
    source = f"sha256:{lock.sha256}" if lock else None
    if said != {"made": "repack", "request": request_fields(request), "source": source}:
        raise UsageError(
            f"{given.path}: patchkit {facts.get('patchkit')} made it already, for "
            f"{facts.get('target')}, and not as it is asked for now",
            why="a repack begins with what upstream released",
            hint=_anew(given, given.version.public)
            + (f"; that takes upstream's {lock.filename}" if lock else ""),
        )


def _anew(given: Origin, version: str) -> str:
    return quoted("patchkit", "repack", f"vllm=={version}", "--platform", given.machine)


def _check_same(given: Origin, made: Edition, digest: str) -> None:
    """Raise unless a repack that was given is what comes out again."""
    if given.facts is not None and given.sha256 != digest:
        raise DriftError(
            f"{given.path}: is not what this patchkit makes of upstream's wheel: that is "
            f"{made.filename}, sha256 {digest}",
            why="another patchkit made it, or it was changed since",
            hint=_anew(given, made.facts["version"]),
        )


def _held(house: Path, filename: str, digest: str) -> bool:
    """Whether the wheelhouse has this very wheel."""
    try:
        listed = {entry.filename: entry.sha256 for entry in entries(house)}
    except (
        UsageError,
        SourceError,
        StorageError,
    ):  # no folder yet, or a change that add() finishes
        return False
    place = house / filename
    return listed.get(filename) == digest and is_file(place) and sha256_of(place) == digest


def _notes(draft: Draft, judged: tuple[Judged, ...]) -> Iterator[str]:
    """What somebody who installs the wheel has to know."""
    target, machine = draft.request.target, draft.origin.machine
    if not draft.origin.locked:
        yield f"not upstream's wheel: {draft.origin.name.filename}, {draft.origin.identity}"
    if machine != target.cpu:
        yield f"for {machine}, and {target.title} has {target.cpu}: a wheel for tests elsewhere"
    if draft.cuda != target.cuda.partition(".")[0]:
        yield (
            f"the kernels are linked with CUDA {draft.cuda} (libcudart.so.{draft.cuda}), not with "
            f"{target.cuda}; the wheel's version says so"
        )
    torch = _pinned_torch(draft.metadata.get_all("Requires-Dist", []))
    if without := torch_without_cuda(torch, machine):
        yield (
            f"it pins torch {torch}, and the package index's torch {torch} for {machine} has no "
            f"CUDA: {without.instead}"
        )
    for each in judged:
        if each.missed or each.use is Use.PARTLY:
            yield f"{each.name} {told(each)}"
    active = {v.fix.id for v in draft.outcome.verdicts if v.state in _IN_EFFECT}
    for fix_id, kernels in ways_around(judged).items():
        if fix_id not in active:
            yield f"{kernels} will be chosen and fail; --with {fix_id} avoids it"
        elif fix_id in draft.request.also - draft.asked.also:
            yield f"{fix_id} is on, since {kernels} would be chosen and fail"


def _pinned_torch(requirements: Iterable[str]) -> str:
    """The torch that a wheel pins, "" if it pins none."""
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        exact = [each.version for each in requirement.specifier if each.operator == "=="]
        if requirement.name == "torch" and len(exact) == 1:
            return exact[0]
    return ""
