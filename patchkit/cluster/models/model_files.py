"""Name a model's folder, choose its files, record them, and check that they are there and right.

Runs on nodes, without the network. The quick check looks at sizes, links, the shards that the index
names, and at the headers of safetensors that no record names. The full check also hashes every
recorded file, with the algorithm that the Hub uses for it, several files in parallel.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Annotated

from patchkit.cluster.ssh.answer import Steps
from patchkit.cluster.ssh.node import Copied
from patchkit.durable.atomic import replacing, sync
from patchkit.durable.paths import is_file, is_plain
from patchkit.errors import (
    HashMismatchError,
    PatchkitError,
    SourceError,
    StorageError,
    UsageError,
)
from patchkit.finding import Finding, Findings, Level
from patchkit.frozen import Fields, Texts, frozen
from patchkit.quoting import quoted
from patchkit.reading import LARGEST_IN_TREE, read_text, user_path
from patchkit.records import (
    RECIPES,
    RecordError,
    Utf8,
    matching,
    read_json,
    read_toml,
    record,
)
from patchkit.runtime.memory.checkpoint import read_header

# Names follow the Hub's rules. They hold no --, so that a folder can have it in place of the slash.
_PART = r"(?!\.)(?!-)[A-Za-z0-9._-]{1,96}(?<![.-])"
# Old repositories have no organization.
_REPO = re.compile(rf"(?!.*(?:--|\.\.))(?:{_PART}/)?{_PART}")
_REVISION = re.compile(r"(?![-/.])[A-Za-z0-9._/-]{1,200}")
_FOLDER = re.compile(
    rf"(?:(?P<org>{_PART})--)?(?P<name>{_PART})@(?P<commit>[0-9a-f]{{12}})"
)
SHORT = 12
"""Hex digits of a commit in the name of a model's folder."""

_HINT = "name it as the Hub does: openai/gpt-oss-120b, or openai/gpt-oss-120b@main"
_PATTERNS = frozenset("*?[]\\")
_SPARE = 1.05  # times the size must be free: a full disk stops more than a download


def _require_file_name(path: str) -> None:
    # `hf download` reads names as patterns; names are also printed, copied and joined to a folder.
    if path.isprintable() and is_plain(path):
        is_option = path.startswith(("-", ".cache/"))
        if not is_option and _PATTERNS.isdisjoint(path):
            return
    raise RecordError(f"is {path!r}, which is no plain name of a file")


FileName = Annotated[Utf8, _require_file_name]
"""The path of a model's file, as the Hub, an index or a record names it; it stays in the folder."""

Commit = Annotated[str, matching("[0-9a-f]{40}", "a commit, 40 hex digits")]
_DIGEST = matching("[0-9a-f]{40}|[0-9a-f]{64}", "a sha256, or git's sha1")
Digest = Annotated[str, _DIGEST]


def split_revision(spec: str) -> tuple[str, str]:
    """Return the repository and the revision of ``REPO[@REV]``; "" stands for no revision.

    Raises UsageError if either is no name that the Hub allows.
    """
    repo, sign, revision = spec.partition("@")
    if not _REPO.fullmatch(repo):
        raise UsageError(f"{spec!r} names no model", hint=_HINT)

    is_revision = _REVISION.fullmatch(revision) and ".." not in revision
    if sign and not is_revision:
        raise UsageError(f"{revision!r} is no branch, tag or commit", hint=_HINT)
    return repo, revision


@frozen
class ModelFolder:
    """A commit of a model; read from a folder's name, ``commit`` has its first 12 digits alone."""

    repo: str
    commit: str

    @property
    def name(self) -> str:
        """Return the folder's name: ORG--NAME@COMMIT, with 12 digits of the commit."""
        return f"{self.repo.replace('/', '--')}@{self.commit[:SHORT]}"


def folder_of(name: str) -> ModelFolder | None:
    """Return the model that a folder is named after; None for any other folder."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None

    repo = f"{match['org']}/{match['name']}" if match["org"] else match["name"]
    if not _REPO.fullmatch(repo):
        return None
    return ModelFolder(repo=repo, commit=match["commit"])


_OTHER_DISK = (
    "make room there: `patchkit model list` names the folders of models; or name another disk: "
    "`model_folder` in cluster.toml"
)


def require_room(
    folder: Path,
    size: int,
    more: int = 0,
    hint: str = _OTHER_DISK,
) -> int:
    """Return the free bytes on the disk of a folder, which may not exist yet, plus ``more``.

    ``more`` are bytes that will be replaced. Raises StorageError if ``size`` bytes do not fit.
    """
    places = (folder, *folder.parents)
    nearest = next(place for place in places if os.access(place, os.F_OK))
    free = shutil.disk_usage(nearest).free + more

    needed = int(size * _SPARE)
    if needed > free:
        raise StorageError(
            f"{folder}: needs {needed:,} bytes, and {free:,} are free", hint=hint
        )
    return free


_NAMES = read_toml(dict[str, Texts], RECIPES / "models.toml")
CACHE = ".cache"
"""The folder inside a model's folder in which hf and patchkit keep their records."""

RECORD = f"{CACHE}/patchkit/model.json"
"""The path of the record. A fetch writes it first, so that a check knows which are missing."""


def choose_files(names: Collection[str]) -> Texts:
    """Return the files to fetch, sorted: the weights that vLLM loads, their index, and texts.

    Raises SourceError without such weights, RecordError if a name leads out of the folder.
    """
    # Every name is checked, also of files that are not fetched: a bad one discredits the rest.
    record(tuple[FileName, ...], list(names))

    kind = _loaded_kind(names)
    weights = {name for name in names if _is_kind(name, kind)}
    texts = {name for name in names if _is_text(name)}
    other_indexes = {
        name
        for name in _NAMES["indexes"]
        if not _is_kind(name.removesuffix(".index.json"), kind)
    }
    return tuple(sorted((weights | texts) - other_indexes))


def _loaded_kind(names: Collection[str]) -> str:
    """Return the pattern of the weights that vLLM loads. Raises SourceError if there are none."""
    for kind, name in product(_NAMES["kinds"], names):
        if _is_kind(name, kind):
            return kind

    suffixes = {PurePosixPath(name).suffix for name in filter(is_weights, names)}
    raise SourceError(
        "the repository has no weights that vLLM loads from a folder",
        why=f"it holds {', '.join(sorted(suffixes)) or 'no weights at all'}",
        hint="name the repository of the safetensors",
    )


def _is_kind(name: str, kind: str) -> bool:
    if "/" in name or name in _NAMES["training"]:
        return False
    # A repository may have the weights twice: as consolidated files, too, which are left out.
    is_once_more = name.startswith("consolidated") and "consolidated" not in kind
    return fnmatchcase(name, kind) and not is_once_more


def _is_text(name: str) -> bool:
    is_hidden = name.startswith(".") or "/." in name
    *folders, filename = name.split("/")
    if is_hidden or not {*_NAMES["elsewhere"]}.isdisjoint(folders):
        return False
    return _matches(filename, _NAMES["texts"])


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_weights(name: str) -> bool:
    """Return whether a file holds weights, judged by its name."""
    return _matches(name, _NAMES["weights"])


def is_loaded(name: str) -> bool:
    """Return whether vLLM may load a file of a model's folder, judged by its name."""
    return _matches(name.rpartition("/")[2], _NAMES["texts"] + _NAMES["weights"])


def is_safetensors(name: str) -> bool:
    """Return whether a file is one of safetensors in the main folder, from which vLLM loads."""
    return "/" not in name and name.endswith(".safetensors")


def read_shards(folder: Path, names: Collection[str]) -> list[str]:
    """Return the shards that the first index of a folder names; [] without an index.

    Raises RecordError, which begins with the name of the index, if it cannot be read as one.
    """
    index = next((name for name in _NAMES["indexes"] if name in names), "")
    if not index:
        return []

    try:
        content = read_json(Fields, read_text(folder / index, limit=LARGEST_IN_TREE))
        shards = record(dict[str, FileName], content.get("weight_map"))
    except PatchkitError as error:
        raise RecordError(f"{index}: {error.what}") from None
    except RecordError as error:
        raise RecordError(f"{index}: {error}") from None
    return sorted({*shards.values()})


@frozen
class ModelFile:
    """A file of a commit: its size in bytes, and its digest.

    The digest is the sha256 of a large file (git LFS), git's sha1 of a small one.
    """

    size: int
    digest: Digest


@frozen
class ModelRecord:
    """A commit of a model, and those of its files that a folder must hold."""

    repo: str
    commit: Commit
    files: Mapping[FileName, ModelFile]


def read_record(folder: Path) -> ModelRecord | None:
    """Return the record of a folder, None if it has none. Raises RecordError for a broken one."""
    place = folder / RECORD
    if not is_file(place):
        return None

    try:
        text = read_text(place, limit=LARGEST_IN_TREE, follow=False)
        return read_json(ModelRecord, text)
    except PatchkitError as error:
        raise RecordError(error.what) from None


def write_record(folder: Path, model_record: ModelRecord) -> None:
    """Write the record of a folder, and sync it to the disk. Raises OSError, StorageError."""
    place = folder / RECORD
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place) as file:
        file.write(json.dumps(asdict(model_record), indent=1).encode())
    sync(folder / CACHE)
    sync(folder)


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; -1 if there is no such file, or it cannot be read."""
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:
        return -1


HASH = "hash"
"""``about`` of the finding that the bytes of a file differ from those on the Hub."""

CONFIGS = ("config.json", "params.json", "adapter_config.json")
"""Configuration files of models; vLLM needs one of them to load a model."""

_LOST_RECORD = Finding(
    where=RECORD,
    what="is missing, so the files cannot be checked",
    why="`model sync` writes it last: the copy was cut short, or somebody made it by hand",
)

_SIDE_BY_SIDE = 8  # files hashed at a time; with more, they only wait for the disk
_SHA1 = 40  # hex digits
_BLOCK = 1 << 20


@frozen
class ModelCheck:
    """The result of a check: how many files a folder has, their bytes, and the faults.

    ``commit`` has 12 digits if only the folder's name tells it. ``recorded`` says whether the
    folder has a record of the files that it must hold, ``full`` whether they were hashed. ``sent``
    is what `model sync` copied before the check.
    """

    folder: str
    repo: str
    commit: str
    files: int
    size: int
    recorded: bool
    full: bool = False
    findings: tuple[Finding, ...]
    sent: Copied | None = None

    @property
    def exit_code(self) -> int:
        """Return the exit code of the worst error, 0 if there is none."""
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
        """Return whether the folder has a record, and no errors: without one nobody can know."""
        return self.recorded and not self.exit_code


Checking = Steps[ModelCheck]
"""A generator that yields its progress (bytes done, bytes in all) and returns the check."""


def check_model(folder: str) -> Checking:
    """Check a folder, and hash the recorded files; yield the progress in bytes.

    Files that the quick check finds wrong are not hashed. Raises UsageError if there is no such
    folder.
    """
    place = user_path(folder)
    if not place.is_dir():
        raise UsageError(
            f"{place}: no such folder", hint="`patchkit model list` names the models"
        )

    check = quick_check(place)
    wrong = {finding.where for finding in check.findings}
    model_record = None if RECORD in wrong else read_record(place)
    recorded = model_record.files if model_record else {}
    unseen = {name: file for name, file in recorded.items() if name not in wrong}
    findings = yield from hash_findings(place, unseen)
    return replace(check, full=True, findings=(*check.findings, *findings))


def require_record(check: ModelCheck) -> ModelCheck:
    """Return the check of a model that has a record elsewhere: a missing one here is an error."""
    if check.recorded:
        return check
    return replace(check, findings=(*check.findings, _LOST_RECORD))


def held_models(models: str) -> list[ModelCheck]:
    """Return the quick check of each model in the folder of all models."""
    root = user_path(models)
    if not root.is_dir():
        return []

    places = [place for place in sorted(root.iterdir()) if folder_of(place.name)]
    return [quick_check(folder) for folder in places if folder.is_dir()]


def quick_check(folder: Path) -> ModelCheck:
    """Check a folder without hashing any file, as the module describes."""
    sizes, broken = list_files(folder)
    findings = [
        Finding(
            where=name,
            what="is a link to nothing, or no file",
            why="the folder of a cache was copied without what it links to",
        )
        for name in broken
    ]

    model_record = None
    try:
        model_record = read_record(folder)
    except RecordError as error:
        findings.append(
            Finding(
                where=RECORD,
                what=str(error),
                why="without it the files cannot be checked",
            )
        )

    wrong = {finding.where for finding in findings}
    recorded = model_record.files if model_record else {}
    findings += _check_files(folder, recorded, sizes, wrong)
    named = folder_of(folder.name) or ModelFolder(repo="", commit="")
    return ModelCheck(
        folder=str(folder),
        repo=named.repo,
        commit=(model_record or named).commit,
        files=len(sizes),
        size=sum(sizes.values()),
        recorded=model_record is not None,
        findings=tuple(findings),
    )


def list_files(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Return sizes by file name, and the names of what is neither a file nor a folder.

    Names are relative to the folder. ``.cache`` and ``.git`` are left out.
    """
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
    recorded: Mapping[str, ModelFile],
    sizes: Mapping[str, int],
    wrong: Collection[str],
) -> Findings:
    """Yield a finding for each file that is missing, cut off, or without a known hash."""
    if sizes.keys().isdisjoint(CONFIGS):
        yield Finding(
            where=CONFIGS[0],
            what="is missing",
            why="vLLM cannot tell what model this is",
        )

    # vLLM loads only weights that lie in the main folder.
    weights = [name for name in sizes if "/" not in name and is_weights(name)]
    if not weights:
        yield Finding(
            what="there are no weights",
            why="vLLM would have nothing to load",
        )
    yield from _check_sizes(folder, recorded, sizes, wrong)

    unrecorded = [name for name in weights if name not in recorded]
    for name in filter(is_safetensors, unrecorded):
        if problem := _header_problem(folder / name, sizes[name]):
            yield Finding(
                where=name, what=problem, why="its own header says how long it is"
            )

    for name in unrecorded if recorded else [""]:
        yield Finding(
            level=Level.UNKNOWN,
            where=name,
            what="was not fetched by patchkit: no hash is known",
            hint=quoted("hf", "cache", "verify", "REPO", "--local-dir", folder),
        )


def _check_sizes(
    folder: Path,
    recorded: Mapping[str, ModelFile],
    sizes: Mapping[str, int],
    wrong: Collection[str],
) -> Findings:
    """Yield a finding for each file whose size is not that of the record, or that is missing.

    The record or an index implies which files have to be there.
    """
    for name, file in recorded.items():
        size = sizes.get(name, file.size)
        if size != file.size:
            yield Finding(
                where=name,
                what=f"has {size:,} bytes, not {file.size:,}",
                why="it was cut off",
            )

    reasons = dict.fromkeys(recorded, "it was chosen when the model was fetched")
    try:
        reasons |= dict.fromkeys(
            read_shards(folder, sizes), "the index of the weights names it"
        )
    except RecordError as error:
        index, _, problem = error.what.partition(": ")
        yield Finding(where=index, what=problem)

    for name, reason in sorted(reasons.items()):
        if name not in sizes and name not in wrong:
            yield Finding(where=name, what="is missing", why=reason)


def _header_problem(path: Path, size: int) -> str:
    """Return why a file of safetensors is not whole; "" if its size is the one in its header."""
    try:
        tensors, start = read_header(path)
        offsets = [tensor["data_offsets"] for tensor in tensors.values()]
        ends = [end for _begin, end in record(list[tuple[int, int]], offsets)]
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (RecordError, LookupError, TypeError):
        return "is cut off, or no file of safetensors"

    whole = start + max(ends, default=0)
    return "" if size == whole else f"has {size:,} bytes, not {whole:,}"


def hash_findings(
    place: Path,
    files: Mapping[str, ModelFile],
) -> Steps[list[Finding]]:
    """Return a finding for each file that cannot be read or whose digest is not the given one.

    Files are hashed in parallel. Yields the progress: bytes done, and bytes in all. A caller may
    close the generator early: then nothing waits for the files that are being read.
    """
    done = 0
    total = sum(file.size for file in files.values())
    findings: list[Finding] = []

    over = threading.Event()
    pool = ThreadPoolExecutor(min(_SIDE_BY_SIDE, os.cpu_count() or 1))
    try:
        hashes = {
            name: pool.submit(_hash_file, place / name, file.digest, over)
            for name, file in files.items()
        }

        for name, file in files.items():
            findings += _judge_hash(name, file.digest, hashes[name])
            done += file.size
            yield done, total
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)
    return findings


def _judge_hash(name: str, right: str, hashing: Future[str]) -> Findings:
    """Yield a finding if a file could not be read, or has another digest than the ``right`` one."""
    try:
        digest = hashing.result()
    except OSError as error:
        yield Finding(
            where=name,
            what=f"cannot be read: {error.strerror or error}",
            why="whether its bytes are right is not known",
        )
        return

    if digest != right:
        yield Finding(
            about=HASH,
            where=name,
            what=f"has the hash {digest[:16]}…, not {right[:16]}…",
            why="its bytes are not those of the Hub",
        )


def _hash_file(path: Path, like: str, over: threading.Event) -> str:
    """Return the sha256 of a file, or git's sha1 of a blob if ``like`` is a sha1. Raises OSError.

    Once ``over`` is set, stop reading and return the digest of the part that was read.
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
