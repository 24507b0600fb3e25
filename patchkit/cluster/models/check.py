"""Check whether a model's folder is complete and right, without network.

The quick form looks at sizes, at what the index names, and at links; the full one hashes every
file. What has to be there, ``expected`` says.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.models.choice import (
    CONFIGS,
    is_weight,
    read_safetensors_size,
    read_shards,
)
from patchkit.cluster.models.expected import (
    CACHE,
    Downloaded,
    ModelRecord,
    downloads,
    file_mark,
    note_checked,
    read_checked,
    read_record,
    unfinished,
)
from patchkit.cluster.models.hashing import hash_files
from patchkit.cluster.models.names import folder_of, models_folder
from patchkit.cluster.models.report import HeldModel, ModelCheck, sent_finding
from patchkit.errors import HashMismatchError, SourceError, UsageError
from patchkit.finding import Finding, Level
from patchkit.records import RecordError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A folder, read: its files with their sizes, and what is known of what it should hold."""

    folder: Path
    record: ModelRecord | None
    downloaded: Mapping[str, Downloaded]
    sizes: Mapping[str, int]  # of each file, behind links as well
    dangling: tuple[str, ...]

    @property
    def commit(self) -> str:
        """Return the commit that all files have to be of, or how it begins; "" if unknown."""
        if self.record:
            return self.record.commit
        named = folder_of(self.folder.name)
        return named.commit if named else ""

    @property
    def repo(self) -> str:
        named = folder_of(self.folder.name)
        return self.record.repo if self.record else named.repo if named else ""

    @property
    def names(self) -> Iterable[str]:
        """Return the files that have to be there, as far as that was written down."""
        return self.record.files if self.record else self.downloaded

    def digest(self, name: str) -> str:
        """Return the digest that a file has to have, "" if nobody wrote it down."""
        if self.record and name in self.record.files:
            return self.record.files[name].digest
        return self.downloaded[name].digest if name in self.downloaded else ""


def check_model(folder: str, full: bool = False) -> Iterator[dict[str, Any]]:
    """Yield ``{"done": BYTES, "total": BYTES}`` while it hashes, at last ``{"result": CHECK}``.

    Raises UsageError if there is no such folder.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise UsageError(f"{place}: no such folder", hint="`patchkit model list` names the models")
    try:
        held = _read_held_model(place)
    except RecordError as error:
        wrong = _model_finding(
            ".cache/patchkit/model.json", str(error), "nobody knows what has to be here"
        )
        yield _check_result(place, None, (), [wrong], full=full)
        return
    cut_off = list(_check_sizes(held))
    found = [*_check_structure(held), *cut_off, *_check_commits(held)]
    if full:
        found += yield from _check_hashes(held, {wrong.where for wrong in cut_off})
    elif not held.record and not held.downloaded:
        found.append(_unchecked_finding("no hash of any file was written down"))
    yield _check_result(place, held, held.sizes, found, full=full)


def count_unchecked(folder: Path) -> int:
    """Return how many files with a known hash are not as they were when it was right, if ever."""
    try:
        held = _read_held_model(folder)
    except RecordError:
        return 0
    checked = read_checked(folder)
    return sum(
        bool(held.digest(name)) and file_mark(folder / name) != checked.get(name)
        for name in held.sizes
    )


def is_complete(folder: Path) -> bool:
    """Return what the quick check says."""
    *_, last = check_model(str(folder))
    return bool(last["result"]["complete"])


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


def _read_held_model(folder: Path) -> _Held:
    sizes, dangling = {}, []
    for here, folders, files in os.walk(folder):
        if Path(here) == folder:
            folders[:] = [name for name in folders if name not in (CACHE, ".git")]
        for name in files:
            path = Path(here, name)
            shown = path.relative_to(folder).as_posix()
            if path.is_file():
                sizes[shown] = path.stat().st_size
            else:
                dangling.append(shown)
    return _Held(
        folder=folder,
        record=read_record(folder),
        downloaded=dict(downloads(folder)),
        sizes=sizes,
        dangling=tuple(sorted(dangling)),
    )


def _check_structure(held: _Held) -> Iterator[Finding]:
    for name in held.dangling:
        yield _model_finding(
            name,
            "is a link to nothing, or no file",
            "the folder of a cache was copied without what it links to",
        )
    if not any(name in held.sizes for name in CONFIGS):
        yield _model_finding(CONFIGS[0], "is missing", "vLLM cannot tell what model this is")
    if not any(map(is_weight, held.sizes)):
        yield _model_finding("", "there are no weights", "vLLM would have nothing to load")
    try:
        named = read_shards(held.folder, held.sizes)
    except RecordError as error:
        yield _model_finding(error.what.partition(":")[0], error.what.partition(": ")[2], "")
        named = {}
    for name in sorted({*held.names, *named} - held.sizes.keys() - {*held.dangling}):
        index = f"{named[name]} names it" if name in named else ""
        yield _model_finding(
            name, "is missing", index or "it was chosen when the model was fetched"
        )
    # An unfinished part beside a whole file is a leftover of another try.
    level = Level.NOTE if held.record else Level.ERROR
    for part in unfinished(held.folder):
        where = part.relative_to(held.folder).as_posix()
        yield _model_finding(where, "a download was not finished", "", level=level)


def _check_sizes(held: _Held) -> Iterator[Finding]:
    for name, size in sorted(held.sizes.items()):
        known = held.record.files.get(name) if held.record else None
        own = read_safetensors_size(held.folder / name) if name.endswith(".safetensors") else size
        if known and size != known.size:
            yield _model_finding(name, f"has {size:,} bytes, not {known.size:,}", "it was cut off")
        elif not known and own is None:
            yield _model_finding(name, "is no safetensors file", "a pointer of git-lfs, or cut off")
        elif not known and own != size:
            yield _model_finding(name, f"has {size:,} bytes, not {own:,}", "it was cut off")


def _check_commits(held: _Held) -> Iterator[Finding]:
    """Yield what hf wrote down otherwise than the record or the folder's name say."""
    recorded = held.record.files if held.record else {}
    for name, written in held.downloaded.items():
        if name in held.sizes and not written.commit.startswith(held.commit):
            yield _model_finding(
                name,
                f"is of commit {written.commit[:12]}, not {held.commit[:12]}",
                "two commits were fetched into one folder",
            )
        elif name in recorded and written.digest not in ("", recorded[name].digest):
            yield _model_finding(name, "hf fetched another file than the record names", "")


def _check_hashes(held: _Held, wrong: set[str]) -> Generator[dict[str, Any], None, list[Finding]]:
    """Hash the files that are not known to be wrong."""
    wanted = {name: held.digest(name) for name in held.sizes if name not in wrong}
    unknown = [name for name, digest in wanted.items() if not digest]
    paths = {held.folder / name: digest for name, digest in wanted.items() if digest}
    marks = {path: file_mark(path) for path in paths}  # before: a file may change meanwhile
    total = sum(held.sizes[name] for name, digest in wanted.items() if digest)
    reading = hash_files(paths)
    while True:
        try:
            yield {"done": next(reading), "total": total}
        except StopIteration as end:
            actual: dict[Path, str] = end.value
            break
    right = [path for path, digest in paths.items() if actual[path] == digest]
    note_checked(
        held.folder, {path.relative_to(held.folder).as_posix(): marks[path] for path in right}
    )
    found = [
        _model_finding(
            path.relative_to(held.folder).as_posix(),
            f"has the hash {actual[path][:16]}…, not {digest[:16]}…"
            if " " not in actual[path]
            else actual[path],
            "its bytes are not those of the Hub",
            kind=HashMismatchError,
        )
        for path, digest in paths.items()
        if actual[path] != digest
    ]
    weights = [name for name in unknown if is_weight(name)]
    return [
        *found,
        *(_unchecked_finding("no hash of it was written down", name) for name in weights),
    ]


def _model_finding(
    where: str,
    what: str,
    why: str,
    *,
    level: Level = Level.ERROR,
    kind: type[SourceError | HashMismatchError] = SourceError,
) -> Finding:
    return Finding(level=level, where=where, what=what, why=why, kind=kind)


def _unchecked_finding(what: str, where: str = "") -> Finding:
    return Finding(level=Level.UNKNOWN, where=where, what=what)


def _check_result(
    folder: Path,
    held: _Held | None,
    sizes: Mapping[str, int] | tuple[()],
    found: list[Finding],
    *,
    full: bool,
) -> dict[str, Any]:
    check = ModelCheck(
        folder=str(folder),
        repo=held.repo if held else "",
        commit=held.commit if held else "",
        files=len(sizes),
        size=sum(dict(sizes).values()),
        full=full,
        findings=tuple(map(sent_finding, found)),
    )
    return {"result": check.fields()}
