"""Fetch those files of a model's commit that vLLM loads, with `hf download`.

huggingface_hub and hf are those of vLLM's environment; they find the user's token themselves.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from patchkit import process
from patchkit.cluster.models.model_files import (
    CACHE,
    HASH,
    Checking,
    ModelFolder,
    ModelRecord,
    check_model,
    choose_files,
    file_size,
    require_room,
    write_record,
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
from patchkit.reading import user_path
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
_PROGRESS = r"%\||it/s"  # of hf, in a line
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
# Partial files that hf never continues: newer releases begin each file again under a new name.
_LOST = re.compile(r"\.[0-9a-f]{40,64}\.[0-9a-f]{8}\.incomplete$")


@frozen
class FetchPlan:
    """The number of ``files`` to have, and bytes: their ``size``, ``left`` to fetch, ``free``."""

    repo: str
    commit: str
    folder: str
    files: int
    size: int
    left: int
    free: int


def plan_fetch(models: str, python: str, repo: str, revision: str) -> FetchPlan:
    """Ask the Hub, and return the plan of a fetch. ``python`` is a path of the Python with vLLM.

    Raises HostError without huggingface_hub, SourceError if the Hub refuses or has no files that
    vLLM loads, StorageError if the Hub is silent or the disk has too little room.
    """
    chosen, folder = _ask_hub(models, python, repo, revision)

    size = sum(file.size for file in chosen.files.values())
    left = size - _count_bytes(folder, chosen)

    # Partial files of an interrupted download count as free: they are continued, or removed.
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
    """Fetch a commit, then return the full check of its folder; yield the progress in bytes.

    Raises what ``plan_fetch`` raises, and StorageError if `hf download` fails.
    """
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
    """Remove links, files of a wrong size, and partial files that hf does not continue.

    hf might take the first two for files that it has fetched.
    """
    for name, file in chosen.files.items():
        place = folder / name
        has_other_size = place.is_file() and place.stat().st_size != file.size
        if place.is_symlink() or has_other_size:
            place.unlink()
    for part in _find_parts(folder):
        if _LOST.search(part.name):
            part.unlink(missing_ok=True)


def check_anew(folder: str) -> Checking:
    """Check all hashes, as ``check_model`` does, and remove each file whose hash is wrong.

    hf and rsync would keep such a file, since its size and time are right.
    """
    check = yield from check_model(folder)
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
    """Return the files of a commit that vLLM loads, and the folder for them.

    Raises HostError without huggingface_hub, StorageError if the Hub is silent, and SourceError if
    it refuses, has no weights that vLLM loads, or names a file outside the folder. Errors quote
    what the Hub says.
    """
    interpreter = user_path(python)
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
    return chosen, user_path(models) / folder.name


def _run_hf_download(
    python: str,
    chosen: ModelRecord,
    folder: Path,
) -> Iterator[tuple[int, int]]:
    """Fetch the missing files; yield the bytes that are there, and those of all files."""
    names = [
        name
        for name, file in chosen.files.items()
        if file_size(folder / name) != file.size
    ]
    if not names:
        return

    total = sum(file.size for file in chosen.files.values())
    words = [
        str(user_path(python).with_name("hf")),
        "download",
        chosen.repo,
        *names,
        "--revision",
        chosen.commit,
        "--local-dir",
        str(folder),
    ]

    environment = {
        "HF_XET_HIGH_PERFORMANCE": "1",
        **os.environ,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        # A cache of its own: from the user's cache, hf would take files without a check.
        "HF_HUB_CACHE": str(folder / CACHE / "patchkit/hub"),
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

    raise StorageError(
        f"{repo}: hf download failed: {done.last_line(_PROGRESS)}",
        hint="run the same command again: the files that are whole are kept",
    )


def _find_parts(folder: Path) -> list[Path]:
    """Return the partial files of a running or interrupted download."""
    return sorted((folder / CACHE / "huggingface/download").rglob("*.incomplete"))


def _parts_size(folder: Path) -> int:
    return sum(file_size(part) for part in _find_parts(folder))


def _count_bytes(folder: Path, chosen: ModelRecord) -> int:
    """Return the bytes of those chosen files that have their full size already."""
    return sum(
        file.size
        for name, file in chosen.files.items()
        if file_size(folder / name) == file.size
    )
