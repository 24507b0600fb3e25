"""Find the wheel to repack: upstream's, known by its locked sha256, or a file of the user."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.version import Version

from patchkit.errors import HashMismatchError, SourceError, UsageError
from patchkit.frozen import frozen
from patchkit.reading import require_file
from patchkit.records import RECIPES
from patchkit.source.fetch import fetch
from patchkit.source.releases import (
    LockEntry,
    guess_release,
    named_version,
    read_wheel_lock,
)
from patchkit.source.resolve import Report
from patchkit.wheel.file.wheelfile import WheelFile, wheel_name

_RELEASE = re.compile(r"vllm\s*==\s*(?P<version>[^/\s]+)", re.IGNORECASE)
_HEX = re.compile(r"[0-9a-f]{64}")
_EXAMPLE = "patchkit repack vllm==0.33.0; or name a wheel"


@frozen
class Origin:
    """An open wheel of vLLM; ``locked`` if the lock names its sha256 as upstream's."""

    wheel: WheelFile
    version: Version
    cpu: str
    locked: bool

    @property
    def fields(self) -> dict[str, object]:
        """The fields that say which wheel it is, for JSON."""
        return {
            "file": self.wheel.name.filename,
            "sha256": self.wheel.sha256,
            "size": self.wheel.size,
            "upstream": self.locked,
        }


@contextmanager
def find_wheel(
    spec: str,
    cpu: str,
    *,
    sha256: str | None = None,
    offline: bool = False,
    report: Report,
    check: Callable[[Version], None],
) -> Iterator[Origin]:
    """Open the wheel that ``vllm==X.Y.Z`` or a path names.

    ``cpu`` chooses among a release's wheels; ``sha256`` vouches for a file that is not locked.
    Raises UsageError, SourceError, HashMismatchError, StorageError.
    """
    lock = upstream_wheels()
    if match := _RELEASE.fullmatch(spec.strip()):
        if sha256 is not None:
            raise UsageError(
                "--sha256 is for a file; a release is known by the lock",
                hint="leave --sha256 out",
            )
        version = named_version(match["version"], _EXAMPLE)
        check(version)
        bar = report(f"Fetching {spec}")
        path = fetch("vllm", str(version), lock[cpu], offline=offline, progress=bar)
    else:
        path = Path(spec)
        version = _named_release(path, cpu)
        check(version)

    entry = lock.get(cpu, {}).get(version.public)
    with WheelFile(path) as wheel:
        locked = entry is not None and entry.sha256 == wheel.sha256
        if not locked:
            _refuse_repacked(wheel, cpu)
            _require_vouched(wheel, sha256, entry)

        yield Origin(wheel=wheel, version=version, cpu=cpu, locked=locked)


def _named_release(path: Path, cpu: str) -> Version:
    require_file(path, guess_release(str(path), ["vllm"]) or _EXAMPLE)
    if path.suffix != ".whl":
        raise SourceError(f"{path}: is not a wheel", hint=_EXAMPLE)

    name = wheel_name(path.name)
    if name.project != "vllm":
        raise SourceError(
            f"{path}: is a wheel of {name.project}, not of vllm",
            hint=_EXAMPLE,
        )
    if name.cpus != {cpu}:
        raise UsageError(
            f"{path}: is for {' or '.join(sorted(name.cpus))}, not for {cpu}",
            hint=f"--cpu {min(name.cpus)} if that is meant, or name the other wheel",
        )
    return name.version


def _refuse_repacked(wheel: WheelFile, cpu: str) -> None:
    if facts := wheel.facts:
        release = wheel.name.version.public
        raise UsageError(
            f"{wheel.path}: patchkit {facts.get('patchkit')} made it already, for "
            f"{facts.get('target')}",
            why="a repack begins with what upstream released",
            hint=f"patchkit repack vllm=={release} --cpu {cpu}",
        )


def upstream_wheels() -> dict[str, dict[str, LockEntry]]:
    """Read upstream's wheels by CPU and version from ``recipes/vllm/wheels.toml``."""
    return read_wheel_lock(RECIPES / "vllm" / "wheels.toml")


def _require_vouched(
    wheel: WheelFile,
    sha256: str | None,
    entry: LockEntry | None,
) -> None:
    """Raise an error if a file is neither in the lock nor has the sha256 that the user gives."""
    if sha256 is not None:
        if not _HEX.fullmatch(sha256.lower()):
            raise UsageError(f"--sha256 takes 64 hex digits, not {sha256!r}")
        if sha256.lower() != wheel.sha256:
            raise HashMismatchError(
                f"{wheel.path} has the sha256 {wheel.sha256}, not {sha256}",
                why="it is another file, or it was changed or cut short",
                hint="compare with the place that it is from",
            )
        return

    if entry is None or entry.filename != wheel.name.filename:
        raise UsageError(
            f"{wheel.path} is not among upstream's wheels that this patchkit knows",
            why="it is a build of your own, or newer than the lock",
            hint=f"--sha256 {wheel.sha256} takes it nonetheless",
        )

    error = HashMismatchError(
        f"{wheel.path} has the sha256 {wheel.sha256}, but the lock says {entry.sha256}",
        why="it was changed, or it is a build of your own by upstream's name",
        hint=f"`patchkit repack vllm=={entry.version}` takes upstream's; "
        f"--sha256 {wheel.sha256} takes this one",
    )
    if wheel.size < entry.size:
        error.why = f"it has {wheel.size:,} bytes of {entry.size:,}: it was cut short"
    raise error
