"""Install wheels into a new environment, whole or not at all, and check it. Runs on the node."""

from __future__ import annotations

import base64
import csv
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from patchkit.cluster.agent.wheel_store import WheelLock, share_folder
from patchkit.digests import digest, sha256_of
from patchkit.durable.atomic import replacing
from patchkit.durable.failure import is_full, translated
from patchkit.durable.lock import locked
from patchkit.errors import HashMismatchError, HostError, PatchkitError, SourceError, StorageError
from patchkit.follow import Follow
from patchkit.process import attempt
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json, record
from patchkit.runtime.python.distributions import distributions, header
from patchkit.runtime.python.libnccl import loaded

MARKER = "patchkit-installed.json"
"""In an environment that is whole: what the check found."""

_AGAIN = "patchkit cluster install"
# What a lock names, with no index and no settings.
_PIP = (
    *("--disable-pip-version-check", "--no-cache-dir", "--no-input"),
    *("--no-index", "--require-hashes", "--no-deps"),
)
_PATIENCE = 20.0  # seconds for the pip of a launcher that was killed
_LARGEST = 32 << 20  # bytes of a RECORD


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledVenv:
    """A whole environment: its projects' versions, and the libnccl that torch loads.

    ``record`` is a digest over all RECORDs, without what depends on the folder: scripts.
    """

    name: str
    folder: str
    python: str
    versions: Mapping[str, str]
    record: str
    nccl: str = ""
    nccl_version: str = ""
    nccl_sha256: str = ""
    warnings: tuple[str, ...] = ()


def install_wheels(lock: Any, python: str) -> Iterator[dict[str, Any]]:
    """Yield the progress in wheels, at last ``{"result": InstalledVenv}``.

    What an interrupt left is begun anew; where files were changed since, they are put back. Raises
    StorageError for a full disk, HashMismatchError, HostError.
    """
    house, folder = record(WheelLock, lock), share_folder("venvs")
    place, count = folder / house.id, len(house.wheels)
    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, _PATIENCE):
        if found := read_whole(place):
            yield {"result": asdict(found)}
            return
        try:
            yield from _fill_venv(place, python, house)
            # Two more passes over the files: to the disk, and for their hashes.
            yield {"done": count, "total": count + 1}
            os.sync()
            projects = (wheel.name.partition("-")[0] for wheel in house.wheels)
            found = check_venv(place, {name.lower().replace(".", "_") for name in projects})
            with translated(at=place), replacing(place / MARKER) as file:
                file.write(json.dumps(asdict(found), indent=1).encode())
        except (OSError, PatchkitError) as error:
            if not is_full(folder):
                raise
            # Not one that works: a changed one may be in use.
            if not (place / MARKER).exists():
                shutil.rmtree(place, ignore_errors=True)
            size = sum(wheel.unpacked for wheel in house.wheels)
            raise StorageError(
                f"{folder}: the disk is full; the environment takes {size / 1e6:,.0f} MB",
                why=str(getattr(error, "what", error)),
                hint="make room there, then run the same command again",
            ) from None
    yield {"result": asdict(found)}


def _fill_venv(place: Path, python: str, lock: WheelLock) -> Iterator[dict[str, Any]]:
    """Make the environment, and let pip fill it; yield the progress."""
    changed = (place / MARKER).exists()
    if not changed:
        shutil.rmtree(place, ignore_errors=True)
        made = attempt(python, "-I", "-m", "venv", place, timeout=None)
        if made.trouble:
            raise made.error(hint=_AGAIN)
    requirements = place / "requirements.txt"
    with translated(at=place):
        requirements.write_text(lock.requirements, encoding="utf-8")
    words: list[str | Path] = [
        place / "bin" / "python",
        "-I",
        "-m",
        "pip",
        "--isolated",
        "install",
        *_PIP,
    ]
    words += ["--force-reinstall"] if changed else []
    words += ["--find-links", share_folder("wheelhouse"), "-r", requirements]
    begun, count = 0, len(lock.wheels)
    with Follow(*words, env={**os.environ, "LC_ALL": "C.UTF-8"}) as running:
        for line in running:
            begun += line.startswith("Processing ")
            yield {"done": min(begun, count), "total": count + 1}
    if not running.done.trouble:
        return
    output = running.done.output
    lines = [line for line in output.split("\n") if line.startswith("ERROR: ")]
    what = "pip: " + (lines[0] if lines else running.done.trouble).removeprefix("ERROR: ")
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in output:
        raise HashMismatchError(what, hint=_AGAIN)
    raise HostError(
        what, why="it installs what the lock names, and nothing else", hint="patchkit verify"
    )


class _RecordedFile(NamedTuple):
    project: str
    member: str
    path: Path
    sha256: str
    size: int | None


def check_venv(place: Path, projects: Collection[str]) -> InstalledVenv:
    """Hash everything that is installed; return what is there.

    Raises HashMismatchError for a file with other bytes than its RECORD says, SourceError for a
    project that is missing.
    """
    site, files = _read_records(place)
    homes = distributions([str(site)])
    if absent := sorted({*projects} - {*homes}):
        raise SourceError(f"{place}: {absent[0]} is not installed", hint=_AGAIN)

    def is_as_recorded(file: _RecordedFile) -> bool:
        try:
            return _has_its_size(file) and sha256_of(file.path) == file.sha256
        except StorageError:
            return False

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        checked = zip(files, pool.map(is_as_recorded, files), strict=True)
        wrong = [str(file.path) for file, fine in checked if not fine]
    if wrong:
        raise HashMismatchError(
            f"{wrong[0]}: is not as its wheel has it ({len(wrong)} in all)",
            why="it was changed while it was installed, or the disk is damaged",
            hint=_AGAIN,
        )
    fields: dict[str, Any] = {}
    if "torch" in homes:
        answer = loaded(str(place / "bin" / "python"), os.environ)
        fields["warnings"] = answer.warnings
        for copy in answer.copies:
            if copy.path == answer.torch.path:
                fields["nccl"] = copy.path.removeprefix(f"{place}/")
                fields |= {"nccl_version": copy.version, "nccl_sha256": copy.sha256}
    return InstalledVenv(
        name=place.name,
        folder=str(place),
        python=site.parent.name.removeprefix("python"),
        versions={name: header(homes[name][0], "Version") for name in sorted(projects)},
        record=_digest_records(files, projects),
        **fields,
    )


def read_whole(place: Path) -> InstalledVenv | None:
    """Return what is in an environment that was checked, if that is what it still has.

    Its files have their sizes, and its projects the RECORDs of then: another pip leaves others.
    """
    try:
        found = read_json(InstalledVenv, read_text(place / MARKER, limit=_LARGEST, follow=False))
        _, files = _read_records(place)
    except (OSError, RecordError, PatchkitError):
        return None
    same = found.name == place.name and _digest_records(files, found.versions) == found.record
    return found if same and all(map(_has_its_size, files)) else None


def _read_records(place: Path) -> tuple[Path, list[_RecordedFile]]:
    """Return site-packages, and the files that RECORDs name with a hash; all are inside."""
    site = next(iter(sorted(place.glob("lib/python3.*/site-packages"))), None)
    if site is None:
        raise SourceError(f"{place}: has no site-packages", hint=_AGAIN)
    files = []
    for project, (home, *_others) in distributions([str(site)]).items():
        for row in csv.reader(read_text(home / "RECORD", limit=_LARGEST).splitlines()):
            member, kind_digest, size = [*row, "", "", ""][:3]
            if not kind_digest:  # compiled code, RECORD itself
                continue
            kind, _, text = kind_digest.partition("=")
            path = Path(os.path.normpath(site / member))
            try:
                sha256 = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
                count = int(size) if size else None
            except ValueError:
                kind = ""
            if kind != "sha256" or not path.is_relative_to(place):
                raise SourceError(f"{home / 'RECORD'}: a line that is none: {member!r}")
            files.append(_RecordedFile(project, member, path, sha256, count))
    return site, files


def _has_its_size(file: _RecordedFile) -> bool:
    try:
        return file.size in (None, file.path.lstat().st_size)
    except OSError:
        return False


def _digest_records(files: Iterable[_RecordedFile], projects: Collection[str]) -> str:
    rows = (
        f"{file.member} {file.sha256}"
        for file in files
        if file.project in projects and not file.member.startswith("../")
    )
    return digest("\n".join(sorted(rows)))
