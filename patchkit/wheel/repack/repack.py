"""Repack upstream's wheel for one device: its Python and data change, its kernels are checked.

origin → kernels → patched tree → native parts → additions → new wheel → wheelhouse

The origin is upstream's wheel, known by its locked sha256, or a file of the user. Each step returns
a new value, made from the values of earlier steps.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from patchkit import __version__
from patchkit.apply import apply
from patchkit.digests import digest, sha256_of
from patchkit.durable.paths import is_file
from patchkit.elf import by_version
from patchkit.errors import HashMismatchError, SourceError, UsageError
from patchkit.frozen import Texts, frozen
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, Severity
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import (
    LedgerRequest,
    Workspace,
    ledger_path,
    open_workspace,
    original_path,
)
from patchkit.reading import require_file
from patchkit.source.detect import project_of
from patchkit.source.project import (
    first_example,
    project_named,
    projects,
    recipe_folder,
)
from patchkit.source.releases import LockEntry, read_wheel_lock
from patchkit.source.resolve import Report, SourceOptions, fetch_locked, require_sha256
from patchkit.source.tree import Sandboxed
from patchkit.target import Target, toolkits
from patchkit.wheel.build.compiled import fix_states
from patchkit.wheel.build.machine import staging
from patchkit.wheel.device.inspect import first_use_phrase
from patchkit.wheel.device.libraries import (
    Judgements,
    Use,
    library_table,
    needed_versions,
    require_loading,
)
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import (
    ANY,
    Facts,
    WheelFile,
    WheelName,
    read_metadata,
)
from patchkit.wheel.file.write import UNLABELLED, NewWheel, name_wheel, rewrite_wheel
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.make import (
    Kernels,
    NativeParts,
    first_use_entries,
    native_parts,
    read_kernels,
)
from patchkit.wheel.wheelhouse.storage import Say, add_wheel, check_room, repack_command


@frozen
class Origin:
    """An open wheel of a project; ``locked`` if the lock names its sha256 as upstream's.

    ``cpu`` is ``any`` if the wheel is for every CPU.
    """

    project: str
    wheel: WheelFile
    version: Version
    cpu: str
    locked: bool


@contextmanager
def find_wheel(
    spec: str,
    cpu: str,
    *,
    sha256: str | None,
    offline: bool,
    report: Report,
) -> Iterator[Origin]:
    """Open the wheel that ``NAME==X.Y.Z`` or a path names.

    ``cpu`` chooses among a release's wheels; ``sha256`` vouches for a file that is not locked.
    Raises UsageError, SourceError, HashMismatchError, StorageError.
    """
    path = Path(spec)
    if path.suffix == ".whl" or "==" not in spec:
        project = _check_named(path, cpu)
    elif sha256 is not None:
        raise UsageError(
            "--sha256 is for a file; a release is known by the lock",
            hint="leave --sha256 out",
        )
    else:
        project = project_of(spec)
        if not projects()[project].package:
            raise UsageError(
                f"{spec}: the recipe of {project} names no package, so no wheel can be patched",
                why="a project without one is built from its sources",
                hint="patchkit build --help",
            )
        path = fetch_locked(
            SourceOptions(project, spec, offline=offline),
            recipe_folder(project) / "wheels.toml",
            upstream_wheels(project, cpu),
            load_recipe(project).check,
            report,
        )

    with WheelFile(path) as wheel:
        version = wheel.name.version
        load_recipe(project).check(version)
        entry = upstream_wheels(project, cpu).get(version.public)
        locked = entry is not None and entry.sha256 == wheel.sha256
        if not locked:
            _require_vouched(wheel, sha256, entry)

        yield Origin(
            project=project,
            wheel=wheel,
            version=version,
            cpu=ANY if ANY in wheel.name.cpus else cpu,
            locked=locked,
        )


def _check_named(path: Path, cpu: str) -> str:
    """Return the project of the wheel that the user names. Raises an error for any other file."""
    hint = f"patchkit repack {first_example()}; or name a wheel"
    require_file(path, hint)
    if path.suffix != ".whl":
        raise SourceError(f"{path}: is not a wheel", hint=hint)

    name = WheelName(path.name)
    project = project_named(name.project)
    if not project:
        raise SourceError(
            f"{path}: is a wheel of {name.project}, not of {' or '.join(projects())}",
            hint=f"{hint}; --recipes adds projects",
        )
    if not name.cpus & {cpu, ANY}:
        raise UsageError(
            f"{path}: is for {' or '.join(sorted(name.cpus))}, not for {cpu}",
            hint=f"--cpu {min(name.cpus)} if that is meant, or name the other wheel",
        )
    return project


def upstream_wheels(project: str, cpu: str) -> dict[str, LockEntry]:
    """Read upstream's wheels for a CPU, by version, from ``wheels.toml`` of the recipe."""
    lock = recipe_folder(project) / "wheels.toml"
    cpus = read_wheel_lock(lock) if lock.is_file() else {}
    return cpus.get(ANY, {}) | cpus.get(cpu, {})


def _require_vouched(
    wheel: WheelFile,
    sha256: str | None,
    entry: LockEntry | None,
) -> None:
    """Raise an error for a file of patchkit, or of neither the lock nor the sha256 of the user."""
    name = wheel.name
    if facts := wheel.facts:
        raise UsageError(
            f"{wheel.path}: patchkit {facts.get('patchkit')} made it already, for "
            f"{facts.get('target')}",
            why="a repack begins with what upstream released",
            hint=repack_command(
                f"{name.project}=={name.version.public}", min(name.cpus)
            ),
        )

    if sha256 is not None:
        require_sha256(sha256.lower())
        if sha256.lower() != wheel.sha256:
            raise HashMismatchError(
                f"{wheel.path} has the sha256 {wheel.sha256}, not {sha256}",
                why="it is another file, or it was changed or cut short",
                hint="compare with the place that it is from",
            )
        return

    if entry is None or entry.filename != name:
        raise UsageError(
            f"{wheel.path} is not among upstream's wheels that this patchkit knows",
            why="it is a build of your own, or newer than the lock",
            hint=f"--sha256 {wheel.sha256} takes it nonetheless",
        )

    error = HashMismatchError(
        f"{wheel.path} has the sha256 {wheel.sha256}, but the lock says {entry.sha256}",
        why="it was changed, or it is a build of your own by upstream's name",
        hint=f"`patchkit repack {name.project}=={entry.version}` takes upstream's; "
        f"--sha256 {wheel.sha256} takes this one",
    )
    if wheel.size < entry.size:
        error.why = f"it has {wheel.size:,} bytes of {entry.size:,}: it was cut short"
    raise error


@frozen
class Repacked:
    """A repacked wheel in the wheelhouse; ``fresh`` if this run put it there.

    ``source`` has file name, sha256 and size of the wheel that was repacked.
    """

    wheel: Path
    sha256: str
    size: int
    fresh: bool
    source: Facts
    outcome: Applied
    libraries: Judgements
    notes: Texts
    facts: Facts


def repack_wheel(
    origin: Origin,
    request: Request,
    house: Path,
    *,
    report: Report,
    sandboxed: Sandboxed,
    assembler: Assembler | None,
    say: Say,
) -> Repacked:
    """Patch and prove the wheel ``origin``, and put the new wheel into the wheelhouse ``house``.

    ``sandboxed`` says how proofs may run the wheel's own code. With an ``assembler``, PTX in the
    libraries becomes machine code. Raises ProofError if the kernels do not serve the device,
    UsageError if there is nothing to change, and the errors of ``apply`` and ``add_wheel``.
    """
    target = request.target
    # The torch that the wheel requires decides the CUDA of the target.
    if torch := read_metadata(origin.wheel).pins.get("torch"):
        target = target.with_torch(torch)
        request = replace(request, target=target)
    # The version without its digest, which is not known yet.
    version = f"{origin.version.public}+{target.cuda_tag}.{target.name}"
    name = f"{origin.wheel.distribution}-{version}-{origin.wheel.name.tag}.whl"
    check_room(house, name)

    # First of all: kernels that do not serve the device cannot be patched into serving it.
    say(f"reading the device code of {origin.wheel.path.name}")
    kernels = read_kernels(origin.wheel, target)
    require_loading(kernels.judged, target, origin.wheel.name)

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
            )
        if not (patched.outcome.written or native.count):
            also = "" if assembler else ", make it --native"
            raise UsageError(
                f"no fix changes anything in {origin.wheel.name} for {target.title}",
                why="the release needs none there, or they were left out",
                hint=f"install the wheel as it is{also}, or choose fixes with --with",
            )

        new = _make_additions(patched, kernels, native)
        wheel = folder / new.filename
        bar = report("Writing")
        rewrite_wheel(origin.wheel, wheel, new.members, bar)

        sha256 = sha256_of(wheel)
        size = wheel.stat().st_size
        place = house / new.filename
        fresh = not is_file(place) or sha256_of(place) != sha256
        add_wheel(house, wheel, new.facts, say=say)

    notes = [*_install_notes(patched, kernels), *_native_notes(native)]
    if not native.facts:
        notes += _first_use_notes(kernels, target)
    return Repacked(
        wheel=place,
        sha256=sha256,
        size=size,
        fresh=fresh,
        source={
            "file": origin.wheel.name,
            "sha256": origin.wheel.sha256,
            "size": origin.wheel.size,
            "upstream": origin.locked,
        },
        outcome=patched.outcome,
        libraries=kernels.judged,
        notes=tuple(notes),
        facts=new.facts,
    )


@frozen
class _PatchedTree:
    """The unpacked wheel with its fixes.

    ``request`` is the user's; fixes that were ``turned_on`` besides avoid lost kernels. ``files``
    are the patched ones, as the ledger has them: path → sha256 before and after.
    """

    origin: Origin
    request: Request
    turned_on: Texts
    workspace: Workspace
    outcome: Applied
    files: Mapping[str, tuple[str, str]]


def _patch_tree(
    origin: Origin,
    request: Request,
    kernels: Kernels,
    tree: Path,
    sandboxed: Sandboxed,
) -> _PatchedTree:
    """Unpack the wheel without its libraries into ``tree``, and apply the fixes."""
    for name, data in origin.wheel.texts():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    recipe = load_recipe(origin.project)
    package = tree / projects()[origin.project].package
    around = _fixes_around(origin, request, kernels)
    effective = replace(request, also=request.also | around)
    outcome = apply(package, recipe, effective, anew=True, sandboxed=sandboxed)

    workspace = open_workspace(package, origin.project)
    files = dict(workspace.ledger.files) if workspace.ledger else {}
    # pip writes RECORD when it installs, so the ledger cannot know it; a revert restores its lines.
    files.pop(f"{origin.wheel.dist_info}/RECORD", None)
    return _PatchedTree(
        origin=origin,
        request=request,
        turned_on=tuple(sorted(around - request.also)),
        workspace=workspace,
        outcome=outcome,
        files=files,
    )


def _fixes_around(origin: Origin, request: Request, kernels: Kernels) -> set[str]:
    """Return the optional fixes that keep a package from choosing kernels that do not load.

    Return none if every kernel loads. ``--only`` and ``--without`` of the request are respected.
    """
    has_lost = any(library.use is Use.PARTLY for library in kernels.judged)
    if request.only or not has_lost:
        return set()

    around = set()
    for fix_id in set(library_table(origin.project).around) - request.skip:
        fix = load_recipe(origin.project).fix(fix_id)
        need = fix.need(origin.version, request.arch, "installed") if fix else None
        if need and need.severity is Severity.OPTIONAL:
            around.add(fix_id)

    return around


def _make_additions(
    patched: _PatchedTree,
    kernels: Kernels,
    native: NativeParts,
) -> NewWheel:
    """Make the members of the new wheel, and its name."""
    origin = patched.origin
    target = patched.request.target
    label = f"{target.name}.{UNLABELLED}"
    if kernels.cuda:
        # A wheel of another CUDA than the target's says so: 0.25.1+cu129.gb10.0a1b2c3d4e.
        is_targets = target.cuda.startswith(f"{kernels.cuda}.")
        label = f"{target.cuda_tag if is_targets else f'cu{kernels.cuda}'}.{label}"

    version = f"{origin.version.public}+{label}"
    facts = _repack_facts(patched, kernels, native, version)
    members = {
        **_patched_files(patched, version),
        **_version_file(patched, version),
        **native.members,
    }
    return name_wheel(origin.wheel, _wheel_tag(origin, kernels), facts, members)


def _wheel_tag(origin: Origin, kernels: Kernels) -> str:
    """Return the tag of the wheel, with the glibc that its libraries need if that is newer."""
    tag = origin.wheel.name.tag
    promised = library_rules().promised_glibc(tag)
    needed = needed_versions(kernels.binaries).get("GLIBC", "")
    if not promised or by_version(needed) <= by_version(f"GLIBC_{promised}"):
        return tag

    glibc = "_".join(re.findall(r"\d+", needed)[:2])
    return f"{tag.rpartition('-')[0]}-manylinux_{glibc}_{origin.cpu}"


def _patched_files(patched: _PatchedTree, version: str) -> dict[str, bytes]:
    """Return the files of the fixes: patched files, originals and the ledger."""
    ledger = patched.workspace.ledger
    if ledger is None:
        return {}

    root = patched.workspace.tree.root
    state = patched.workspace.state
    members = {path: (root / path).read_bytes() for path in patched.files}
    for path in patched.files:
        original = original_path(state, path)
        if original.is_file():
            members[str(original.relative_to(root))] = original.read_bytes()

    # Without its date: the wheel is the same on every day.
    ledger = replace(ledger, files=patched.files, date="", version=version)
    members[str(ledger_path(state).relative_to(root))] = ledger.to_json()
    return members


def _repack_facts(
    patched: _PatchedTree,
    kernels: Kernels,
    native: NativeParts,
    version: str,
) -> Facts:
    origin = patched.origin
    request = patched.request
    digests = [
        f"{after}  {path}\n" for path, (_, after) in sorted(patched.files.items())
    ]
    project = origin.wheel.name.project
    spdx = origin.wheel.message("METADATA").get("License-Expression", "NOASSERTION")
    facts = {
        "project": project,
        "made": "repack",
        "patchkit": __version__,
        "source": f"sha256:{origin.wheel.sha256}",
        "source_file": str(origin.wheel.name),
        "target": request.target.name,
        "license": {project: spdx},
        "version": origin.version.public,
        "recipe": load_recipe(origin.project).digest,
        "request": LedgerRequest.of(request).fields(),
        "turned_on": list(patched.turned_on),
        "upstream": origin.locked,
        "tree": f"sha256:{digest(''.join(digests))}",
        "fixes": fix_states(patched.outcome),
        "machine": origin.cpu,
        "cuda": kernels.cuda,
        "libraries": {library.name: library.use.value for library in kernels.judged},
        "wheel": version,
    }
    if native.facts:
        facts["native"] = native.facts

    return facts | request.patch_facts


def _version_file(patched: _PatchedTree, version: str) -> dict[str, bytes]:
    """Return the file that tells the version to Python, with the new one; {} if there is none.

    It is one that setuptools-scm wrote; ``patchkit revert`` leaves it as it is.
    """
    path = library_rules().version_files.get(patched.origin.project)
    if path is None:
        return {}

    parsed = Version(version)
    parts: list[object] = list(parsed.release)
    if parsed.dev is not None:
        parts.append(f"dev{parsed.dev}")
    parts.append(version.partition("+")[2])

    # The last assignment of a name counts.
    lines = (
        f"\n__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = {tuple(parts)!r}\n"
    )
    text = (patched.workspace.tree.root / path).read_bytes()
    return {path: text + lines.encode()}


def _install_notes(patched: _PatchedTree, kernels: Kernels) -> Iterator[str]:
    """Yield notes for the user who installs the wheel: its origin, CPU, CUDA and kernels."""
    origin = patched.origin
    target = patched.request.target
    if not origin.locked:
        name = origin.wheel.name
        yield f"not upstream's wheel: {name}, sha256:{origin.wheel.sha256}"

    if origin.cpu not in (ANY, target.cpu):
        yield (
            f"for {origin.cpu}, and {target.title} has {target.cpu}: "
            "a wheel for tests elsewhere"
        )

    cuda = kernels.cuda
    if cuda not in ("", target.cuda.partition(".")[0]):
        yield (
            f"the kernels are linked with CUDA {cuda} (libcudart.so.{cuda}), not with "
            f"{target.cuda}; the wheel's version says so"
        )

    for library in kernels.judged:
        if library.missed or library.use is Use.PARTLY:
            yield f"{library.name} {library.phrase}"
    for fix_id in patched.turned_on:
        yield f"{fix_id} is on, since kernels that do not load would be chosen and fail"


def _first_use_notes(kernels: Kernels, target: Target) -> Iterator[str]:
    """Yield notes on the PTX that the device compiles at first use, if the wheel has any."""
    entries = first_use_entries(kernels.binaries, target)
    if not entries:
        return

    yield f"{first_use_phrase(entries)}; --native assembles it now"
    oldest = toolkits()[0]
    if any(entry.version > oldest.ptx for entry in entries):
        row = next(row for row in toolkits() if row.cuda == target.cuda)
        yield f"drivers older than {row.driver} do not compile PTX of CUDA {row.cuda}"


def _native_notes(native: NativeParts) -> Iterator[str]:
    """Yield notes on PTX that was assembled, and on PTX that could not be."""
    if native.count:
        end = "" if any(native.refused_notes) else ": none is compiled at first use"
        yield f"{native.count} fat binaries assembled from upstream's PTX{end}"
    yield from native.refused_notes
