"""Take other projects' parts of vLLM from upstream's own wheel of the same release.

That wheel holds them as they are installed: Python, headers, and libraries that upstream compiled.
``recipes/vllm/build.toml`` says which of its paths belong to which project.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name
from packaging.version import Version

from patchkit.digests import sha256_of
from patchkit.errors import ProofError, SourceError, UsageError, translated
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import KnownSource, known_externals
from patchkit.source.fetch import Progress, fetch
from patchkit.target import Target
from patchkit.wheel.device.inspect import Binary, inspect_wheel
from patchkit.wheel.device.libraries import Judged, Use, cuda_major, judge_libraries
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.vllm.repack_origin import upstream_wheels


@dataclass(frozen=True, slots=True)
class FoundSource:
    """A source that was found: ``fill`` writes it into a folder that does not exist yet.

    ``installed``: what is written is installed as it is, at the paths of upstream's wheel.
    """

    identity: str
    verified: bool
    fill: Callable[[Path], object]
    installed: bool = False


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
    """Find in upstream's wheel of a release what it holds of a source; raise as both do."""
    with WheelFile(fetch_upstream(version, cpu, offline, progress)) as wheel:
        return parts_of(wheel, known, target)


def fetch_upstream(
    version: Version, cpu: str, offline: bool, progress: Progress | None
) -> Path:
    """Fetch upstream's wheel of a release. Raises SourceError for none that is locked."""
    entry = upstream_wheels().get(cpu, {}).get(version.public)
    if entry is None:
        raise SourceError(
            f"upstream's wheel of vLLM {version.public} for {cpu} is not locked",
            why="that is no release, or one that this patchkit does not know",
            hint="name a folder, an archive or git+URL@COMMIT with --source",
        )
    return fetch(
        "vllm",
        entry.version,
        {entry.version: entry},
        offline=offline,
        progress=progress,
    )


def parts_of(wheel: WheelFile, known: KnownSource, target: Target) -> FoundSource:
    """Return what a wheel of vLLM holds of a source; libraries for other devices stay out.

    Raises UsageError if there is nothing for the device, ProofError for libraries that do not load
    on it or are linked with another CUDA.
    """
    option, version = known.option, wheel.name.version
    named = f"--source {option}=vllm=={version}"
    members = members_of(known, wheel.members)
    if not members:
        held = sorted(
            k.option for k in known_externals() if members_of(k, wheel.members)
        )
        raise UsageError(
            f"{named}: {wheel.path.name} holds nothing of {option}",
            why="upstream builds it into no library or file of its own",
            hint=f"it holds parts of {', '.join(held) or 'no other project'}",
        )
    binaries = {binary.name: binary for binary in inspect_wheel(wheel, only=members)}
    found = judge_libraries(tuple(binaries.values()), target, version)
    judged = [library for library in found if library.name in binaries]
    used = [library for library in judged if library.use is not Use.OTHER]
    idle = binaries.keys() - {library.name for library in used}
    if idle and not used:
        raise UsageError(
            f"{named}: its libraries are for other devices than {target.title}",
            why=f"{', '.join(sorted(idle))} alone",
            hint=f"leave it out: {quoted('--without', option)}",
        )
    served = [binaries[library.name] for library in used]
    _require_serving(option, served, used, target)
    chosen, path = [member for member in members if member not in idle], wheel.path

    def fill(dest: Path) -> None:
        with WheelFile(path) as opened, translated("the source is not complete", dest):
            for member in chosen:
                opened.copy_member(member, dest / member)

    code: dict[str, None] = {}
    for binary in served:
        codes = ", ".join(dict.fromkeys(code.name for code in binary.codes))
        # One of a name for each Python: _C.cpython-312-aarch64-linux-gnu.so.
        stem = PurePosixPath(binary.name).name.partition(".")[0]
        code[f"{stem} ({codes})" if codes else stem] = None
    said = f"as upstream compiled it: {', '.join(code)}"
    said = said if served else "as upstream's wheel has it installed"
    # Upstream's release was built from the pin, and its wheel is locked.
    identity = f"vllm=={version}, sha256:{wheel.sha256}; {said}"
    return FoundSource(identity, True, fill, installed=True)


def members_of(known: KnownSource, paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of a wheel that belong to a source, in their order."""
    return tuple(
        path
        for path in paths
        if any(fnmatchcase(path, part) for part in known.installed)
    )


def prove_parts(wheel: WheelFile, folder: Path, option: str) -> str:
    """Prove that a wheel has every file of the folder, with the same bytes; say so.

    Raises ProofError.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        member = path.relative_to(folder).as_posix()
        digest = hashlib.sha256()
        for chunk in wheel.unpacked(member) if member in wheel.members else ():
            digest.update(chunk)
        if digest.hexdigest() != sha256_of(path):
            raise ProofError(
                f"{member} of {option} is not in the wheel as upstream's wheel has it",
                why="it was not installed, or another source installs a file of that name",
                hint="run again with --fresh",
            )
    return f"{option}: {len(files)} files are those of upstream's wheel"


def _require_serving(
    option: str, binaries: list[Binary], judged: list[Judged], target: Target
) -> None:
    hint = f"build it from its source: {quoted('--source', f'{option}=FOLDER')}"
    for library in judged:
        if library.missed:
            raise ProofError(
                f"{library.name} of upstream's wheel has no code that {target.title} loads",
                why="upstream compiled it for other devices",
                hint=hint,
            )
    if binaries and (found := cuda_major(binaries)) != target.cuda.partition(".")[0]:
        raise ProofError(
            f"{binaries[0].name} of upstream's wheel is linked with CUDA {found}",
            why=f"upstream compiled that release with it; this build is for CUDA {target.cuda}",
            hint=hint,
        )
