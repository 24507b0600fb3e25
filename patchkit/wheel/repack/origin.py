"""Find the wheel to repack: upstream's, known by its locked sha256, or a file of the user."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.version import Version

from patchkit.errors import HashMismatchError, SourceError, UsageError
from patchkit.frozen import frozen
from patchkit.patching.recipe import load_recipe
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
from patchkit.wheel.file.wheelfile import ANY, WheelFile, WheelName
from patchkit.wheel.wheelhouse.storage import repack_command


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
