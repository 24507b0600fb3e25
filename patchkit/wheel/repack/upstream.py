"""The wheel that a repack begins with: upstream's, known by its locked sha256."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from patchkit.digests import sha256_of
from patchkit.errors import HashMismatchError, SourceError, UsageError
from patchkit.paths import RECIPES
from patchkit.quoting import quoted
from patchkit.reading import require_file
from patchkit.source.fetch import Progress, fetch
from patchkit.source.lock import LockEntry, read_wheel_lock
from patchkit.versions import named_version
from patchkit.wheel.file.facts import FACTS
from patchkit.wheel.file.members import opened, small
from patchkit.wheel.file.record import WheelName, wheel_name

_RELEASE = re.compile(r"vllm\s*==\s*(?P<version>[^/\s]+)", re.IGNORECASE)
_HEX = re.compile(r"[0-9a-f]{64}")
_EXAMPLE = "patchkit repack vllm==0.25.1; or name a wheel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A wheel with its sha256 in hex; ``locked`` if the lock names it as upstream's.

    ``facts`` are those of patchkit, if it made the wheel.
    """

    path: Path
    name: WheelName
    version: Version
    sha256: str
    locked: bool
    facts: Mapping[str, Any] | None = None

    @property
    def machine(self) -> str:
        return next(iter(self.name.cpus))

    @property
    def identity(self) -> str:
        return f"sha256:{self.sha256}"


def find_wheel(
    spec: str,
    cpu: str,
    *,
    sha256: str | None = None,
    offline: bool = False,
    report: Callable[[str], Progress],
    check: Callable[[Version], None],
) -> Origin:
    """The wheel that ``vllm==X.Y.Z`` or a path names.

    ``cpu`` chooses among a release's wheels; ``sha256`` vouches for a file that is not locked.
    Raises UsageError, SourceError, HashMismatchError, StorageError.
    """
    lock = locked_wheels()
    match = _RELEASE.fullmatch(spec.strip())
    if match is None:
        return _local(Path(spec), cpu, sha256, lock, check)
    if sha256 is not None:
        raise UsageError("--sha256 is for a file; a release is known by the lock")
    version = named_version(match["version"], _EXAMPLE)
    check(version)
    if cpu not in lock:
        raise UsageError(f"no wheel of vLLM is for {cpu}", hint=f"one of {', '.join(sorted(lock))}")
    path = fetch(
        "vllm", str(version), lock[cpu], offline=offline, progress=report(f"Fetching {spec}")
    )
    entry = lock[cpu][str(version)]
    return Origin(
        path=path,
        name=wheel_name(path.name),
        version=version,
        sha256=entry.sha256,
        locked=True,
    )


def locked_wheels() -> dict[str, dict[str, LockEntry]]:
    """Upstream's wheels by CPU and version, from ``recipes/vllm/wheels.toml``."""
    return read_wheel_lock(RECIPES / "vllm" / "wheels.toml")


def _local(
    path: Path,
    cpu: str,
    sha256: str | None,
    lock: Mapping[str, Mapping[str, LockEntry]],
    check: Callable[[Version], None],
) -> Origin:
    require_file(path, _EXAMPLE)
    if path.suffix != ".whl":
        raise SourceError(f"{path}: is not a wheel", hint=_EXAMPLE)
    name = wheel_name(path.name)
    if name.project != "vllm":
        raise SourceError(f"{path}: is a wheel of {name.project}, not of vllm", hint=_EXAMPLE)
    check(name.version)
    if name.cpus != {cpu}:
        raise UsageError(
            f"{path}: is for {' or '.join(sorted(name.cpus))}, not for {cpu}",
            hint=f"--platform {min(name.cpus)} if that is meant, or name the other wheel",
        )
    digest = sha256_of(path)
    entry = lock.get(cpu, {}).get(name.version.public)
    locked = entry is not None and entry.sha256 == digest
    facts = None
    if not locked:
        facts = made_by_patchkit(path)
        if facts is None:
            _check_named(path, digest, sha256, entry)
    return Origin(
        path=path, name=name, version=name.version, sha256=digest, locked=locked, facts=facts
    )


def made_by_patchkit(wheel: Path) -> Mapping[str, Any] | None:
    """The facts that patchkit left in a wheel, None if it did not make it."""
    with opened(wheel) as (bundle, infos):
        found = [i for i in infos if re.fullmatch(rf"[^/]+\.dist-info/{FACTS}", i.filename)]
        if len(found) != 1:
            return None
        facts = json.loads(small(wheel, bundle, found[0]))
    if not isinstance(facts, dict):
        raise SourceError(f"{wheel}: {FACTS} holds no facts", why="it was edited")
    return facts


def _check_named(path: Path, digest: str, sha256: str | None, entry: LockEntry | None) -> None:
    """Raise unless the user vouches for a file that the lock does not know."""
    if sha256 is not None and not _HEX.fullmatch(sha256.lower()):
        raise UsageError(f"--sha256 takes 64 hex digits, not {sha256!r}")
    if sha256 is not None and sha256.lower() == digest:
        return
    size = path.stat().st_size
    if sha256 is not None:
        raise HashMismatchError(
            f"{path} has the sha256 {digest}, not {sha256}",
            why="it is another file, or it was changed or cut short",
            hint="compare with the place that it is from",
        )
    same = entry is not None and entry.filename == path.name
    if entry is not None and same:
        raise HashMismatchError(
            f"{path} has the sha256 {digest}, but the lock says {entry.sha256}",
            why=f"it has {size:,} bytes of {entry.size:,}: it was cut short"
            if size < entry.size
            else "it was changed, or it is a build of your own by upstream's name",
            hint=f"`{quoted('patchkit', 'repack', f'vllm=={entry.version}')}` takes upstream's; "
            f"--sha256 {digest} takes this one",
        )
    raise UsageError(
        f"{path} is not among upstream's wheels that this patchkit knows",
        why="it is a build of your own, or newer than the lock",
        hint=f"--sha256 {digest} takes it nonetheless",
    )
