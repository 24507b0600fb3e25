"""Install wheels into a new environment, whole or not at all, and check it. Runs on the node."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.installed import MARKER, checked, whole
from patchkit.cluster.agent.venv_link import venv_folder
from patchkit.cluster.agent.wheel_store import WheelLock, wheel_folder
from patchkit.durable.atomic import replacing
from patchkit.durable.failure import is_full, translated
from patchkit.durable.lock import locked
from patchkit.errors import HashMismatchError, HostError, PatchkitError, StorageError
from patchkit.process import Completed, attempt, output
from patchkit.quoting import quoted
from patchkit.records import record

_AGAIN = "patchkit cluster install"
_PATIENCE = 20.0  # seconds for the pip of a launcher that was killed


def pip_words(python: str, store: str, requirements: str, *more: str) -> tuple[str, ...]:
    """Return the command that installs what a lock names, with no index and no settings."""
    options = ("--no-index", "--find-links", store, "--require-hashes", "--no-deps", "--no-input")
    pip = (python, "-I", "-m", "pip", "--isolated", "--disable-pip-version-check", "install")
    return (*pip, "--no-cache-dir", *options, *more, "-r", requirements)


def install(lock: Any, python: str) -> Iterator[dict[str, Any]]:
    """Yield the progress in wheels, at last ``{"result": InstalledVenv}``.

    What an interrupt left is begun anew; where files were changed since, they are put back. Raises
    StorageError for a full disk, HashMismatchError, HostError.
    """
    wanted = record(WheelLock, lock)
    wheels = wanted.on(platform.machine())
    place = venv_folder() / wanted.name_on(platform.machine())
    with translated(at=venv_folder()):
        venv_folder().mkdir(parents=True, exist_ok=True)
    with locked(venv_folder(), _PATIENCE):
        if found := whole(place):
            yield {"result": asdict(found)}
            return
        try:
            yield from _filled(place, python, wanted, len(wheels))
            # Two more passes over the files: to the disk, and for their hashes.
            yield {"done": len(wheels), "total": len(wheels) + 1}
            os.sync()
            found = checked(place, {each.project for each in wheels})
            with translated(at=place), replacing(place / MARKER) as file:
                file.write(json.dumps(asdict(found), indent=1).encode())
        except (OSError, PatchkitError) as error:
            if not is_full(venv_folder()):
                raise
            # Not one that works: a changed one may be in use.
            if not (place / MARKER).exists():
                shutil.rmtree(place, ignore_errors=True)
            size = sum(each.unpacked for each in wheels)
            raise StorageError(
                f"{venv_folder()}: the disk is full; the environment takes {size / 1e6:,.0f} MB",
                why=str(getattr(error, "what", error)),
                hint="make room there, then run the same command again",
            ) from None
    yield {"result": asdict(found)}


def _filled(place: Path, python: str, lock: WheelLock, count: int) -> Iterator[dict[str, Any]]:
    """Make the environment, and let pip fill it; yield the progress."""
    changed = (place / MARKER).exists()
    if not changed:
        shutil.rmtree(place, ignore_errors=True)
        done = attempt(python, "-I", "-m", "venv", place, timeout=None)
        if done.trouble:
            raise _venv_error(done, lock.python)
    requirements = place / "requirements.txt"
    with translated(at=place):
        requirements.write_text(lock.requirements, encoding="utf-8")
    more = ("--force-reinstall",) if changed else ()
    words = pip_words(str(place / "bin" / "python"), str(wheel_folder()), str(requirements), *more)
    running, seen = output(*words, env={**os.environ, "LC_ALL": "C.UTF-8"}), 0
    while True:
        try:
            line = next(running)
        except StopIteration as end:
            if end.value.trouble:
                raise _pip_error(end.value) from None
            return
        seen += line.startswith("Processing ")
        yield {"done": min(seen, count), "total": count + 1}


def _venv_error(done: Completed, release: str) -> PatchkitError:
    if "ensurepip is not available" in done.output + done.errors:
        hint = quoted("sudo", "apt", "install", f"python{release}-venv")
        return HostError("python3 -m venv: has no ensurepip", why="a package is missing", hint=hint)
    return done.error(hint=_AGAIN)


def _pip_error(done: Completed) -> PatchkitError:
    lines = [line for line in done.output.split("\n") if line.startswith("ERROR: ")]
    said = (lines[0] if lines else done.trouble).removeprefix("ERROR: ")
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in done.output:
        return HashMismatchError(f"pip: {said}", hint=_AGAIN)
    return HostError(
        f"pip: {said}",
        why="it installs what the lock names, and nothing else",
        hint="patchkit verify",
    )
