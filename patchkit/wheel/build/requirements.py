"""Make the Python environment of a build: torch, CMake and the rest, each by locked hash.

The files in ``recipes/vllm/requirements`` are for pip's ``--require-hashes``: they name everything
that goes into the environment, so that pip has nothing to resolve.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.markers import Marker

from patchkit.digests import digest, sha256_of
from patchkit.durable.lock import locked
from patchkit.errors import (
    BuildError,
    PatchkitError,
    SourceError,
    StorageError,
    translated,
)
from patchkit.follow import Follow
from patchkit.frozen import Texts, Values, frozen
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
# Causes by what pip's output says.
_CAUSES = {
    "DO NOT MATCH THE HASHES": "the index delivers other bytes than those that are locked",
    "No matching distribution": _NOT_THERE,
    "Could not find a version": _NOT_THERE,
    "No space left": "the disk is full: an environment with torch takes 6 GB",
}


@frozen
class Pinned:
    """One pinned package; ``hashes`` is () if the requirements file has no hash for it."""

    name: str
    version: str
    marker: Marker | None
    hashes: Texts


@frozen
class Environment:
    """A virtual environment: its ``python``, and ``packages`` (name → version).

    ``digest`` is the SHA-256 of the requirements file, the same on every machine.
    """

    python: Path
    digest: str
    packages: Values


def read_requirements(path: Path) -> tuple[Pinned, ...]:
    """Read the packages of a requirements file.

    Raises SourceError if the file cannot be read, or for a line that is not ``NAME==VERSION``,
    which a marker and hashes may follow.
    """
    with translated("it cannot be read", path, "name a file that is there"):
        # pip joins a line that ends with a backslash to the next one.
        text = path.read_text("utf-8").replace("\\\n", " ")

    lines = [line.strip() for line in text.splitlines()]
    return tuple(
        _parse_pin(path, line) for line in lines if line and not line.startswith("#")
    )


def _parse_pin(path: Path, line: str) -> Pinned:
    requirement, _, condition = _HASH.sub("", line).partition(";")
    try:
        pin = ExactPin(requirement)
        marker = Marker(condition) if condition.strip() else None
    except ValueError:
        raise SourceError(
            f"{path}: {line[:60]!r} is not NAME==VERSION with --hash=sha256:…",
            why="pip would not know by which bytes to take it",
            hint="`uv pip compile --generate-hashes` or pip-tools writes such a file",
        ) from None
    return Pinned(
        name=pin.project,
        version=str(pin.version),
        marker=marker,
        hashes=tuple(_HASH.findall(line)),
    )


def make_environment(
    requirements: Path,
    folder: Path,
    *,
    leaving: Collection[str],
    offline: bool,
    progress: Progress,
) -> Environment:
    """Return the environment of a requirements file below ``folder``; make it if it is missing.

    Packages whose names match a pattern of ``leaving``, such as ``nvidia-*``, are not installed.
    pip downloads from the index that it is configured for, or nothing if ``offline``. An incomplete
    environment is made anew. Raises BuildError, BusyError, SourceError, StorageError.
    """
    pins = [
        pin
        for pin in for_machine(requirements)
        if not any(fnmatchcase(pin.name, pattern) for pattern in leaving)
    ]
    packages = {pin.name: pin.version for pin in pins}
    file_digest = sha256_of(requirements)

    # An environment shares the modules of the interpreter that it is made with.
    name = digest(" ".join([file_digest, sys.version, sys.base_prefix, *packages]))
    home = folder / f"environment-{name[:12]}"
    python = home / "bin" / "python"
    with made_once(home, python) as is_empty:
        if is_empty:
            # The module itself is there (see machine.missing_needs).
            run(
                sys.executable,
                "-m",
                "venv",
                home,
                kind=StorageError,
                why="the disk is full, or the module venv, a package of its own on Ubuntu, is "
                "damaged",
                hint="free some: an environment with torch takes 6 GB; or: "
                "apt install python3-venv",
                timeout=None,
            )
            install_locked(
                python,
                requirements,
                pins,
                offline=offline,
                progress=progress,
            )
    return Environment(python=python, digest=file_digest, packages=packages)


@contextlib.contextmanager
def made_once(home: Path, part: Path) -> Iterator[bool]:
    """Lock the folder ``home``; yield True if the block has to fill it, False if it is complete.

    The name of the folder must identify its contents. ``part`` is a file or folder within it: if it
    is missing, somebody removed the contents by hand, and the folder is filled again. Raises
    BusyError while another process has the folder, StorageError.
    """
    with translated("it is not complete, and is made anew by the next build", home):
        home.mkdir(parents=True, exist_ok=True)
        with locked(home):
            stamp = home / _STAMP
            if stamp.exists() and part.exists():
                yield False
                return

            emptied(home)
            yield True
            # Last: a folder without the stamp is incomplete, and is filled anew.
            stamp.touch()


def for_machine(requirements: Path, machine: str = "") -> list[Pinned]:
    """Return the packages whose markers hold for this Python, on this machine or on ``machine``.

    Raises SourceError if a package of the file has no hash.
    """
    pins = read_requirements(requirements)
    for pin in pins:
        if not pin.hashes:
            raise SourceError(f"{requirements}: {pin.name} has no --hash=sha256:…")

    facts = {"platform_machine": machine} if machine else {}
    return [pin for pin in pins if pin.marker is None or pin.marker.evaluate(facts)]


def install_locked(
    python: Path,
    requirements: Path,
    pins: Sequence[Pinned],
    *options: str,
    offline: bool,
    progress: Progress,
) -> None:
    """Install packages by hash with pip, without their dependencies.

    ``options`` of pip, such as ``--target``, say where. ``requirements`` only names the file in
    errors. Raises BuildError, and StorageError if the index cannot be reached.
    """
    collected = 0
    total = len(pins)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        for pin in pins:
            hashes = " ".join(f"--hash=sha256:{sha256}" for sha256 in pin.hashes)
            file.write(f"{pin.name}=={pin.version} {hashes}\n")
        file.flush()

        command = [
            # -I: pip must not take packages of PYTHONPATH or of the user for installed ones.
            str(python), "-I", "-m", "pip", "install", "--require-hashes", "--no-deps",
            "--no-input", "--only-binary=:all:", "--disable-pip-version-check",
            "--progress-bar=off", *options, "-r", file.name,
        ]  # fmt: skip
        if offline:
            command.append("--no-index")
        # The caller's variables, also pip's, except those that change where pip installs.
        variables = {
            name: value for name, value in os.environ.items() if name not in _ELSEWHERE
        }
        with Follow(*command, env={**variables, "LC_ALL": "C"}) as running:
            for line in running:
                if line.startswith("Collecting "):
                    collected += 1
                    progress(min(collected, total), total)

    if running.done.trouble:
        raise _pip_error(running.done.output, requirements.name, offline=offline)
    progress(total, total)


def _pip_error(output: str, name: str, *, offline: bool) -> PatchkitError:
    # If pip cannot reach the index, it goes on as if the index were empty.
    if "Retry(total=0" in output:
        return StorageError(
            f"pip could not install {name}: the package index cannot be reached",
            why="there is no network, or a proxy or certificate is missing",
            hint="check pip's configuration; --offline takes wheels from PIP_FIND_LINKS alone",
        )

    lines = output.splitlines()
    telling = list(filter(_TELLING.search, lines)) or lines
    error = BuildError(
        "\n    ".join([f"pip could not install {name}", *telling[:8]]),
        why=next((cause for text, cause in _CAUSES.items() if text in output), ""),
        hint="pip's own settings (PIP_FIND_LINKS, PIP_INDEX_URL) say where it looks",
    )
    if offline:
        error.hint += "; --offline leaves only PIP_FIND_LINKS"
    return error
