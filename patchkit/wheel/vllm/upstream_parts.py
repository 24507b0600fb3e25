"""Take other projects' parts of vLLM from upstream's own wheel of the same release.

That wheel holds them as they are installed: Python, headers, and libraries that upstream compiled.
``recipes/vllm/build.toml`` says which of its paths belong to which project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name
from packaging.version import Version

from patchkit.errors import ProofError, SourceError, UsageError, translated
from patchkit.recipes.vllm.build import KnownSource, known_externals
from patchkit.source.fetch import Progress, fetch
from patchkit.target import Target
from patchkit.wheel.device.inspect import Binary, inspect_wheel
from patchkit.wheel.device.libraries import Judged, Use, cuda_major, judge_libraries
from patchkit.wheel.file.wheelfile import WheelFile, record_digest
from patchkit.wheel.vllm.repack_origin import upstream_wheels


@dataclass(frozen=True, slots=True)
class FoundSource:
    """A source that was found: ``fill`` writes it into a folder that does not exist yet.

    ``identity`` names the commit or the digest; it is ``verified`` if it is the pin.
    """

    identity: str
    verified: bool
    fill: Callable[[Path], object]


def is_upstream(spec: str) -> bool:
    """Check whether ``PROJECT==VERSION`` names vLLM's own wheel."""
    project, equals, _ = spec.partition("==")
    return bool(equals) and canonicalize_name(project.strip()) == "vllm"


def upstream_parts(
    known: KnownSource,
    version: Version,
    cpu: str,
    target: Target,
    offline: bool,
    progress: Progress | None,
) -> FoundSource:
    """Find the parts of a source in upstream's wheel of a release.

    Raises the errors of ``fetch_upstream`` and ``parts_of``.
    """
    with WheelFile(fetch_upstream(version, cpu, offline, progress)) as wheel:
        return parts_of(wheel, known, target)


def fetch_upstream(
    version: Version,
    cpu: str,
    offline: bool,
    progress: Progress | None,
) -> Path:
    """Fetch upstream's wheel of a release. Raises SourceError if the lock has none."""
    entry = upstream_wheels().get(cpu, {}).get(version.public)
    if entry is None:
        raise SourceError(
            f"upstream's wheel of vLLM {version.public} for {cpu} is not locked",
            why="that is no release, or one that this patchkit does not know",
            hint="name a folder, an archive or git+URL@COMMIT with --source",
        )

    entries = {entry.version: entry}
    return fetch("vllm", entry.version, entries, offline=offline, progress=progress)


def parts_of(wheel: WheelFile, known: KnownSource, target: Target) -> FoundSource:
    """Return the parts of a source in a wheel of vLLM; libraries for other devices stay out.

    Raises UsageError if there is nothing for the device, ProofError for libraries that do not load
    on it or are linked with another CUDA.
    """
    option = known.option
    version = wheel.name.version
    spec = f"--source {option}=vllm=={version}"
    members = members_of(known, wheel.members)
    if not members:
        raise _no_parts_error(spec, wheel, option)

    binaries = {binary.name: binary for binary in inspect_wheel(wheel, only=members)}
    judged = [
        library
        for library in judge_libraries(tuple(binaries.values()), target, version)
        if library.name in binaries
    ]
    used = [library for library in judged if library.use is not Use.OTHER]
    idle = {library.name for library in judged if library.use is Use.OTHER}
    if idle and not used:
        raise UsageError(
            f"{spec}: its libraries are for other devices than {target.title}",
            why=f"{', '.join(sorted(idle))} alone",
            hint=f"leave it out: --without {option}",
        )

    served = [binaries[library.name] for library in used]
    _require_serving(option, served, used, target)

    # Upstream's release was built from the pin, and its wheel is locked.
    origin = "as upstream's wheel has it installed"
    if served:
        origin = f"as upstream compiled it: {_list_codes(served)}"
    identity = f"vllm=={version}, sha256:{wheel.sha256}; {origin}"
    chosen = [member for member in members if member not in idle]
    fill = partial(_copy_members, wheel.path, chosen)
    return FoundSource(identity, True, fill)


def _no_parts_error(spec: str, wheel: WheelFile, option: str) -> UsageError:
    options = [
        known.option for known in known_externals() if members_of(known, wheel.members)
    ]
    return UsageError(
        f"{spec}: {wheel.path.name} holds nothing of {option}",
        why="upstream builds it into no library or file of its own",
        hint=f"it holds parts of {', '.join(sorted(options)) or 'no other project'}",
    )


def _list_codes(binaries: Iterable[Binary]) -> str:
    """List libraries with their device code: ``_C (sm_90a, compute_120)``."""
    words = []
    for binary in binaries:
        codes = ", ".join(dict.fromkeys(code.name for code in binary.codes))
        # One of a name for each Python: _C.cpython-312-aarch64-linux-gnu.so.
        stem = PurePosixPath(binary.name).name.partition(".")[0]
        words.append(f"{stem} ({codes})" if codes else stem)

    return ", ".join(dict.fromkeys(words))


def _copy_members(path: Path, members: Iterable[str], dest: Path) -> None:
    with WheelFile(path) as wheel, translated("the source is not complete", dest):
        for member in members:
            wheel.copy_member(member, dest / member)


def members_of(known: KnownSource, paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of a wheel that belong to a source, in their order."""
    return tuple(
        path
        for path in paths
        if any(fnmatchcase(path, part) for part in known.installed)
    )


def prove_parts(wheel: WheelFile, folder: Path, option: str) -> str:
    """Prove that a wheel has every file of the folder, with the same bytes, in a sentence.

    Raises ProofError.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        member = path.relative_to(folder).as_posix()
        digest = record_digest([path.read_bytes()])
        is_there = member in wheel.members
        if not is_there or record_digest(wheel.unpacked(member)) != digest:
            raise ProofError(
                f"{member} of {option} is not in the wheel as upstream's wheel has it",
                why="it was not installed, or another source installs a file of that name",
                hint="run again with --fresh",
            )

    return f"{option}: {len(files)} files are those of upstream's wheel"


def _require_serving(
    option: str,
    binaries: list[Binary],
    judged: list[Judged],
    target: Target,
) -> None:
    """Raise ProofError for libraries that do not load, or are linked with another CUDA."""
    hint = f"build it from its source: --source {option}=FOLDER"
    for library in judged:
        if library.missed:
            raise ProofError(
                f"{library.name} of upstream's wheel has no code that {target.title} loads",
                why="upstream compiled it for other devices",
                hint=hint,
            )
    if not binaries:
        return

    cuda = cuda_major(binaries)
    if cuda != target.cuda.partition(".")[0]:
        raise ProofError(
            f"{binaries[0].name} of upstream's wheel is linked with CUDA {cuda}",
            why=f"upstream compiled that release with it; this build is for CUDA {target.cuda}",
            hint=hint,
        )
