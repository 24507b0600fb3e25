"""Find the wheel that a repack begins with: upstream's, known by its locked sha256."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from patchkit.errors import HashMismatchError, SourceError, UsageError
from patchkit.quoting import quoted
from patchkit.reading import require_file
from patchkit.records import RECIPES
from patchkit.source.fetch import Progress, fetch
from patchkit.source.releases import LockEntry, meant, named_version, read_wheel_lock
from patchkit.wheel.file.wheelfile import WheelFile, wheel_name

_RELEASE = re.compile(r"vllm\s*==\s*(?P<version>[^/\s]+)", re.IGNORECASE)
_HEX = re.compile(r"[0-9a-f]{64}")
_EXAMPLE = "patchkit repack vllm==0.33.0; or name a wheel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An open wheel of vLLM; ``locked`` if the lock names its sha256 as upstream's."""

    wheel: WheelFile
    version: Version
    cpu: str
    locked: bool

    @property
    def fields(self) -> dict[str, object]:
        """What says which wheel it is, for JSON."""
        name, sha256, size = (
            self.wheel.name.filename,
            self.wheel.sha256,
            self.wheel.size,
        )
        return {"file": name, "sha256": sha256, "size": size, "upstream": self.locked}


@contextmanager
def find_wheel(
    spec: str,
    cpu: str,
    *,
    sha256: str | None = None,
    offline: bool = False,
    report: Callable[[str], Progress],
    check: Callable[[Version], None],
) -> Iterator[Origin]:
    """Open the wheel that ``vllm==X.Y.Z`` or a path names.

    ``cpu`` chooses among a release's wheels; ``sha256`` vouches for a file that is not locked.
    Raises UsageError, SourceError, HashMismatchError, StorageError.
    """
    lock = upstream_wheels()
    match = _RELEASE.fullmatch(spec.strip())
    if match is None:
        path = Path(spec)
        require_file(path, meant(str(path), ["vllm"]) or _EXAMPLE)
        if path.suffix != ".whl":
            raise SourceError(f"{path}: is not a wheel", hint=_EXAMPLE)
        name = wheel_name(path.name)
        version = name.version
        if name.project != "vllm":
            raise SourceError(
                f"{path}: is a wheel of {name.project}, not of vllm", hint=_EXAMPLE
            )
        check(version)
        if name.cpus != {cpu}:
            raise UsageError(
                f"{path}: is for {' or '.join(sorted(name.cpus))}, not for {cpu}",
                hint=f"--cpu {min(name.cpus)} if that is meant, or name the other wheel",
            )
    else:
        if sha256 is not None:
            raise UsageError(
                "--sha256 is for a file; a release is known by the lock",
                hint="leave --sha256 out",
            )
        version = named_version(match["version"], _EXAMPLE)
        check(version)
        bar = report(f"Fetching {spec}")
        path = fetch("vllm", str(version), lock[cpu], offline=offline, progress=bar)
    entry = lock.get(cpu, {}).get(version.public)
    with WheelFile(path) as wheel:
        locked = entry is not None and entry.sha256 == wheel.sha256
        if not locked and wheel.facts:
            raise UsageError(
                f"{path}: patchkit {wheel.facts.get('patchkit')} made it already, for "
                f"{wheel.facts.get('target')}",
                why="a repack begins with what upstream released",
                hint=quoted(
                    "patchkit", "repack", f"vllm=={version.public}", "--cpu", cpu
                ),
            )
        if not locked:
            _require_vouched(wheel, sha256, entry)
        yield Origin(wheel=wheel, version=version, cpu=cpu, locked=locked)


def upstream_wheels() -> dict[str, dict[str, LockEntry]]:
    """Read upstream's wheels by CPU and version from ``recipes/vllm/wheels.toml``."""
    return read_wheel_lock(RECIPES / "vllm" / "wheels.toml")


def _require_vouched(
    wheel: WheelFile, sha256: str | None, entry: LockEntry | None
) -> None:
    """Raise unless the user vouches for a file that the lock does not know."""
    if sha256 is not None and not _HEX.fullmatch(sha256.lower()):
        raise UsageError(f"--sha256 takes 64 hex digits, not {sha256!r}")
    if sha256 is not None and sha256.lower() == wheel.sha256:
        return
    if sha256 is not None:
        raise HashMismatchError(
            f"{wheel.path} has the sha256 {wheel.sha256}, not {sha256}",
            why="it is another file, or it was changed or cut short",
            hint="compare with the place that it is from",
        )
    if entry is not None and entry.filename == wheel.name.filename:
        raise HashMismatchError(
            f"{wheel.path} has the sha256 {wheel.sha256}, but the lock says {entry.sha256}",
            why=f"it has {wheel.size:,} bytes of {entry.size:,}: it was cut short"
            if wheel.size < entry.size
            else "it was changed, or it is a build of your own by upstream's name",
            hint=f"`{quoted('patchkit', 'repack', f'vllm=={entry.version}')}` takes upstream's; "
            f"--sha256 {wheel.sha256} takes this one",
        )
    raise UsageError(
        f"{wheel.path} is not among upstream's wheels that this patchkit knows",
        why="it is a build of your own, or newer than the lock",
        hint=f"--sha256 {wheel.sha256} takes it nonetheless",
    )
