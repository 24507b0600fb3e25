"""Write the folder of an index, all or nothing: pages, METADATA files, and the wheels themselves.

::

    SHA256SUMS                         every file of the index; what is not in it is not ours
    simple/index.html, index.json      the projects
    simple/PROJECT/index.html, index.json
    simple/PROJECT/WHEEL.whl           a second name of the wheelhouse's file, or a copy
    simple/PROJECT/WHEEL.whl.metadata
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.digests import digest
from patchkit.durable.failure import translated
from patchkit.durable.journal import Change, Journal
from patchkit.durable.lock import locked
from patchkit.durable.names import plain
from patchkit.durable.staging import make_folders
from patchkit.durable.steps import place_of, present
from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.wheel.index.offers import Offers, Update, offered
from patchkit.wheel.index.pages import OfferedWheel, project_pages, root_pages
from patchkit.wheel.wheelhouse.manifest import SUMS
from patchkit.wheel.wheelhouse.own_files import read_own
from patchkit.wheel.wheelhouse.storage import JOURNAL, PATIENCE

SIMPLE = "simple"
_SUM = re.compile(rf"[0-9a-f]{{64}}  (?P<path>{SIMPLE}/.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenIndex:
    """What an index offers, and which files of it are new or gone, by path."""

    offers: Offers
    new: tuple[str, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _IndexFile:
    content: bytes | Path
    sha256: str


def write_index(
    folder: Path,
    houses: Sequence[Path],
    *,
    dry_run: bool = False,
    progress: Update = lambda _done, _all: None,
) -> WrittenIndex:
    """Make ``folder`` an index of what the wheelhouses hold; it is the document root of a server.

    What a former index had, and this one has not, goes; files of others stay. A wheel is there
    before a page names it, and until none does. Raises UsageError for a folder that holds files of
    others in their place, StorageError, BusyError, and as ``offered`` does.
    """
    for house in houses:
        if folder.resolve() == house.resolve():
            raise UsageError(
                f"{folder}: is the wheelhouse itself",
                why=f"an index has a {SUMS} of its own",
                hint=f"name another folder, such as {folder}-index",
            )
    # The wheelhouses are held until the end: their wheels are linked.
    with offered(houses, progress) as offers:
        files = _files(offers)
        own = _journal(folder, houses)
        with translated(at=folder), _held(folder, own, dry_run=dry_run):
            gone = sorted(_former(folder) - files.keys())
            changes = _changes(folder, files, gone)
            if not dry_run:
                own.commit(changes)
    return WrittenIndex(
        offers=offers,
        new=tuple(change.path for change in changes if change.after is not None),
        gone=tuple(change.path for change in changes if change.after is None),
    )


def _files(offers: Offers) -> dict[str, _IndexFile]:
    """Return every file of the index by path, what a page names before the page."""
    files: dict[str, _IndexFile] = {}
    texts: dict[str, str] = {}
    projects: dict[str, list[OfferedWheel]] = defaultdict(list)
    for wheel in offers.wheels:
        path = f"{SIMPLE}/{wheel.name.project}/{wheel.name.filename}"
        files[path] = _IndexFile(wheel.path, wheel.sha256)
        files[f"{path}.metadata"] = _IndexFile(wheel.metadata, digest(wheel.metadata))
        projects[wheel.name.project].append(wheel)
    for project, wheels in projects.items():
        texts |= {
            f"{SIMPLE}/{project}/{name}": text for name, text in project_pages(wheels).items()
        }
    texts |= {f"{SIMPLE}/{name}": text for name, text in root_pages(projects).items()}
    files |= {path: _IndexFile(text.encode(), digest(text)) for path, text in texts.items()}
    sums = "".join(f"{file.sha256}  {path}\n" for path, file in sorted(files.items()))
    return files | {SUMS: _IndexFile(sums.encode(), digest(sums))}


def _journal(folder: Path, houses: Sequence[Path]) -> Journal:
    again: list[str | Path] = ["patchkit", "wheelhouse", "index", folder]
    for house in houses:
        again += ["--dir", house]
    return Journal(
        root=folder,
        folder=folder / JOURNAL,
        again=quoted(*again),
        # Nothing is lost with it: an index is made of what the wheelhouses hold.
        rescue=f"{quoted('rm', '-r', '--', folder / JOURNAL)}; then {quoted(*again)}",
        allowed=lambda path: plain(path) and (path == SUMS or path.startswith(f"{SIMPLE}/")),
        home=folder / SIMPLE,
    )


@contextlib.contextmanager
def _held(folder: Path, own: Journal, *, dry_run: bool) -> Iterator[None]:
    """Hold the folder, made if need be and recovered; with ``dry_run`` nothing is written."""
    if dry_run:
        own.check_finished()
        yield
        return
    make_folders(folder)
    with locked(folder, PATIENCE):
        own.recover()
        yield


def _former(folder: Path) -> set[str]:
    """Return the paths of the index that is there. Raises UsageError if they are not ours."""
    lines = (read_own(place_of(folder, SUMS)) or b"").decode(errors="replace").splitlines()
    found = [_SUM.fullmatch(line) for line in lines]
    paths = {match["path"] for match in found if match and plain(match["path"])}
    if len(paths) != len(lines):
        raise _foreign(folder, [SUMS])
    return {*paths, *([SUMS] if lines else [])}


def _changes(folder: Path, files: Mapping[str, _IndexFile], gone: Collection[str]) -> list[Change]:
    """Return what makes the folder so. Raises UsageError where files of others are in the way."""
    ours = _former(folder)
    foreign: list[str] = []
    changes: list[Change] = []
    for path, file in files.items():
        place, after = place_of(folder, path), file.content
        # A second name of the wheel that was just read needs no reading.
        linked = isinstance(after, Path) and place.exists() and place.samefile(after)
        before = file.sha256 if linked else present(place)
        if before != file.sha256:
            changes.append(Change(path, before, after))
            foreign += [path] if before and path not in ours else []
    if foreign:
        raise _foreign(folder, foreign)
    left = {path: present(place_of(folder, path)) for path in gone}
    return [*changes, *(Change(path, before, None) for path, before in left.items() if before)]


def _foreign(folder: Path, paths: Sequence[str]) -> UsageError:
    more = f", and {len(paths) - 1} more" if len(paths) > 1 else ""
    return UsageError(
        f"{folder / paths[0]}: is there, and no index of patchkit's lists it{more}",
        why=f"{folder} holds something else, or its {SUMS} was edited or removed",
        hint="name another folder; or move what is there away",
    )
