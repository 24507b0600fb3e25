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

from patchkit.cluster.agent.installed import MARKER, check_venv, read_whole
from patchkit.cluster.agent.venv_link import venv_folder
from patchkit.cluster.agent.wheel_store import WheelLock, wheel_folder
from patchkit.durable.atomic import replacing
from patchkit.durable.failure import is_full, translated
from patchkit.durable.lock import locked
from patchkit.errors import HashMismatchError, HostError, PatchkitError, StorageError
from patchkit.follow import Follow
from patchkit.process import Completed, attempt
from patchkit.records import record

_AGAIN = "patchkit cluster install"
# What a lock names, with no index and no settings.
_PIP = (
    *("--disable-pip-version-check", "--no-cache-dir", "--no-input"),
    *("--no-index", "--require-hashes", "--no-deps"),
)
_PATIENCE = 20.0  # seconds for the pip of a launcher that was killed


def install_wheels(lock: Any, python: str) -> Iterator[dict[str, Any]]:
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
        if found := read_whole(place):
            yield {"result": asdict(found)}
            return
        try:
            yield from _fill_venv(place, python, wanted, len(wheels))
            # Two more passes over the files: to the disk, and for their hashes.
            yield {"done": len(wheels), "total": len(wheels) + 1}
            os.sync()
            found = check_venv(place, {each.project for each in wheels})
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


def _fill_venv(place: Path, python: str, lock: WheelLock, count: int) -> Iterator[dict[str, Any]]:
    """Make the environment, and let pip fill it; yield the progress."""
    changed = (place / MARKER).exists()
    if not changed:
        shutil.rmtree(place, ignore_errors=True)
        done = attempt(python, "-I", "-m", "venv", place, timeout=None)
        if done.trouble:
            raise done.error(hint=_AGAIN)
    requirements = place / "requirements.txt"
    with translated(at=place):
        requirements.write_text(lock.requirements, encoding="utf-8")
    more = ("--force-reinstall",) if changed else ()
    words = (place / "bin" / "python", "-I", "-m", "pip", "--isolated", "install", *_PIP, *more)
    words = (*words, "--find-links", wheel_folder(), "-r", requirements)
    seen = 0
    with Follow(*words, env={**os.environ, "LC_ALL": "C.UTF-8"}) as running:
        for line in running:
            seen += line.startswith("Processing ")
            yield {"done": min(seen, count), "total": count + 1}
    if running.done.trouble:
        raise _pip_error(running.done)


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
