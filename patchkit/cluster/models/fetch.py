"""Fetch a commit of a model into its folder: `hf download` of what vLLM loads, and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.models.check import HASH, check_model
from patchkit.cluster.models.expected import (
    CACHE,
    ModelRecord,
    drop_lost_parts,
    forget,
    unfinished,
    write_record,
)
from patchkit.cluster.models.listing import list_commit
from patchkit.cluster.models.names import ModelFolder, free_bytes, models_folder, require_room
from patchkit.durable.failure import translated
from patchkit.durable.lock import locked
from patchkit.errors import HostError, StorageError
from patchkit.follow import Follow


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """What a fetch takes: the chosen files of a commit, in bytes, and the room there is.

    ``held`` was fetched before, ``left`` comes over the network.
    """

    repo: str
    commit: str
    folder: str
    files: int
    size: int
    of: int  # bytes of the whole repository
    held: int
    left: int
    free: int


def fetch_model(
    models: str, python: str, repo: str, revision: str, dry_run: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield ``{"plan": FetchPlan}``, progress in bytes, then the full check of the folder.

    ``python`` is the one that has vLLM. A dry run ends with the plan.
    """
    root = models_folder(models)
    listing = list_commit(python, repo, revision)
    made = listing.choose_record(repo)
    folder = root / ModelFolder(repo=repo, commit=made.commit).name
    held = _count_bytes(folder, made)
    plan = FetchPlan(
        repo=made.repo,
        commit=made.commit,
        folder=str(folder),
        files=len(made.files),
        size=made.size,
        of=sum(size or 0 for size, _digest in listing.files.values()),
        held=held,
        left=made.size - held,
        # Parts of an interrupted download are gone on with, or removed.
        free=free_bytes(folder) + sum(map(_file_size, unfinished(folder))),
    )
    yield {"plan": asdict(plan)}
    require_room(plan.folder, plan.left, plan.free)
    if dry_run:
        return
    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        write_record(folder, made)
        for name, file in made.files.items():
            place = folder / name
            # hf would take a file of another size for what it has fetched.
            if place.is_symlink() or (place.is_file() and place.stat().st_size != file.size):
                forget(folder, name)
        drop_lost_parts(folder, all_parts=False)
        if _count_bytes(folder, made) < made.size:
            yield from _run_hf_download(python, made, folder)
        drop_lost_parts(folder, all_parts=True)
        yield from check_anew(str(folder))


def check_anew(folder: str) -> Iterator[dict[str, Any]]:
    """Check all hashes, as ``check_model`` does, and remove the files that have another one.

    hf and rsync would keep them: size and time are right.
    """
    for answer in check_model(folder, full=True):
        for found in answer.get("result", {}).get("findings", ()):
            if found["about"] == HASH:
                forget(Path(folder), found["where"])
        yield answer


def _run_hf_download(python: str, made: ModelRecord, folder: Path) -> Iterator[dict[str, Any]]:
    program = Path(python).expanduser().with_name("hf")
    words = (str(program), "download", made.repo, *made.files)
    # Not the user's cache: hf would take what it has unseen.
    own = {"HF_HUB_CACHE": str(folder / CACHE / "patchkit" / "hub")}
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    running = Follow(
        *words,
        *("--revision", made.commit, "--local-dir", str(folder)),
        env={"HF_XET_HIGH_PERFORMANCE": "1", **os.environ, **quiet, **own},
    )
    reported = -1
    with running:
        for _line in running:
            parts = sum(map(_file_size, unfinished(folder)))
            size = min(_count_bytes(folder, made) + parts, made.size)
            if size != reported:
                reported = size
                yield {"done": size, "total": made.size}
    done = running.done
    if not done.started:
        raise HostError(
            f"{program} {done.trouble}",
            why="huggingface_hub brings it from 0.34 on, and vLLM brings huggingface_hub",
            hint="name the environment of vLLM: `venv` in cluster.toml, or --venv DIR",
        )
    if done.trouble:
        lines = [line.strip() for line in done.output.split("\n")]
        errors = [line for line in lines if line and "%|" not in line and "it/s" not in line]
        raise StorageError(
            f"{made.repo}: hf download ended with exit code {done.status}: "
            f"{errors[-1] if errors else done.trouble}",
            why="no network there, or no room",
            hint="run the same command again: the files that are whole are kept",
        )


def _count_bytes(folder: Path, made: ModelRecord) -> int:
    """Return the bytes of the files that are whole."""
    return sum(
        file.size for name, file in made.files.items() if _file_size(folder / name) == file.size
    )


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
