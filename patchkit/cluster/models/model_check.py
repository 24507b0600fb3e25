"""Choose the files of a model that vLLM loads, and check whether all of them are there and right.

What has to be there says the record that a fetch writes. The quick form looks at sizes, at what the
index names, and at links; the full one hashes every file as well. No network is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from patchkit.cluster.models.names import Commit, Digest, FileName, folder_of, models_folder
from patchkit.cluster.ssh.rsync import Copied
from patchkit.durable.names import is_file
from patchkit.errors import HashMismatchError, PatchkitError, SourceError, UsageError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.reading import LARGEST_IN_TREE, read_text
from patchkit.records import RecordError, read_json, record

INDEXES = (
    "model.safetensors.index.json",
    "consolidated.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
"""Files that name the shards of a model, the first one of which vLLM loads."""

CONFIGS = ("config.json", "params.json", "adapter_config.json")
"""Without any of them nothing can be loaded."""

HASH = "hash"
"""Name what findings are ``about`` where a file has other bytes than those of the Hub."""

CACHE = ".cache"
"""The folder beside the files in which hf and patchkit keep what they know of them."""

RECORD = f"{CACHE}/patchkit/model.json"
"""What a fetch writes before the first file: an unfinished folder is known as one."""

_SIDE_BY_SIDE = 8  # files; more wait for the disk
_SHA1 = 40  # hex digits
# The same weights in forms that vLLM does not load, or for another program.
_ELSEWHERE = {"original", "metal", "onnx", "openvino", "coreml", "gguf", "flax", "runs"}
_TEXTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.spm", "*.yaml")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")
# In this order: the first kind that is there is loaded, in the main folder alone.
_KINDS = ("*.safetensors", "consolidated*.safetensors", "*.bin", "*.pt")
_OF_TRAINING = {
    *("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
}


def choose_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the files to fetch, sorted. Raises SourceError without weights, RecordError."""
    record(tuple[FileName, ...], list(names))  # one that leads elsewhere tells of the others
    for kind in _KINDS:
        weights = [name for name in names if _is_kind(name, kind)]
        if weights:
            break
    else:
        suffixes = {PurePosixPath(name).suffix for name in names if _matches(name, _WEIGHTS)}
        raise SourceError(
            "the repository has no weights that vLLM loads from a folder",
            why=f"it holds {', '.join(sorted(suffixes)) or 'no weights at all'}",
            hint="name the repository of the safetensors",
        )
    texts = {
        name
        for name in names
        if _matches(name.rpartition("/")[2], _TEXTS)
        and not _ELSEWHERE.intersection(name.split("/")[:-1])
        and not any(part.startswith(".") for part in name.split("/"))
    }
    others = {name for name in INDEXES if not _is_kind(name.removesuffix(".index.json"), kind)}
    return tuple(sorted({*weights, *texts} - others))


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_kind(name: str, kind: str) -> bool:
    if "/" in name or name in _OF_TRAINING or not fnmatchcase(name, kind):
        return False
    # Beside the others, consolidated ones are the same weights once more.
    return kind.startswith("consolidated") or not name.startswith("consolidated")


def read_shards(folder: Path, names: Collection[str]) -> list[str]:
    """Return the shards that the first index of a folder names.

    Raises RecordError, beginning with the index's name, for what is no index.
    """
    index = next((name for name in INDEXES if name in names), "")
    if not index:
        return []
    try:
        text = read_text(folder / index, limit=LARGEST_IN_TREE)
        shards = record(dict[str, FileName], json.loads(text)["weight_map"])
    except PatchkitError as error:
        raise RecordError(f"{index}: {error.what}") from None
    except RecordError as error:
        raise RecordError(f"{index}: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RecordError(f"{index}: is no index of shards") from None
    return sorted({*shards.values()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A file of a commit: its size in bytes, and its sha256, or git's sha1 of a small one."""

    size: int
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """A commit of a model, and the files of it that were chosen."""

    repo: str
    commit: Commit
    files: Mapping[FileName, ModelFile]


def read_record(folder: Path) -> ModelRecord | None:
    """Return patchkit's record of a folder, None if there is none. Raises RecordError."""
    place = folder / RECORD
    if not is_file(place):
        return None
    try:
        return read_json(ModelRecord, read_text(place, limit=LARGEST_IN_TREE, follow=False))
    except PatchkitError as error:
        raise RecordError(error.what) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """The result of a check: what the folder holds, and what is wrong with it.

    ``commit`` is how it begins where the folder's name alone tells. ``sent`` is what was copied
    into it before.
    """

    folder: str
    repo: str = ""
    commit: str = ""
    files: int = 0
    size: int = 0
    full: bool = False
    findings: tuple[Finding, ...]
    sent: Copied | None = None

    @property
    def exit_code(self) -> int:
        """Return the exit code of the worst finding, 0 for a whole model."""
        errors = [found for found in self.findings if found.level is Level.ERROR]
        if any(found.about == HASH for found in errors):
            return HashMismatchError.exit_code
        return SourceError.exit_code if errors else 0


Checking = Generator[tuple[int, int], None, ModelCheck]
"""Yields the progress in bytes, and how many there are."""


def check_model(folder: str, full: bool = False) -> Checking:
    """Check a folder; yield how many bytes are hashed, and of how many.

    Raises UsageError if there is no such folder.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise UsageError(f"{place}: no such folder", hint="`patchkit model list` names the models")
    check = quick_check(place)
    if full:
        found, wrong = [], {finding.where for finding in check.findings}
        made = None if RECORD in wrong else read_record(place)
        files = {name: it for name, it in (made.files if made else {}).items() if name not in wrong}
        done, total = 0, sum(file.size for file in files.values())
        with ThreadPoolExecutor(min(_SIDE_BY_SIDE, os.cpu_count() or 1)) as pool:
            hashes = pool.map(lambda name: _hash_file(place / name, files[name].digest), files)
            for (name, file), is_now in zip(files.items(), hashes, strict=True):
                done += file.size
                yield done, total
                if is_now != file.digest:
                    other = f"has the hash {is_now[:16]}…, not {file.digest[:16]}…"
                    what = is_now if " " in is_now else other
                    why = "its bytes are not those of the Hub"
                    found.append(Finding(about=HASH, where=name, what=what, why=why))
        check = replace(check, full=True, findings=(*check.findings, *found))
    return check


def held_models(models: str) -> list[ModelCheck]:
    """Return the quick check of each model in a folder."""
    root = models_folder(models)
    places = sorted(root.iterdir()) if root.is_dir() else []
    return [quick_check(place) for place in places if folder_of(place.name) and place.is_dir()]


def quick_check(folder: Path) -> ModelCheck:
    """Return what is seen without hashing."""
    sizes: dict[str, int] = {}
    findings = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] in (CACHE, ".git"):
            continue
        if path.is_file():
            sizes[name.as_posix()] = path.stat().st_size
        elif not path.is_dir():
            why = "the folder of a cache was copied without what it links to"
            what = "is a link to nothing, or no file"
            findings.append(Finding(where=name.as_posix(), what=what, why=why))
    made, known = None, folder_of(folder.name)
    try:
        made = read_record(folder)
    except RecordError as error:
        why = "nobody knows what has to be here"
        findings.append(Finding(where=RECORD, what=str(error), why=why))
    findings += _check_files(folder, made, sizes, {found.where for found in findings})
    return ModelCheck(
        folder=str(folder),
        repo=known.repo if known else "",
        commit=made.commit if made else known.commit if known else "",
        files=len(sizes),
        size=sum(sizes.values()),
        findings=tuple(findings),
    )


def _check_files(
    folder: Path, made: ModelRecord | None, sizes: Mapping[str, int], wrong: Collection[str]
) -> Iterator[Finding]:
    """Yield what is not there, what was cut off, and what nobody can say of it."""
    if not any(name in sizes for name in CONFIGS):
        why = "vLLM cannot tell what model this is"
        yield Finding(where=CONFIGS[0], what="is missing", why=why)
    # vLLM loads those of the main folder.
    weights = [name for name in sizes if "/" not in name and _matches(name, _WEIGHTS)]
    if not weights:
        yield Finding(what="there are no weights", why="vLLM would have nothing to load")
    named: dict[str, str] = {}
    try:
        named = dict.fromkeys(read_shards(folder, sizes), "the index of the weights names it")
    except RecordError as error:
        index, _, what = error.what.partition(": ")
        yield Finding(where=index, what=what)
    fetched = dict.fromkeys(made.files if made else (), "it was chosen when the model was fetched")
    for name, why in sorted({**fetched, **named}.items()):
        if name not in sizes and name not in wrong:
            yield Finding(where=name, what="is missing", why=why)
    unsure = [name for name in weights if made and name not in made.files]
    for where in unsure if made else [""]:
        what = "was not fetched by patchkit: no hash is known"
        hint = quoted("hf", "cache", "verify", "REPO", "--local-dir", folder)
        yield Finding(level=Level.UNKNOWN, where=where, what=what, hint=hint)
    for name, file in (made.files if made else {}).items():
        if (size := sizes.get(name, file.size)) != file.size:
            what = f"has {size:,} bytes, not {file.size:,}"
            yield Finding(where=name, what=what, why="it was cut off")


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
