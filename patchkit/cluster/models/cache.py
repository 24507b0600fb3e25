"""Take a commit's files out of the user's own cache of the Hub, without what its links need.

A snapshot there is links to blobs, since huggingface_hub 2.4 through a second link into a store
that all repositories share: copying the folder of a repository copies links to nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Generator, Mapping
from pathlib import Path

from patchkit.cluster.models.choice import INDEXES
from patchkit.cluster.models.expected import Downloaded, ModelRecord, note_download
from patchkit.cluster.models.hashing import hash_files
from patchkit.cluster.models.listing import Listing
from patchkit.durable.atomic import replacing
from patchkit.durable.failure import translated
from patchkit.errors import SourceError

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOCK = 16 << 20  # bytes that are copied at once


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Return where huggingface_hub keeps its cache, for this user."""
    for name, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if environment.get(name):
            return Path(environment[name]).expanduser() / below
    home = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "huggingface" / "hub"


def snapshot(cache: Path, repo: str, commit: str) -> dict[str, Path]:
    """Return the files of a commit that are whole in the cache: name → the file itself."""
    root = _repository(cache, repo) / "snapshots" / commit
    found = {}
    for here, _folders, files in os.walk(root):
        for name in files:
            link = Path(here, name)
            with contextlib.suppress(OSError, RuntimeError):
                found[link.relative_to(root).as_posix()] = link.resolve(strict=True)
    return found


def cached_listing(cache: Path, repo: str, revision: str) -> Listing:
    """Return what the cache has of a commit, without network. Raises SourceError if it has none."""
    home = _repository(cache, repo)
    commit = revision
    with contextlib.suppress(OSError):
        commit = (home / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    held = snapshot(cache, repo, commit) if _COMMIT.fullmatch(commit) else {}
    if not held:
        raise SourceError(
            f"{repo}: the cache of the Hub holds no {revision or 'main'} of it",
            why=f"there is nothing in {home}",
            hint="leave --cached out",
        )
    files, root = {}, home / "snapshots" / commit
    for name, place in held.items():
        digest = _blob(root / name)
        files[name] = (place.stat().st_size, digest)
    texts = {name: held[name].read_text(encoding="utf-8") for name in INDEXES if name in held}
    return Listing(commit=commit, files=files, indexes=texts)


def take(
    held: Mapping[str, Path], made: ModelRecord, folder: Path
) -> Generator[dict[str, int], None, None]:
    """Link files of the cache into a model's folder, or copy them from another disk.

    Only those that are missing there and have the right hash. Yields how far the hashes are.
    """
    wanted = {held[name]: name for name in missing(held, made, folder)}
    if not wanted:
        return
    total = sum(made.files[name].size for name in wanted.values())
    reading = hash_files({path: made.files[name].digest for path, name in wanted.items()})
    while True:
        try:
            yield {"done": next(reading), "total": total}
        except StopIteration as end:
            actual: dict[Path, str] = end.value
            break
    for path, name in wanted.items():
        digest = made.files[name].digest
        if actual[path] == digest:
            with translated(at=folder / name):
                _put(path, folder / name)
                note_download(
                    folder, name, Downloaded(commit=made.commit, digest=digest), time.time()
                )


def missing(held: Mapping[str, Path], made: ModelRecord, folder: Path) -> list[str]:
    """Return the files that a folder lacks and the cache has, by their sizes."""
    return [
        name
        for name, file in made.files.items()
        if name in held and _size(folder / name) != file.size and _size(held[name]) == file.size
    ]


def same_disk(cache: Path, folder: Path) -> bool:
    """Return whether files of one folder may be linked into another, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return cache.exists() and cache.stat().st_dev == folder.stat().st_dev


def _put(path: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    try:
        place.hardlink_to(path)
    except OSError:  # another disk, or another user's file
        with path.open("rb") as source, replacing(place) as file:
            shutil.copyfileobj(source, file, _BLOCK)


def _repository(cache: Path, repo: str) -> Path:
    return cache / f"models--{repo.replace('/', '--')}"


def _blob(link: Path) -> str | None:
    """Return the digest that a link of a snapshot names: blobs are called by it."""
    with contextlib.suppress(OSError):
        name = link.readlink().name
        return name if _DIGEST.fullmatch(name) else None
    return None


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1
