"""pip, asked what it would install on another machine, and told to download it.

The index, its credentials and its certificates are those that pip is configured for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement

from patchkit.errors import (
    HashMismatchError,
    HostError,
    PatchkitError,
    SourceError,
    StorageError,
    UsageError,
)
from patchkit.quoting import quoted
from patchkit.wheel.file.name import WheelName, wheel_name

_PYTHON = re.compile(r"3\.\d{1,2}(\.\d{1,2})?")
_OLDEST = 5  # manylinux_2_5, the first platform tag for Linux
_MISSING = re.compile(
    r"No matching distribution found for (?P<wanted>.+?)(?: \(from (?P<by>.+)\))?$", re.MULTILINE
)
# Its folder must not be searched: modules there are named like some of the standard library.
_MARKERS = ("-P", str(Path(__file__).with_name("markers.py")))
_ADVICE = ("To fix this", "Additionally", "ERROR: Cannot install")
_SHOWN = 12  # lines of what pip says of a conflict


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlatform:
    """A machine that wheels are wanted for: ``x86_64``, Python ``3.12``, glibc ``2.39``."""

    machine: str
    python: str
    glibc: str

    def __str__(self) -> str:
        return f"CPython {self.python} on {self.machine} with glibc {self.glibc}"

    def facts(self) -> dict[str, str]:
        return {"machine": self.machine, "python": self.python, "glibc": self.glibc}

    def options(self) -> list[str]:
        """What tells pip which files fit."""
        minor = int(self.glibc.removeprefix("2."))
        platforms = [f"manylinux_2_{number}" for number in range(minor, _OLDEST - 1, -1)]
        # The old names are no other spelling to pip once a platform is given.
        platforms += ["manylinux2014"] * (minor >= 17) + ["manylinux2010", "manylinux1", "linux"]
        chosen = [f"--platform={platform}_{self.machine}" for platform in platforms]
        fixed = ["--implementation=cp", "--only-binary=:all:"]
        return [*chosen, f"--python-version={self.python}", *fixed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """A wheel that pip chose; ``requires`` are those of its requirements that hold there."""

    name: WheelName
    sha256: str
    requires: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelIndex:
    """Where pip may look: its index or, ``offline``, in folders alone."""

    offline: bool = False
    folders: tuple[Path, ...] = ()

    def options(self) -> list[str]:
        links = [f"--find-links={folder.absolute()}" for folder in self.folders]
        return [*(["--no-index"] if self.offline else []), *links]


def place(machine: str, python: str, glibc: str) -> NodePlatform:
    """Raises UsageError for what is no version of Python 3, or of glibc 2."""
    if not _PYTHON.fullmatch(python):
        raise UsageError(f"--python takes a version such as 3.12, not {python!r}")
    if not re.fullmatch(r"2\.\d{1,2}", glibc) or int(glibc[2:]) < _OLDEST:
        raise UsageError(f"--glibc takes a version such as 2.39, not {glibc!r}")
    return NodePlatform(machine=machine, python=python, glibc=glibc)


def resolve(
    wanted: Sequence[str], where: NodePlatform, source: WheelIndex, scratch: Path
) -> tuple[Locked, ...]:
    """Every wheel that an installation of ``wanted`` there consists of, those in it as well.

    ``wanted`` are paths of wheels and requirements. Nothing is installed; ``scratch`` is a folder
    for what pip has to write. Raises SourceError if there is no solution, StorageError if the index
    or the disk fails, HostError if this pip cannot do it.
    """
    report = scratch / "report.json"
    options = ["--dry-run", "--ignore-installed", f"--target={scratch / 'target'}"]
    _pip(["install", *options, f"--report={report}", *wanted], where, source, scratch)
    return read_report(json.loads(report.read_text(encoding="utf-8")), where)


def download(
    wheels: Iterable[Locked], where: NodePlatform, source: WheelIndex, folder: Path
) -> None:
    """Download these very files into a folder, all or none. Raises as ``resolve``.

    HashMismatchError if the index has other bytes under one of the names.
    """
    lines = folder / "lock.txt"
    lines.write_text(
        "".join(f"{each.name.pinned} --hash=sha256:{each.sha256}\n" for each in wheels)
    )
    options = ["--no-deps", "--require-hashes", f"--dest={folder}", f"--requirement={lines}"]
    try:
        _pip(["download", *options], where, source, folder)
    finally:
        lines.unlink()


def read_report(report: Mapping[str, Any], where: NodePlatform) -> tuple[Locked, ...]:
    """The wheels in what ``pip install --report`` writes, by file name.

    Raises HostError if pip answered markers for another machine, SourceError for what is no wheel.
    """
    environment = {**report["environment"], "extra": ""}
    python = ".".join(where.python.split(".")[:2])
    if (environment["platform_machine"], environment["python_version"]) != (where.machine, python):
        raise HostError(
            f"pip decided for {environment['platform_machine']}, not for {where.machine}",
            why="this version of pip finds out about its machine in another way",
            hint="update pip; or run the command on the machine itself",
        )
    found = [_locked(item, environment) for item in report["install"]]
    return tuple(sorted(found, key=lambda each: each.name.filename))


def _locked(item: Mapping[str, Any], environment: Mapping[str, str]) -> Locked:
    info, metadata = item["download_info"], item["metadata"]
    filename = unquote(urlsplit(info["url"]).path.rpartition("/")[2])
    sha256 = info.get("archive_info", {}).get("hashes", {}).get("sha256", "")
    if not filename.endswith(".whl") or not sha256:
        raise SourceError(
            f"{metadata['name']} {metadata['version']}: {filename or 'a folder'} is no wheel "
            "with a sha256",
            hint="build a wheel of it, and name its folder with --find-links",
        )
    needed = map(Requirement, metadata.get("requires_dist", []))
    holds = [each for each in needed if not each.marker or each.marker.evaluate(dict(environment))]
    return Locked(name=wheel_name(filename), sha256=sha256, requires=tuple(map(str, holds)))


def _pip(arguments: Sequence[str], where: NodePlatform, source: WheelIndex, scratch: Path) -> None:
    done = _run([*arguments, *where.options(), *source.options()], where, scratch)
    if done.returncode != 0:
        raise _failure(done.stdout + done.stderr, where, source, scratch)


def _run(
    arguments: Sequence[str], where: NodePlatform, scratch: Path
) -> subprocess.CompletedProcess[str]:
    # A pip that is killed leaves its temporary files where they are found again.
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    as_there = [*_MARKERS, where.machine, where.python]
    return subprocess.run(
        [sys.executable, *as_there, *arguments, "--no-input", "--no-color"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def _failure(said: str, where: NodePlatform, source: WheelIndex, scratch: Path) -> PatchkitError:
    """What pip's words mean."""
    lines = [line for line in said.splitlines() if not line.startswith("WARNING: Location")]
    missing = _MISSING.search(said)
    if "No module named pip" in said or "no such option" in said:
        return HostError(
            "pip is missing, or too old",
            why=lines[-1] if lines else "",
            hint=quoted("pip", "install", "pip>=23"),
        )
    if "No space left on device" in said:
        return StorageError("pip ran out of disk space", hint="free some, then run it again")
    if "DO NOT MATCH THE HASHES" in said:
        return HashMismatchError(
            "the index has other bytes than it said",
            why=" ".join(_after(lines, "DO NOT MATCH")),
            hint="run it again; if it stays so, the index or a proxy changes files",
        )
    if "Retry(total=0" in said:  # it gave up, and went on as if the index were empty
        return StorageError(
            "the package index cannot be reached",
            why="there is no network, or a proxy or certificate is missing",
            hint="check pip's configuration; --offline takes wheels from --find-links alone",
        )
    if "ResolutionImpossible" in said:
        return SourceError(
            f"there is no set of wheels that fits together for {where}",
            why="\n        ".join(_after(lines, "The conflict is caused by")),
            hint="another release of one of these, or another --python",
        )
    if missing:
        return _no_wheel(missing["wanted"], missing["by"] or "", where, scratch, source)
    return StorageError("pip failed", why="\n        ".join(lines[-_SHOWN:]))


def _no_wheel(
    wanted: str, by: str, where: NodePlatform, scratch: Path, source: WheelIndex
) -> PatchkitError:
    """The error for a requirement that no wheel meets; pip is asked whether there are sources."""
    project = re.split(r"[\s<>=!~\[;]", wanted, maxsplit=1)[0]
    options = ["--no-binary=:all:", "--pre", *source.options()]
    asked = _run(["index", "versions", project, *options], where, scratch)
    only_source = asked.returncode == 0
    return SourceError(
        f"{wanted}: no wheel of it for {where}" + (f"; {by} needs it" if by else ""),
        why="it is there as a source distribution alone"
        if only_source
        else "it is there for other machines or in other versions alone, or not at all"
        + ("" if source.offline else "; or the index does not answer"),
        hint="build its wheel on such a machine (pip wheel), and name the folder with --find-links",
    )


def _after(lines: Sequence[str], mark: str) -> list[str]:
    """The lines from the one with this mark on, without what pip advises."""
    start = next((number for number, line in enumerate(lines) if mark in line), 0)
    kept = [line.strip() for line in lines[start:] if line.strip()]
    end = next((n for n, line in enumerate(kept) if line.startswith(_ADVICE)), len(kept))
    return kept[: min(end, _SHOWN)]
