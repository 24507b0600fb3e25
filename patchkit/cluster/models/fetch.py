"""Fetch a commit of a model into its folder: `hf download` of what vLLM loads, and no more.

The Hub is asked through huggingface_hub and hf of vLLM's environment, which also find the token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from patchkit import process
from patchkit.cluster.models.hashing import HASH
from patchkit.cluster.models.model_check import Checking, check_model
from patchkit.cluster.models.model_files import (
    CACHE,
    ModelRecord,
    choose_files,
    file_size,
    write_record,
)
from patchkit.cluster.models.model_folder import (
    ModelFolder,
    models_folder,
    require_room,
)
from patchkit.durable.lock import locked
from patchkit.errors import (
    HostError,
    PatchkitError,
    SourceError,
    StorageError,
    translated,
)
from patchkit.follow import Completed, Follow
from patchkit.frozen import frozen
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
    answer = {"repo": repo, "commit": info.sha, "files": files}
except ImportError:
    pass
except Exception as error:
    answer["says"] = str(error) or type(error).__name__
    if getattr(error, "response", None) is not None:
        answer["kind"] = "refused"
"""
_PATIENCE = 60.0  # seconds
_MOST_WORDS = 400  # characters of the Hub's answer
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


@frozen
class FetchPlan:
    """Sizes of a fetch in bytes: all chosen files, what is left of them, and the free room."""

    repo: str
    commit: str
    folder: str
    files: int
    size: int
    left: int
    free: int


def plan_fetch(models: str, python: str, repo: str, revision: str) -> FetchPlan:
    """Return the plan. ``python`` is the one that has vLLM. Raises the errors of a fetch."""
    chosen, folder = _ask_hub(models, python, repo, revision)

    size = sum(file.size for file in chosen.files.values())
    left = size - _count_bytes(folder, chosen)

    # Parts of an interrupted download are gone on with, or removed.
    free = require_room(folder, left, _parts_size(folder))
    return FetchPlan(
        repo=chosen.repo,
        commit=chosen.commit,
        folder=str(folder),
        files=len(chosen.files),
        size=size,
        left=left,
        free=free,
    )


def fetch_model(models: str, python: str, repo: str, commit: str) -> Checking:
    """Fetch a commit, and check its folder in full; yield the progress in bytes."""
    chosen, folder = _ask_hub(models, python, repo, commit)
    with translated(at=folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            write_record(folder, chosen)
            _clear_folder(folder, chosen)
            yield from _run_hf_download(python, chosen, folder)
            for part in _find_parts(folder):
                part.unlink(missing_ok=True)

            return (yield from check_anew(str(folder)))


def _clear_folder(folder: Path, chosen: ModelRecord) -> None:
    """Remove files that hf would take for fetched ones, and parts that it does not continue."""
    for name, file in chosen.files.items():
        place = folder / name
        has_other_size = place.is_file() and place.stat().st_size != file.size
        if place.is_symlink() or has_other_size:
            place.unlink()
    for part in _find_parts(folder):
        if _LOST.search(part.name):
            part.unlink(missing_ok=True)


def check_anew(folder: str) -> Checking:
    """Check all hashes, as ``check_model`` does, and remove the files that have another one.

    hf and rsync would keep them: size and time are right.
    """
    check = yield from check_model(folder, full=True)
    for finding in check.findings:
        if finding.about == HASH:
            with translated(at=Path(folder)):
                Path(folder, finding.where).unlink(missing_ok=True)
    return check


def _ask_hub(
    models: str,
    python: str,
    repo: str,
    revision: str,
) -> tuple[ModelRecord, Path]:
    """Return the files of a commit that vLLM loads, and their folder.

    Errors quote the words of the Hub. Raises SourceError also for names that lead elsewhere.
    """
    interpreter = Path(python).expanduser()
    answer = process.ask(
        interpreter, _ASK, repo, revision, timeout=_PATIENCE, hint=_PYTHON
    )

    if isinstance(answer, dict) and answer.get("kind") in _ERRORS:
        kind, hint = _ERRORS[answer["kind"]]
        spec = f"{repo}@{revision}" if revision else repo
        words = " ".join(str(answer.get("says")).split())[:_MOST_WORDS]
        hint = hint.format(repo=repo, hf=interpreter.with_name("hf"))
        raise kind(f"{spec}: {words}", hint=hint)

    try:
        listing = record(ModelRecord, answer)
        names = choose_files(listing.files)
    except RecordError as error:
        hint = f"tell its owner: https://huggingface.co/{repo}/discussions"
        raise SourceError(f"{repo}: {error}", hint=hint) from None

    chosen = replace(listing, files={name: listing.files[name] for name in names})
    folder = ModelFolder(repo=repo, commit=chosen.commit)
    return chosen, models_folder(models) / folder.name


def _run_hf_download(
    python: str,
    chosen: ModelRecord,
    folder: Path,
) -> Iterator[tuple[int, int]]:
    """Fetch the missing files; yield the progress."""
    names = [
        name
        for name, file in chosen.files.items()
        if file_size(folder / name) != file.size
    ]
    if not names:
        return

    total = sum(file.size for file in chosen.files.values())
    words = [str(Path(python).expanduser().with_name("hf")), "download", chosen.repo]
    words += names
    words += ["--revision", chosen.commit, "--local-dir", str(folder)]

    environment = {
        "HF_XET_HIGH_PERFORMANCE": "1",
        **os.environ,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        # Not the user's cache: hf would take files of it without a check.
        "HF_HUB_CACHE": str(folder / CACHE / "patchkit" / "hub"),
    }

    with Follow(*words, env=environment) as running:
        for _line in running:
            size = _count_bytes(folder, chosen) + _parts_size(folder)
            yield min(size, total), total

    _require_downloaded(chosen.repo, running.done)


def _require_downloaded(repo: str, done: Completed) -> None:
    """Raise HostError if hf did not start, StorageError with its last words if it failed."""
    if not done.started:
        raise done.error(hint=_PYTHON)
    if not done.trouble:
        return

    words = done.trouble
    for line in done.output.split("\n"):
        is_progress = "%|" in line or "it/s" in line
        if line.strip() and not is_progress:
            words = line.strip()

    raise StorageError(
        f"{repo}: hf download failed: {words}",
        hint="run the same command again: the files that are whole are kept",
    )


def _find_parts(folder: Path) -> list[Path]:
    """Return the parts of files that a download has begun, or that an interrupted one left."""
    return sorted((folder / CACHE / "huggingface" / "download").rglob("*.incomplete"))


def _parts_size(folder: Path) -> int:
    return sum(file_size(part) for part in _find_parts(folder))


def _count_bytes(folder: Path, chosen: ModelRecord) -> int:
    """Return the bytes of the files that are whole."""
    return sum(
        file.size
        for name, file in chosen.files.items()
        if file_size(folder / name) == file.size
    )
