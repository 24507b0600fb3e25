"""Check whether a model's folder is complete and right, without network.

The quick form looks at sizes, at what the index names, and at links; the full one hashes every
file. What has to be there, ``expected`` says.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.models.choice import CONFIGS, is_weight, read_safetensors_size, read_shards
from patchkit.cluster.models.expected import (
    CACHE,
    Downloaded,
    ModelRecord,
    downloads,
    read_record,
    unfinished,
)
from patchkit.cluster.models.names import folder_of, models_folder
from patchkit.cluster.ssh.rsync import Copied
from patchkit.errors import HashMismatchError, SourceError, UsageError
from patchkit.finding import Finding, Level
from patchkit.records import RecordError

HASH = "hash"
"""Name what findings are ``about`` where a file has other bytes than those of the Hub."""

_SIDE_BY_SIDE = 8  # files; more wait for the disk
_SHA1 = 40  # hex digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """The result of a check: what the folder holds, and what is wrong with it.

    ``sent`` is what was copied into it before.
    """

    folder: str
    repo: str = ""
    commit: str = ""
    files: int = 0
    size: int = 0
    full: bool
    findings: tuple[Finding, ...]
    sent: Copied | None = None

    @property
    def complete(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.exit_code

    @property
    def exit_code(self) -> int:
        """Return the exit code of the worst finding."""
        errors = [found for found in self.findings if found.level is Level.ERROR]
        if any(found.about == HASH for found in errors):
            return HashMismatchError.exit_code
        return SourceError.exit_code if errors else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel:
    """A model that lies on a node."""

    folder: str
    repo: str
    commit: str
    size: int
    complete: bool
    ours: bool  # it has patchkit's record


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelFiles:
    """A folder, read: its files with their sizes, and what is known of what it should hold.

    ``commit`` is that of all files, or how it begins; "" if it is unknown.
    """

    folder: Path
    repo: str
    commit: str
    record: ModelRecord | None
    downloaded: Mapping[str, Downloaded]
    digests: Mapping[str, str]  # "" where hf wrote none down
    sizes: Mapping[str, int]  # of each file, behind links as well
    dangling: tuple[str, ...]


def check_model(folder: str, full: bool = False) -> Iterator[dict[str, Any]]:
    """Yield ``{"done": BYTES, "total": BYTES}`` while it hashes, at last ``{"result": CHECK}``.

    Raises UsageError if there is no such folder.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise UsageError(f"{place}: no such folder", hint="`patchkit model list` names the models")
    try:
        model = _read_files(place)
    except RecordError as error:
        where, why = ".cache/patchkit/model.json", "nobody knows what has to be here"
        found = [Finding(where=where, what=str(error), why=why)]
        check = ModelCheck(folder=str(place), full=full, findings=())
    else:
        cut_off = list(_check_sizes(model))
        found = [*_check_structure(model), *cut_off, *_check_commits(model)]
        if full:
            found += yield from _check_hashes(model, {wrong.where for wrong in cut_off})
        elif not model.digests:
            found.append(Finding(level=Level.UNKNOWN, what="no hash of any file was written down"))
        check = ModelCheck(
            folder=str(place),
            repo=model.repo,
            commit=model.commit,
            files=len(model.sizes),
            size=sum(model.sizes.values()),
            full=full,
            findings=(),
        )
    yield {"result": {**asdict(check), "findings": [one.fields() for one in found]}}


def is_complete(folder: Path) -> bool:
    """Return what the quick check says."""
    *_, last = check_model(str(folder))
    return all(found["level"] != Level.ERROR for found in last["result"]["findings"])


def held_models(models: str) -> list[dict[str, Any]]:
    """Return the models of a folder, with what the quick check says."""
    root, found = models_folder(models), []
    for place in sorted(root.iterdir()) if root.is_dir() else ():
        name = folder_of(place.name)
        if not name or not place.is_dir():
            continue
        try:
            made = read_record(place)
            commit, ours = made.commit if made else "", made is not None
        except RecordError:  # damaged, but written by patchkit
            commit, ours = "", True
        model = HeldModel(
            folder=str(place),
            repo=name.repo,
            commit=commit or name.commit,
            size=sum(file.lstat().st_size for file in place.rglob("*") if not file.is_dir()),
            complete=is_complete(place),
            ours=ours,
        )
        found.append(asdict(model))
    return found


def _read_files(folder: Path) -> _ModelFiles:
    sizes, dangling = {}, []
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if name.parts[0] in (CACHE, ".git"):
            continue
        if path.is_file():
            sizes[name.as_posix()] = path.stat().st_size
        elif not path.is_dir():
            dangling.append(name.as_posix())
    made, downloaded = read_record(folder), dict(downloads(folder))
    known = made or folder_of(folder.name)
    return _ModelFiles(
        folder=folder,
        repo=known.repo if known else "",
        commit=known.commit if known else "",
        record=made,
        downloaded=downloaded,
        digests={name: file.digest for name, file in downloaded.items()}
        | {name: file.digest for name, file in (made.files if made else {}).items()},
        sizes=sizes,
        dangling=tuple(sorted(dangling)),
    )


def _check_structure(model: _ModelFiles) -> Iterator[Finding]:
    for name in model.dangling:
        why = "the folder of a cache was copied without what it links to"
        yield Finding(where=name, what="is a link to nothing, or no file", why=why)
    if not any(name in model.sizes for name in CONFIGS):
        why = "vLLM cannot tell what model this is"
        yield Finding(where=CONFIGS[0], what="is missing", why=why)
    if not any(map(is_weight, model.sizes)):
        yield Finding(what="there are no weights", why="vLLM would have nothing to load")
    try:
        shards = read_shards(model.folder, model.sizes)
    except RecordError as error:
        index, _, what = error.what.partition(": ")
        yield Finding(where=index, what=what)
        shards = {}
    expected = model.record.files if model.record else model.downloaded
    for name in sorted({*expected, *shards} - model.sizes.keys() - {*model.dangling}):
        fetched = "it was chosen when the model was fetched"
        why = f"{shards[name]} names it" if name in shards else fetched
        yield Finding(where=name, what="is missing", why=why)
    # An unfinished part beside a whole file is a leftover of another try.
    level = Level.NOTE if model.record else Level.ERROR
    for part in unfinished(model.folder):
        where = part.relative_to(model.folder).as_posix()
        yield Finding(level=level, where=where, what="a download was not finished")


def _check_sizes(model: _ModelFiles) -> Iterator[Finding]:
    for name, size in sorted(model.sizes.items()):
        right: int | None = size
        if model.record and name in model.record.files:
            right = model.record.files[name].size
        elif name.endswith(".safetensors"):
            right = read_safetensors_size(model.folder / name)
        if right is None:
            why = "a pointer of git-lfs, or cut off"
            yield Finding(where=name, what="is no safetensors file", why=why)
        elif size != right:
            what = f"has {size:,} bytes, not {right:,}"
            yield Finding(where=name, what=what, why="it was cut off")


def _check_commits(model: _ModelFiles) -> Iterator[Finding]:
    """Yield what hf wrote down otherwise than the record or the folder's name say."""
    for name, written in model.downloaded.items():
        if name in model.sizes and not written.commit.startswith(model.commit):
            what = f"is of commit {written.commit[:12]}, not {model.commit[:12]}"
            yield Finding(where=name, what=what, why="two commits were fetched into one folder")
        elif written.digest not in ("", model.digests.get(name, written.digest)):
            yield Finding(where=name, what="hf fetched another file than the record names")


def _check_hashes(
    model: _ModelFiles, wrong: set[str]
) -> Generator[dict[str, Any], None, list[Finding]]:
    """Hash the files that are not known to be wrong, and report after each."""
    names = [name for name in model.sizes if name not in wrong]
    right = {name: model.digests[name] for name in names if model.digests.get(name)}
    done, total = 0, sum(model.sizes[name] for name in right)
    found = []
    pool = ThreadPoolExecutor(min(_SIDE_BY_SIDE, os.cpu_count() or 1))
    try:
        running = {
            pool.submit(_hash_file, model.folder / name, digest): name
            for name, digest in right.items()
        }
        for future in as_completed(running):
            name, is_now = running[future], future.result()
            done += model.sizes[name]
            yield {"done": done, "total": total}
            if is_now != right[name]:
                what = f"has the hash {is_now[:16]}…, not {right[name][:16]}…"
                if " " in is_now:
                    what = is_now
                why = "its bytes are not those of the Hub"
                found.append(Finding(about=HASH, where=name, what=what, why=why))
    finally:
        pool.shutdown(cancel_futures=True)
    unknown = "no hash of it was written down"
    return found + [
        Finding(level=Level.UNKNOWN, where=name, what=unknown)
        for name in names
        if name not in right and is_weight(name)
    ]


def _hash_file(path: Path, like: str) -> str:
    """Return a sha256, or git's sha1 of a blob if ``like`` is one; or why it cannot be read."""
    try:
        with path.open("rb") as file:
            if len(like) != _SHA1:
                return hashlib.file_digest(file, "sha256").hexdigest()
            head = f"blob {os.fstat(file.fileno()).st_size}\0".encode()
            begun = hashlib.sha1(head, usedforsecurity=False)
            return hashlib.file_digest(file, lambda: begun).hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
