"""Choose the files of a model that vLLM loads, and check whether all of them are there and right.

What has to be there says the record that a fetch writes. The quick form looks at sizes, at what the
index names, at links, and without a record at the headers of safetensors; the full one hashes every
file as well. No network is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from patchkit.cluster.models.names import (
    Commit,
    Digest,
    FileName,
    folder_of,
    models_folder,
)
from patchkit.cluster.ssh.rsync import Copied
from patchkit.durable.paths import is_file
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
_BLOCK = 1 << 20
_LENGTH_BYTES = 8  # of the length of a header of safetensors, which come first
_LONGEST_HEADER = 100_000_000  # bytes: the limit of safetensors itself
_MOST_SHARDS = 1000  # that are named
_ONE_OF_SOME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.\w+)")
# The same weights in forms that vLLM does not load, or for another program.
_ELSEWHERE = {"original", "metal", "onnx", "openvino", "coreml", "gguf", "flax", "runs"}
_TEXTS = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.py",
    "*.tiktoken",
    "*.spm",
    "*.yaml",
)
_WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.onnx",
    "*.h5",
    "*.msgpack",
)
# In this order: the first kind that is there is loaded, in the main folder alone.
_KINDS = ("*.safetensors", "consolidated*.safetensors", "*.bin", "*.pt")
_OF_TRAINING = {
    *(
        "training_args.bin",
        "optimizer.bin",
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
    ),
}


def choose_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the files to fetch, sorted. Raises SourceError without weights, RecordError."""
    record(
        tuple[FileName, ...], list(names)
    )  # one that leads elsewhere tells of the others
    for kind in _KINDS:
        weights = [name for name in names if _is_kind(name, kind)]
        if weights:
            break
    else:
        suffixes = {
            PurePosixPath(name).suffix for name in names if _matches(name, _WEIGHTS)
        }
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
    others = {
        name for name in INDEXES if not _is_kind(name.removesuffix(".index.json"), kind)
    }
    return tuple(sorted({*weights, *texts} - others))


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_loaded(name: str) -> bool:
    """Return whether vLLM may load a file of a model's folder, by its name."""
    return _matches(name.rpartition("/")[2], (*_TEXTS, *_WEIGHTS))


def is_safetensors(name: str) -> bool:
    """Return whether a file is one of the weights that vLLM loads from the main folder."""
    return "/" not in name and name.endswith(".safetensors")


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
        return read_json(
            ModelRecord, read_text(place, limit=LARGEST_IN_TREE, follow=False)
        )
    except PatchkitError as error:
        raise RecordError(error.what) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """The result of a check: what the folder holds, and what is wrong with it.

    ``commit`` is how it begins where the folder's name alone tells. ``recorded`` says whether the
    folder has a record of what it has to hold. ``sent`` is what was copied into it before.
    """

    folder: str
    repo: str = ""
    commit: str = ""
    files: int = 0
    size: int = 0
    recorded: bool = False
    full: bool = False
    findings: tuple[Finding, ...]
    sent: Copied | None = None

    @property
    def exit_code(self) -> int:
        """Return the exit code of the worst finding, 0 for a whole model."""
        if any(finding.about == HASH for finding in self.errors):
            return HashMismatchError.exit_code
        return SourceError.exit_code if self.errors else 0

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(
            finding for finding in self.findings if finding.level is Level.ERROR
        )

    @property
    def complete(self) -> bool:
        """Return whether all that its record names is there; without a record nobody knows."""
        return self.recorded and not self.exit_code


Checking = Generator[tuple[int, int], None, ModelCheck]
"""Yields the progress in bytes, and how many there are."""


def check_model(folder: str, full: bool = False) -> Checking:
    """Check a folder; yield how many bytes are hashed, and of how many.

    Raises UsageError if there is no such folder.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise UsageError(
            f"{place}: no such folder", hint="`patchkit model list` names the models"
        )
    check = quick_check(place)
    if not full:
        return check

    wrong = {finding.where for finding in check.findings}
    model_record = None if RECORD in wrong else read_record(place)
    recorded = model_record.files if model_record else {}
    unseen = {name: file for name, file in recorded.items() if name not in wrong}
    found = yield from hash_findings(place, unseen)
    return replace(check, full=True, findings=(*check.findings, *found))


def compare_records(
    results: Sequence[ModelCheck | PatchkitError],
) -> list[ModelCheck | PatchkitError]:
    """Return what nodes say of a model; a node without the record that another has lacks it."""
    checks = [result for result in results if isinstance(result, ModelCheck)]
    if not any(check.recorded for check in checks):
        return [*results]

    lost = Finding(
        where=RECORD,
        what="is missing, so the files cannot be checked",
        why="`model sync` writes it last: the copy was cut short, or somebody made it by hand",
    )
    return [
        replace(result, findings=(*result.findings, lost))
        if isinstance(result, ModelCheck) and not result.recorded
        else result
        for result in results
    ]


def hash_findings(
    place: Path, files: Mapping[str, ModelFile]
) -> Generator[tuple[int, int], None, list[Finding]]:
    """Return a finding for each file with other bytes, or unreadable ones; yield the progress."""
    hashes = yield from hash_files(place, files)
    findings = [
        unreadable_finding(name, said) for name, said in hashes.troubles.items()
    ]
    for name, digest in hashes.digests.items():
        right = files[name].digest
        if digest != right:
            what = f"has the hash {digest[:16]}…, not {right[:16]}…"
            why = "its bytes are not those of the Hub"
            findings.append(Finding(about=HASH, where=name, what=what, why=why))
    return findings


def unreadable_finding(name: str, said: str) -> Finding:
    """Return the finding of a file that the system could not read, and ``said`` why."""
    why = "whether its bytes are right is not known"
    return Finding(where=name, what=f"cannot be read: {said}", why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHashes:
    """The digests of files by their names, and of those that cannot be read the reason."""

    digests: Mapping[str, str]
    troubles: Mapping[str, str]


def hash_files(
    place: Path, files: Mapping[str, ModelFile]
) -> Generator[tuple[int, int], None, FileHashes]:
    """Hash files side by side, each as its digest is made; yield the progress in bytes.

    Who closes it in the middle waits for no file.
    """
    done = 0
    total = sum(file.size for file in files.values())
    digests: dict[str, str] = {}
    troubles: dict[str, str] = {}
    over = threading.Event()
    pool = ThreadPoolExecutor(min(_SIDE_BY_SIDE, os.cpu_count() or 1))
    try:
        hashes = {
            name: pool.submit(_hash_file, place / name, file.digest, over)
            for name, file in files.items()
        }
        for name, file in files.items():
            try:
                digests[name] = hashes[name].result()
            except OSError as error:
                troubles[name] = error.strerror or str(error)
            done += file.size
            yield done, total
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)
    return FileHashes(digests=digests, troubles=troubles)


def held_models(models: str) -> list[ModelCheck]:
    """Return the quick check of each model in a folder."""
    root = models_folder(models)
    places = sorted(root.iterdir()) if root.is_dir() else []
    return [
        quick_check(place)
        for place in places
        if folder_of(place.name) and place.is_dir()
    ]


def quick_check(folder: Path) -> ModelCheck:
    """Return what is seen without hashing."""
    sizes, broken = list_files(folder)
    findings = [
        Finding(
            where=name,
            what="is a link to nothing, or no file",
            why="the folder of a cache was copied without what it links to",
        )
        for name in broken
    ]
    model_record, known = None, folder_of(folder.name)
    try:
        model_record = read_record(folder)
    except RecordError as error:
        why = "without it the files cannot be checked"
        findings.append(Finding(where=RECORD, what=str(error), why=why))
    findings += _check_files(
        folder, model_record, sizes, {found.where for found in findings}
    )
    return ModelCheck(
        folder=str(folder),
        repo=known.repo if known else "",
        commit=model_record.commit if model_record else known.commit if known else "",
        files=len(sizes),
        size=sum(sizes.values()),
        recorded=model_record is not None,
        findings=tuple(findings),
    )


def list_files(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Return a model's files with their sizes, and the names of what is neither file nor folder."""
    sizes: dict[str, int] = {}
    broken = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] in (CACHE, ".git"):
            continue
        if path.is_file():
            sizes[name.as_posix()] = path.stat().st_size
        elif not path.is_dir():
            broken.append(name.as_posix())
    return sizes, broken


def _check_files(
    folder: Path,
    model_record: ModelRecord | None,
    sizes: Mapping[str, int],
    wrong: Collection[str],
) -> Iterator[Finding]:
    """Yield what is not there, what was cut off, and what nobody can say of it."""
    if not any(name in sizes for name in CONFIGS):
        why = "vLLM cannot tell what model this is"
        yield Finding(where=CONFIGS[0], what="is missing", why=why)
    # vLLM loads those of the main folder.
    weights = [name for name in sizes if "/" not in name and _matches(name, _WEIGHTS)]
    if not weights:
        yield Finding(
            what="there are no weights", why="vLLM would have nothing to load"
        )
    yield from _find_missing(folder, model_record, sizes, wrong)
    yield from _check_sizes(folder, model_record, sizes, weights)


def _check_sizes(
    folder: Path,
    model_record: ModelRecord | None,
    sizes: Mapping[str, int],
    weights: Sequence[str],
) -> Iterator[Finding]:
    """Yield what was cut off, by its record or its own header, and what has no record."""
    recorded: Mapping[str, ModelFile] = model_record.files if model_record else {}
    unsure = [name for name in weights if name not in recorded]
    for name in unsure:
        if is_safetensors(name) and (
            what := header_problem(folder / name, sizes[name])
        ):
            yield Finding(
                where=name, what=what, why="its own header says how long it is"
            )
    for where in unsure if model_record else [""]:
        what = "was not fetched by patchkit: no hash is known"
        hint = quoted("hf", "cache", "verify", "REPO", "--local-dir", folder)
        yield Finding(level=Level.UNKNOWN, where=where, what=what, hint=hint)
    for name, file in recorded.items():
        if (size := sizes.get(name, file.size)) != file.size:
            what = f"has {size:,} bytes, not {file.size:,}"
            yield Finding(where=name, what=what, why="it was cut off")


def _find_missing(
    folder: Path,
    model_record: ModelRecord | None,
    sizes: Mapping[str, int],
    wrong: Collection[str],
) -> Iterator[Finding]:
    """Yield what a record, an index or the names of shards promise, and is not there."""
    reasons = dict.fromkeys(
        model_record.files if model_record else (),
        "it was chosen when the model was fetched",
    )
    reasons |= dict.fromkeys(
        _shards_by_name(sizes), "the names of the other shards count it"
    )
    try:
        shards = read_shards(folder, sizes)
        reasons |= dict.fromkeys(shards, "the index of the weights names it")
    except RecordError as error:
        index, _, what = error.what.partition(": ")
        yield Finding(where=index, what=what)
    for name, why in sorted(reasons.items()):
        if name not in sizes and name not in wrong:
            yield Finding(where=name, what="is missing", why=why)


def _shards_by_name(names: Collection[str]) -> Iterator[str]:
    """Yield all shards of the sets of which one is there: NAME-00001-of-00002.safetensors."""
    sets = {
        (match["stem"], match["count"], match["suffix"])
        for name in names
        if "/" not in name
        and _matches(name, _WEIGHTS)
        and (match := _ONE_OF_SOME.fullmatch(name))
    }
    for stem, count, suffix in sets:
        for number in range(1, min(int(count), _MOST_SHARDS) + 1):
            yield f"{stem}-{number:05}-of-{count}{suffix}"


def header_problem(path: Path, size: int) -> str:
    """Return why a file of safetensors is not whole, by its own header; "" if it is."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(max(0, size - _LENGTH_BYTES), _LONGEST_HEADER):
                return "is cut off, or no file of safetensors"
            header = read_json(dict[str, Any], file.read(length))
        header.pop("__metadata__", None)
        ends = [
            record(tuple[int, int], tensor["data_offsets"])[1]
            for tensor in header.values()
        ]
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (RecordError, LookupError, TypeError):
        return "is no file of safetensors: its header cannot be read"
    whole = _LENGTH_BYTES + length + max(ends, default=0)
    return "" if size == whole else f"has {size:,} bytes, not {whole:,}"


def _hash_file(path: Path, like: str, over: threading.Event) -> str:
    """Return a sha256, or git's sha1 of a blob if ``like`` is one. Raises OSError.

    It ends where it is, with what it has, once it is ``over``.
    """
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        digest = hashlib.sha256()
        if len(like) == _SHA1:
            head = f"blob {os.fstat(file.fileno()).st_size}\0".encode()
            digest = hashlib.sha1(head, usedforsecurity=False)
        while (length := file.readinto(block)) and not over.is_set():
            digest.update(block[:length])
    return digest.hexdigest()
