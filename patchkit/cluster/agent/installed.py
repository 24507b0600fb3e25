"""Check what is installed in an environment: every file of every RECORD. Runs on the node."""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.errors import HashMismatchError, PatchkitError, SourceError
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json
from patchkit.runtime.python.distributions import distributions, header
from patchkit.runtime.python.libnccl import loaded

MARKER = "patchkit-installed.json"
"""In an environment that is whole: what the check found."""

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


@dataclass(frozen=True, slots=True)
class _RecordedFile:
    project: str
    member: str
    path: Path
    sha256: str
    size: int


def check_venv(place: Path, projects: Collection[str]) -> InstalledVenv:
    """Hash everything that is installed; return what is there.

    Raises HashMismatchError for a file with other bytes than its RECORD says, SourceError for a
    project that is missing.
    """
    site = _find_site(place)
    homes = distributions([str(site)])
    if absent := sorted({*projects} - {*homes}):
        raise SourceError(f"{place}: {absent[0]} is not installed", hint="patchkit cluster install")
    files = list(_recorded_files(place, site))
    if wrong := [*_wrong_sizes(files), *_wrong_hashes(files)]:
        raise HashMismatchError(
            f"{wrong[0]}: is not as its wheel has it ({len(wrong)} in all)",
            why="it was changed while it was installed, or the disk is damaged",
            hint="patchkit cluster install",
        )
    python = str(place / "bin" / "python")
    fields: dict[str, Any] = {}
    if "torch" in homes:
        answer = loaded(python, os.environ)
        taken = next((copy for copy in answer.copies if copy.path == answer.torch.path), None)
        path = Path(taken.path) if taken else None
        inside = path is not None and path.is_relative_to(place)
        fields = {
            "nccl": str(path.relative_to(place) if path and inside else path or ""),
            "nccl_version": taken.version if taken else "",
            "nccl_sha256": taken.sha256 if taken else "",
            "warnings": answer.warnings,
        }
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
        files = list(_recorded_files(place, _find_site(place)))
    except (OSError, RecordError, PatchkitError):
        return None
    same = found.name == place.name and _digest_records(files, found.versions) == found.record
    return found if same and not any(_wrong_sizes(files)) else None


def _find_site(place: Path) -> Path:
    found = sorted(place.glob("lib/python3.*/site-packages"))
    if not found:
        raise SourceError(f"{place}: has no site-packages", hint="patchkit cluster install")
    return found[0]


def _recorded_files(place: Path, site: Path) -> Iterator[_RecordedFile]:
    """Yield the files that RECORDs name with a hash; one outside of the environment is wrong."""
    for project, (home, *_others) in distributions([str(site)]).items():
        for row in csv.reader(read_text(home / "RECORD", limit=_LARGEST).splitlines()):
            member, kind_digest, size = [*row, "", "", ""][:3]
            kind, _, text = kind_digest.partition("=")
            if not kind_digest:  # compiled code, RECORD itself
                continue
            path = Path(os.path.normpath(site / member))
            try:
                sha256 = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
                bytes_there = int(size or -1)
            except (ValueError, binascii.Error):
                kind, sha256, bytes_there = "", "", -1
            if kind != "sha256" or not path.is_relative_to(place):
                raise SourceError(f"{home / 'RECORD'}: a line that is none: {member!r}")
            yield _RecordedFile(project, member, path, sha256, bytes_there)


def _wrong_sizes(files: Collection[_RecordedFile] | Iterator[_RecordedFile]) -> Iterator[str]:
    for each in files:
        try:
            fine = each.size in (-1, each.path.lstat().st_size)
        except OSError:
            fine = False
        if not fine:
            yield str(each.path)


def _wrong_hashes(files: Collection[_RecordedFile]) -> Iterator[str]:
    def fits(each: _RecordedFile) -> bool:
        try:
            with each.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == each.sha256
        except OSError:
            return False

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for each, fine in zip(files, pool.map(fits, files), strict=True):
            if not fine:
                yield str(each.path)


def _digest_records(files: Collection[_RecordedFile], projects: Collection[str]) -> str:
    rows = sorted(
        f"{file.member} {file.sha256}"
        for file in files
        if file.project in projects and not file.member.startswith("../")
    )
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()
