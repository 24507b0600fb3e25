"""Make the Python environment of a build: torch, CMake and the rest, each by locked hash.

The files in ``recipes/vllm/requirements`` are what pip takes with ``--require-hashes``: everything
that goes into the environment, so that pip has nothing to resolve.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.markers import Marker

from patchkit.digests import digest, sha256_of
from patchkit.durable.lock import locked
from patchkit.errors import BuildError, SourceError, StorageError, translated
from patchkit.follow import Follow
from patchkit.process import run
from patchkit.source.archive import Progress
from patchkit.source.releases import ExactPin
from patchkit.wheel.build.machine import emptied

_STAMP = "patchkit-environment"
_ELSEWHERE = (
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV",
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_TELLING = re.compile(r"error|hash|THESE PACKAGES|No space", re.IGNORECASE)
_NOT_THERE = (
    "the index that pip is configured for does not have it for this Python and machine"
)
_CAUSES = {  # by what pip says of them
    "DO NOT MATCH THE HASHES": "the index delivers other bytes than those that are locked",
    "No matching distribution": _NOT_THERE,
    "Could not find a version": _NOT_THERE,
    "No space left": "the disk is full: an environment with torch takes 6 GB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """One pinned package; ``hashes`` is () in a file that is not locked yet."""

    name: str
    version: str
    marker: Marker | None
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment, and the versions in it by name.

    ``digest`` is that of the file it was made of, the same on every machine.
    """

    python: Path
    digest: str
    packages: dict[str, str]


def read_requirements(path: Path) -> tuple[Pinned, ...]:
    """Read the packages of a file in pip's format. Raises SourceError for any other line."""
    with translated("it cannot be read", path, "name a file that is there"):
        # pip joins a line that ends with a backslash to the next one.
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    found = []
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        text, _, condition = _HASH.sub("", line).partition(";")
        try:
            pin, marker = (
                ExactPin(text),
                Marker(condition) if condition.strip() else None,
            )
        except ValueError:
            raise SourceError(
                f"{path}: {line[:60]!r} is not NAME==VERSION with --hash=sha256:…",
                why="pip would not know by which bytes to take it",
                hint="`uv pip compile --generate-hashes` or pip-tools writes such a file",
            ) from None
        version, hashes = str(pin.version), tuple(_HASH.findall(line))
        found.append(
            Pinned(name=pin.project, version=version, marker=marker, hashes=hashes)
        )
    return tuple(found)


def make_environment(
    requirements: Path,
    folder: Path,
    *,
    leaving: Collection[str] = (),
    offline: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> Environment:
    """Return the environment that a file describes, below ``folder``; made if it is not there yet.

    Packages whose names fit a pattern of ``leaving``, such as ``nvidia-*``, stay out. pip downloads
    from the index that it is configured for, and nothing when ``offline``. Raises BuildError,
    SourceError, StorageError; what a failure leaves is not taken for one.
    """
    locked = for_machine(requirements)
    wanted = [
        pin
        for pin in locked
        if not any(fnmatchcase(pin.name, each) for each in leaving)
    ]
    file, packages = (
        sha256_of(requirements),
        {each.name: each.version for each in wanted},
    )
    # An environment shares the modules of the interpreter that it is made with.
    name = digest(" ".join([file, sys.version, sys.base_prefix, *packages]))
    home = folder / f"environment-{name[:12]}"
    made = Environment(python=home / "bin" / "python", digest=file, packages=packages)
    with made_once(home, made.python) as is_empty:
        if not is_empty:
            return made
        # That the module is there was asked before (see machine.missing_needs).
        why = "the disk is full, or the module venv, a package of its own on Ubuntu, is damaged"
        hint = "free some: an environment with torch takes 6 GB; or: apt install python3-venv"
        command = (sys.executable, "-m", "venv", home)
        run(*command, kind=StorageError, why=why, hint=hint, timeout=None)
        install_locked(
            made.python, requirements, wanted, offline=offline, progress=progress
        )
    return made


@contextlib.contextmanager
def made_once(home: Path, part: Path) -> Iterator[bool]:
    """Hold a folder that the block fills if it is empty; whole, it is not made again.

    Its name tells what is in it. ``part`` is something of it that a folder which was cleared out by
    hand no longer has. Raises BusyError while another process makes it, StorageError.
    """
    with translated("it is not complete, and is made anew by the next build", home):
        home.mkdir(parents=True, exist_ok=True)
        with locked(home):
            if (home / _STAMP).exists() and part.exists():
                yield False
                return
            emptied(home)
            yield True
            # Last: a folder without it was cut short, and is made anew.
            (home / _STAMP).touch()


def for_machine(requirements: Path, machine: str = "") -> list[Pinned]:
    """Return the packages for this Python, on another ``machine`` if one is named.

    Raises SourceError for one without a hash.
    """
    facts = {"platform_machine": machine} if machine else {}
    found = read_requirements(requirements)
    for each in found:
        if not each.hashes:
            raise SourceError(f"{requirements}: {each.name} has no --hash=sha256:…")
    return [
        each for each in found if each.marker is None or each.marker.evaluate(facts)
    ]


def install_locked(
    python: Path,
    requirements: Path,
    wanted: Sequence[Pinned],
    *options: str,
    offline: bool,
    progress: Progress,
) -> None:
    """Let pip install packages of a file, by hash; ``options`` say where, such as ``--target``.

    Raises BuildError, StorageError.
    """
    collected, total = 0, len(wanted)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        for pin in wanted:
            hashes = " ".join(f"--hash=sha256:{each}" for each in pin.hashes)
            file.write(f"{pin.name}=={pin.version} {hashes}\n")
        file.flush()
        command = [
            # -I: no PYTHONPATH and no user's packages, which pip would take for installed.
            str(python), "-I", "-m", "pip", "install", "--require-hashes", "--no-deps",
            "--no-input", "--only-binary=:all:", "--disable-pip-version-check",
            "--progress-bar=off", *(["--no-index"] if offline else []), *options, "-r", file.name,
        ]  # fmt: skip
        # The caller's variables, pip's among them, but for those that install elsewhere.
        kept = {
            name: value for name, value in os.environ.items() if name not in _ELSEWHERE
        }
        with Follow(*command, env={**kept, "LC_ALL": "C"}) as running:
            for line in running:
                if line.startswith("Collecting "):
                    collected += 1
                    progress(min(collected, total), total)
    done = running.done
    if (
        done.trouble and "Retry(total=0" in done.output
    ):  # pip gave up, and went on as if the index were empty
        raise StorageError(
            f"pip could not install {requirements.name}: the package index cannot be reached",
            why="there is no network, or a proxy or certificate is missing",
            hint="check pip's configuration; --offline takes wheels from PIP_FIND_LINKS alone",
        )
    if done.trouble:
        lines = done.output.splitlines()
        telling = [line for line in lines if _TELLING.search(line)] or lines
        hint = "pip's own settings (PIP_FIND_LINKS, PIP_INDEX_URL) say where it looks"
        raise BuildError(
            "\n    ".join([f"pip could not install {requirements.name}", *telling[:8]]),
            why=next(
                (cause for text, cause in _CAUSES.items() if text in done.output), ""
            ),
            hint=f"{hint}; --offline leaves only PIP_FIND_LINKS" if offline else hint,
        )
    progress(total, total)
