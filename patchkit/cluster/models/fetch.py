"""Fetch a commit of a model into its folder: `hf download` of what vLLM loads, and no more.

The Hub is asked through huggingface_hub and hf of vLLM's environment, which also find the token.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchkit import process
from patchkit.cluster.models.model_check import (
    CACHE,
    HASH,
    RECORD,
    Checking,
    ModelRecord,
    check_model,
    choose_files,
)
from patchkit.cluster.models.names import (
    Commit,
    ModelFolder,
    models_folder,
    require_room,
)
from patchkit.durable.atomic import replacing
from patchkit.durable.lock import locked
from patchkit.errors import (
    HostError,
    PatchkitError,
    SourceError,
    StorageError,
    translated,
)
from patchkit.follow import Follow
from patchkit.records import RecordError, record

_ASK = """
import sys
repo, revision = sys.argv[1:]
answer = {"says": "there is no huggingface_hub, which vLLM brings", "kind": "missing"}
try:
    from huggingface_hub import HfApi
    answer["kind"] = "silent"
    info = HfApi().model_info(repo, revision=revision or None, files_metadata=True, timeout=30)
    # Of a large file the sha256, of another git's sha1.
    files = ((f.rfilename, f.size, f.lfs.sha256 if f.lfs else f.blob_id) for f in info.siblings)
    files = {name: {"size": size, "digest": digest} for name, size, digest in files}
    answer = {"commit": info.sha, "files": files}
except ImportError:
    pass
except Exception as error:
    answer["says"] = str(error) or type(error).__name__
    if getattr(error, "response", None) is not None:
        answer["kind"] = "refused"
"""
_PATIENCE = 60.0  # seconds
_SAID = 400  # characters of hf's words
_PYTHON = "name the environment of vLLM: `venv` in cluster.toml, or --venv DIR"
_ERRORS: Mapping[str, tuple[type[PatchkitError], str]] = {
    "missing": (HostError, _PYTHON),
    "silent": (StorageError, "look at the network there"),
    "refused": (
        SourceError,
        "correct the name; or agree at https://huggingface.co/{repo}, and there: `{hf} auth login`",
    ),
}
# Newer releases of hf begin a file anew, under another name each time.
_LOST = re.compile(r"\.[0-9a-f]{40,64}\.[0-9a-f]{8}\.incomplete$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubListing:
    """A commit as the Hub has it: each file with its size and digest, if it names them."""

    commit: Commit
    files: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """What a fetch takes, in bytes: all chosen files, what of them is left, the room there is."""

    repo: str
    commit: str
    folder: str
    files: int
    size: int
    left: int
    free: int


def plan_fetch(models: str, python: str, repo: str, revision: str) -> FetchPlan:
    """Return the plan. ``python`` is the one that has vLLM. Raises what a fetch would."""
    made, folder = _ask_hub(models, python, repo, revision)
    size = sum(file.size for file in made.files.values())
    left = size - _count_bytes(folder, made)
    # Parts of an interrupted download are gone on with, or removed.
    free = require_room(folder, left, sum(map(_file_size, _find_parts(folder))))
    return FetchPlan(
        repo=made.repo,
        commit=made.commit,
        folder=str(folder),
        files=len(made.files),
        size=size,
        left=left,
        free=free,
    )


def fetch_model(models: str, python: str, repo: str, commit: str) -> Checking:
    """Fetch a commit, and check its folder in full; yield the progress in bytes."""
    made, folder = _ask_hub(models, python, repo, commit)
    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            (folder / RECORD).parent.mkdir(parents=True, exist_ok=True)
            with replacing(folder / RECORD) as file:
                file.write(json.dumps(asdict(made), indent=1).encode())
            for name, its in made.files.items():
                place = folder / name
                # hf would take a file of another size for what it has fetched.
                if place.is_symlink() or (
                    place.is_file() and place.stat().st_size != its.size
                ):
                    place.unlink()
            for part in _find_parts(folder):
                if _LOST.search(part.name):
                    part.unlink(missing_ok=True)
            yield from _run_hf_download(python, made, folder)
            for part in _find_parts(folder):
                part.unlink(missing_ok=True)
            return (yield from check_anew(str(folder)))


def check_anew(folder: str) -> Checking:
    """Check all hashes, as ``check_model`` does, and remove the files that have another one.

    hf and rsync would keep them: size and time are right.
    """
    check = yield from check_model(folder, full=True)
    for found in check.findings:
        if found.about == HASH:
            with translated(at=Path(folder)):
                Path(folder, found.where).unlink(missing_ok=True)
    return check


def _ask_hub(
    models: str, python: str, repo: str, revision: str
) -> tuple[ModelRecord, Path]:
    """Return the files of a commit that vLLM loads, and their folder.

    What the Hub refuses is said in hf's words. Raises SourceError for names that lead elsewhere,
    too.
    """
    program = Path(python).expanduser()
    answer = process.ask(program, _ASK, repo, revision, timeout=_PATIENCE, hint=_PYTHON)
    what = f"{repo}{revision and '@'}{revision}"
    if isinstance(answer, dict) and answer.get("kind") in _ERRORS:
        kind, hint = _ERRORS[answer["kind"]]
        said = " ".join(str(answer.get("says")).split())[:_SAID]
        raise kind(
            f"{what}: {said}", hint=hint.format(repo=repo, hf=program.with_name("hf"))
        )
    try:
        listing = record(HubListing, answer)
    except RecordError as error:
        raise HostError(
            f"{what}: an odd answer of the Hub: {error}", hint=_PYTHON
        ) from None
    try:
        files = {name: listing.files[name] for name in choose_files(listing.files)}
        made = record(
            ModelRecord, {"repo": repo, "commit": listing.commit, "files": files}
        )
    except RecordError as error:
        hint = f"tell its owner: https://huggingface.co/{repo}/discussions"
        raise SourceError(f"{repo}: {error}", hint=hint) from None
    return made, models_folder(models) / ModelFolder(repo=repo, commit=made.commit).name


def _run_hf_download(
    python: str, made: ModelRecord, folder: Path
) -> Iterator[tuple[int, int]]:
    """Fetch what is not there; yield the progress."""
    names = [
        name
        for name, file in made.files.items()
        if _file_size(folder / name) != file.size
    ]
    if not names:
        return
    total = sum(file.size for file in made.files.values())
    program = Path(python).expanduser().with_name("hf")
    # Not the user's cache: hf would take what it has unseen.
    own = {"HF_HUB_CACHE": str(folder / CACHE / "patchkit" / "hub")}
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    running = Follow(
        *(str(program), "download", made.repo, *names),
        *("--revision", made.commit, "--local-dir", str(folder)),
        env={"HF_XET_HIGH_PERFORMANCE": "1", **os.environ, **quiet, **own},
    )
    with running:
        for _line in running:
            size = _count_bytes(folder, made) + sum(
                map(_file_size, _find_parts(folder))
            )
            yield min(size, total), total
    done = running.done
    if not done.started:
        raise done.error(hint=_PYTHON)
    if done.trouble:
        lines = [line.strip() for line in done.output.split("\n")]
        said = [
            line for line in lines if line and "%|" not in line and "it/s" not in line
        ]
        raise StorageError(
            f"{made.repo}: hf download failed: {said[-1] if said else done.trouble}",
            hint="run the same command again: the files that are whole are kept",
        )


def _find_parts(folder: Path) -> list[Path]:
    """Return the parts of files that a download has begun, or that an interrupted one left."""
    return sorted((folder / CACHE / "huggingface" / "download").rglob("*.incomplete"))


def _count_bytes(folder: Path, made: ModelRecord) -> int:
    """Return the bytes of the files that are whole."""
    return sum(
        file.size
        for name, file in made.files.items()
        if _file_size(folder / name) == file.size
    )


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:
        return -1
