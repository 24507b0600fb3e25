"""Lock a wheelhouse, change it through a journal, and read and write its three documents.

Wheels are added here too; the manifest is kept equal to the wheels in the folder.
"""

import contextlib
import enum
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from patchkit.digests import digest, sha256_of
from patchkit.durable.journal import Change, Journal
from patchkit.durable.lock import locked
from patchkit.durable.paths import file_digest, is_file, place_of
from patchkit.durable.staging import copy_staged, make_folders
from patchkit.errors import (
    BusyError,
    HashMismatchError,
    SourceError,
    StorageError,
    UsageError,
    translated,
)
from patchkit.frozen import Texts, Values, frozen
from patchkit.quoting import quoted
from patchkit.reading import read_bytes
from patchkit.records import RecordError, Sha256, matching, read_json
from patchkit.source.project import first_example
from patchkit.source.releases import ExactPin
from patchkit.target import targets
from patchkit.wheel.file.wheelfile import ANY, Facts, WheelName, find_faults

JOURNAL = ".journal"
MANIFEST = "manifest.json"
REQUIREMENTS = "requirements.txt"
SUMS = "SHA256SUMS"
DOCUMENTS = frozenset({MANIFEST, REQUIREMENTS, SUMS})
# Seconds to wait for the lock. A change takes a few; a build that gives up would lose hours.
_PATIENCE = 60.0


def wheelhouse_command(verb: str, folder: Path, *options: str) -> str:
    """Return the command line ``patchkit wheelhouse VERB --dir FOLDER …``, for hints."""
    return quoted("patchkit", "wheelhouse", verb, "--dir", folder, *options)


def repack_command(release: str, cpu: str, *options: str | Path) -> str:
    """Return the command line that repacks ``NAME==X.Y.Z``, for hints."""
    machine = () if cpu == ANY else ("--cpu", cpu)
    return quoted("patchkit", "repack", release, *machine, *options)


def wheelhouse_journal(folder: Path) -> Journal:
    """Return the journal of a wheelhouse, which may change only wheels and the three documents."""
    place = folder / JOURNAL
    prune = wheelhouse_command("prune", folder)
    return Journal(
        root=folder,
        folder=place,
        again=prune,
        # Journals that were moved before stay: `mv -T` does not move this one into them.
        rescue=f"{quoted('mv', '-T', '--backup=numbered', place, f'{place}.damaged')} && {prune}",
        allowed=lambda path: (
            "/" not in path and (path in DOCUMENTS or path.endswith(".whl"))
        ),
    )


@contextlib.contextmanager
def hold_wheelhouse(folder: Path) -> Iterator[None]:
    """Lock the folder; wait up to a minute if another process has locked it.

    Raises BusyError if it is still locked then, UsageError if there is no such folder.
    """
    if not folder.is_dir():
        make = quoted("patchkit", "repack", first_example(), "--dir", folder)
        raise UsageError(
            f"{folder}: no such folder",
            hint=f"name a wheelhouse that is there; or make it: {make}",
        )

    with locked(folder, _PATIENCE):
        yield


@contextlib.contextmanager
def open_for_reading(folder: Path) -> Iterator[None]:
    """Lock the folder for reading.

    Raises as ``hold_wheelhouse`` does, and StorageError if an interrupted run left a change
    unfinished.
    """
    with hold_wheelhouse(folder):
        wheelhouse_journal(folder).check_finished()
        yield


@contextlib.contextmanager
def open_for_writing(folder: Path) -> Iterator[None]:
    """Lock the folder for writing; make it if it is missing, and recover an unfinished change."""
    with translated(at=folder):
        make_folders(folder)
    with hold_wheelhouse(folder):
        wheelhouse_journal(folder).recover()
        yield


@contextlib.contextmanager
def stage_copy(folder: Path, source: Path) -> Iterator[Path]:
    """Yield a copy of a file that only the block uses, to check and commit it; then remove it."""
    copy = wheelhouse_journal(folder).folder / "new" / source.name
    try:
        with translated(at=folder):
            make_folders(copy.parent)
            copy_staged(source, copy, None, folder)
        yield copy
    finally:
        with contextlib.suppress(OSError):  # the next writer removes what is left
            wheelhouse_journal(folder).clear_staged()


def commit_files(
    folder: Path,
    texts: Values,
    gone: Collection[str],
    arriving: Mapping[str, Path] | None = None,
) -> None:
    """Write and remove files of a wheelhouse, all or nothing.

    ``texts`` maps the name of a document to its text. ``gone`` are names of files to remove.
    ``arriving`` maps a name to a file that is linked into the folder, so it must be on the same
    file system.
    """
    contents: dict[str, bytes | Path | None] = dict.fromkeys(gone)
    contents |= {name: text.encode() for name, text in texts.items()}
    contents |= arriving or {}
    changes = []
    for name, after in contents.items():
        remove_link(folder, name)

        before = file_digest(place_of(folder, name))
        # Only compare digests if there is a file: `after` may be a wheel of gigabytes.
        is_same = before == _content_digest(after) if before else after is None
        if not is_same:
            changes.append(Change(name, before, after))

    wheelhouse_journal(folder).commit(changes)


def remove_link(folder: Path, name: str) -> None:
    """Remove a file of the folder if it is a symbolic link; the target of the link stays."""
    place = folder / name
    if place.is_symlink():
        with translated(at=folder):
            place.unlink()


def _content_digest(content: bytes | Path | None) -> str:
    if content is None:
        return ""
    return sha256_of(content) if isinstance(content, Path) else digest(content)


LINKED = "is a link, a folder or a device, not a file of this wheelhouse"
WHY_LINKED = "patchkit makes none; what it leads to can change without the wheelhouse"
_MOST = 32 << 20  # bytes of a document; a manifest of 200 wheels has 0.1 MB


def require_own(place: Path) -> None:
    """Raise HashMismatchError if a path exists but is no regular file: a link, a folder."""
    if os.path.lexists(place) and not is_file(place):
        raise HashMismatchError(
            f"{place}: {LINKED}",
            why=WHY_LINKED,
            hint=f"{quoted('ls', '-l', place)}; then put the file itself in its place",
        )


def read_own(place: Path) -> bytes | None:
    """Return the contents of a wheelhouse's document, None if the file does not exist.

    Raises HashMismatchError for a link or a file larger than 32 MiB, StorageError for I/O.
    """
    if not os.path.lexists(place):
        return None

    require_own(place)
    try:
        return read_bytes(place, limit=_MOST, follow=False)
    except SourceError as error:
        raise HashMismatchError(
            error.what,
            why="patchkit did not write it",
            hint="get the wheelhouse again from where it was made",
        ) from None


USER = "the user"
_LONGEST = 300  # characters of a reason


def check_one_line(text: str) -> None:
    """Raise ValueError unless a text is one printable line of at most 300 characters."""
    if not text.isprintable() or not 0 < len(text) <= _LONGEST:
        raise RecordError(
            f"is not one line of up to {_LONGEST} characters that can be shown"
        )


_Line = Annotated[str, check_one_line]
_Release = Annotated[
    str, matching(r"[A-Za-z0-9._-]+ [A-Za-z0-9.+!]+", "a project and its version")
]


@frozen
class Override:
    """An override: the wheelhouse takes the version ``takes`` although a wheel requires ``pin``.

    ``by`` is the release that has the pin, such as ``torch 2.11.0``. ``word`` says on whose word it
    is overridden: ``the user``, or a known bug and where it was reported.
    """

    takes: ExactPin
    pin: ExactPin
    by: _Release
    reason: _Line
    word: _Line

    def __post_init__(self) -> None:
        is_same_project = self.takes.project == self.pin.project
        if not is_same_project or self.takes.version <= self.pin.version:
            raise RecordError(f"{self.takes} is no later version of {self.pin}")

    def __str__(self) -> str:
        return f"{self.summary}: {self.reason} ({self.word})"

    @property
    def summary(self) -> str:
        """Return a phrase with both versions and the release that has the pin, in ASCII."""
        return f"{self.takes} in the place of {self.pin.version}, which {self.by} pins"

    def fields(self) -> Values:
        return {each.name: str(getattr(self, each.name)) for each in fields(self)}


Overrides = Sequence[Override]


_HEADER = "# pip install --require-hashes --no-deps --no-index --find-links DIR -r DIR/{file}\n"
_FILLED = """\
# Written by patchkit wheelhouse fill, for CPython {python} on {machine} with glibc {glibc}:
#   pip install {options}--find-links DIR --require-hashes -r DIR/{file}
"""
_OVERRIDDEN = """\
# Overridden: {summary}.
# So pip and uv need --no-deps; `pip check` names it.
"""


class Kind(enum.StrEnum):
    """The origin of a wheel, and where its file is."""

    BUILT = "built"  # by patchkit, in the folder
    DEPENDENCY = "dependency"  # required by built wheels, in the folder
    LOCKED = "locked"  # required by built wheels, on an index


@frozen
class ManifestEntry:
    """A wheel as the manifest lists it: sha256 in hex, size in bytes, facts as JSON.

    The facts of a built wheel are those of its patchkit.json. The facts of a dependency tell the
    node that it was resolved for: python, machine, glibc. A wheel that is only locked has size 0.
    """

    name: WheelName = field(metadata={"key": "filename"})
    sha256: Sha256
    size: int
    facts: Facts
    kind: Kind = Kind.BUILT

    @property
    def held(self) -> bool:
        """Return whether the wheel's file belongs in the folder."""
        return self.kind is not Kind.LOCKED

    def fields(self) -> Facts:
        return {
            "filename": self.name,
            "project": self.name.project,
            "version": str(self.name.version),
            "tag": self.name.tag,
            "sha256": self.sha256,
            "size": self.size,
            "kind": str(self.kind),
            "facts": dict(self.facts),
        }


@frozen
class Manifest:
    """The wheels of a wheelhouse, and the overrides of their pins."""

    wheels: tuple[ManifestEntry, ...] = ()
    overrides: tuple[Override, ...] = ()

    @property
    def built(self) -> list[ManifestEntry]:
        """Return the wheels that patchkit built."""
        return [entry for entry in self.wheels if entry.kind is Kind.BUILT]

    @property
    def dependencies(self) -> list[ManifestEntry]:
        """Return the wheels that others released, whether held or only locked."""
        return [entry for entry in self.wheels if entry.kind is not Kind.BUILT]

    @property
    def install_options(self) -> Texts:
        """Return options with which pip installs these wheels: ``--no-deps``, ``--no-index``.

        The options that name the folder and the lock are not among them.
        """
        options = []
        # Without --no-deps, pip refuses a lock that lacks the dependencies, or that has an override
        # in the place of a version that a wheel requires.
        if self.overrides or not self.dependencies:
            options.append("--no-deps")
        if all(entry.held for entry in self.dependencies):
            options.append("--no-index")
        return tuple(options)


@frozen
class _Row(ManifestEntry):
    """An entry of ``manifest.json``. Project, version and tag repeat what the file name says."""

    project: str = ""
    version: str = ""
    tag: str = ""


@frozen
class _Rows:
    format: Literal[1, 2, 3]  # 1 has no kinds: all wheels are built; 3 has overrides
    wheels: tuple[_Row, ...]
    overrides: tuple[Override, ...] = ()


def listed_manifest(house: Path) -> Manifest:
    """Read the manifest of a wheelhouse that the caller has locked. No file: an empty manifest.

    Raises SourceError if it is malformed, HashMismatchError if it is a link or too large.
    """
    data = read_own(house / MANIFEST)
    if data is None:
        return Manifest()
    try:
        read = read_json(_Rows, data)
    except ValueError as error:
        raise SourceError(
            f"{MANIFEST}: cannot be read: {error}",
            why="it was edited, or a newer patchkit wrote it",
            hint="put it back; or move the wheels away, empty the folder, and build again",
        ) from None

    return Manifest(wheels=read.wheels, overrides=read.overrides)


def write_documents(manifest: Manifest) -> Values:
    """Return name → text of the three documents. Equal manifests give equal texts."""
    wheels = sorted(manifest.wheels, key=lambda entry: entry.name)
    overrides = sorted(manifest.overrides, key=lambda override: override.takes.project)
    ordered = Manifest(wheels=tuple(wheels), overrides=tuple(overrides))

    texts = {MANIFEST: _manifest_text(ordered), REQUIREMENTS: _requirements(ordered)}

    sums = {name: digest(text.encode()) for name, text in texts.items()}
    sums |= {entry.name: entry.sha256 for entry in wheels if entry.held}
    lines = [f"{sha256}  {name}\n" for name, sha256 in sums.items()]
    return {**texts, SUMS: "".join(lines)}


def _manifest_text(manifest: Manifest) -> str:
    table: Facts = {
        "format": 2,
        "wheels": [entry.fields() for entry in manifest.wheels],
    }
    if manifest.overrides:
        table["format"] = 3
        table["overrides"] = [override.fields() for override in manifest.overrides]

    text = json.dumps(
        table,
        indent=1,
        sort_keys=True,
        ensure_ascii=False,
        allow_nan=False,
    )
    return f"{text}\n"


def _requirements(manifest: Manifest) -> str:
    """Return the text of the requirements file, the lock that pip installs by."""
    lines = [_requirements_header(manifest)]
    lines += [
        _OVERRIDDEN.format(summary=override.summary) for override in manifest.overrides
    ]

    builds = Counter(entry.name.project for entry in manifest.wheels)
    for entry in manifest.wheels:
        marker = ""
        # A project with one build gets no marker: with it, pip on another CPU would silently skip
        # the project, and without it, pip reports an error.
        if builds[entry.name.project] > 1:
            cpus = [f'platform_machine == "{cpu}"' for cpu in sorted(entry.name.cpus)]
            marker = f" ; {' or '.join(cpus)}"

        lines.append(f"{entry.name.pinned}{marker} --hash=sha256:{entry.sha256}\n")

    return "".join(lines)


def _requirements_header(manifest: Manifest) -> str:
    if not manifest.dependencies:
        return _HEADER.format(file=REQUIREMENTS)

    # Line breaks are removed, since the values go into a comment of the file.
    node = {
        name: " ".join(str(manifest.dependencies[0].facts.get(name, "?")).split())
        for name in ("python", "machine", "glibc")
    }

    options = "".join(f"{option} " for option in manifest.install_options)
    return _FILLED.format(file=REQUIREMENTS, options=options, **node)


def rivals(one: WheelName, other: WheelName) -> bool:
    """Return whether two wheels are of one project and fit the same CPU, which pip refuses."""
    if one.project != other.project or one == other:
        return False

    return bool(one.cpus & other.cpus) or ANY in one.cpus | other.cpus


def device_of(name: WheelName) -> str:
    """Return the device that patchkit built a wheel for, by the label of its version; "" for none.

    For ``2.29.7+gb10.0a1b2c`` and for ``0.25.1+cu130.gb10.0a1b2c`` it is ``gb10``.
    """
    parts = (name.version.local or "").split(".")
    return next((part for part in parts if part in targets()), "")


Say = Callable[[str], None]
"""A function that shows a line to the user."""
FILLING = ".filling"
"""The folder in which a fill collects downloads; after an interruption, the next fill continues."""


def load_manifest(house: Path) -> Manifest:
    """Read the manifest under the wheelhouse's lock.

    Raises SourceError if it cannot be read, HashMismatchError if it is a link, StorageError if a
    change of the wheelhouse is unfinished, BusyError if somebody else holds it, and UsageError if
    there is no such folder.
    """
    with open_for_reading(house):
        return listed_manifest(house)


def read_settled(house: Path) -> Manifest:
    """Recover an unfinished change, then read the manifest.

    Raises as ``load_manifest`` does, and HashMismatchError if a wheel is a link or a folder.
    """
    with hold_wheelhouse(house):
        wheelhouse_journal(house).recover()
        for path in house.glob("*.whl"):
            require_own(path)
        return listed_manifest(house)


def check_folder(house: Path) -> None:
    """Raise StorageError unless wheels can be written into a folder, which need not exist yet.

    Nothing is written to find out.
    """
    places = (house, *house.absolute().parents)
    nearest = next(path for path in places if path.exists())

    if obstacle := _write_obstacle(nearest):
        raise StorageError(
            f"{house}: not a folder that can be written to",
            why=f"{nearest} is {obstacle}",
            hint="name another one with --dir",
        )


def _write_obstacle(path: Path) -> str:
    """Return what keeps a folder from being written to, "" if nothing does."""
    if not path.is_dir():
        return "a file"

    # os.access lets root write into /proc and /sys; such file systems have no blocks.
    is_writable = os.access(path, os.W_OK) and os.statvfs(path).f_blocks
    return "" if is_writable else "read-only"


def check_room(house: Path, filename: str) -> Texts:
    """Return the names of the wheels that a wheel called ``filename`` would replace.

    A build calls this before its long work. Raises UsageError if the wheel cannot be added because
    of another one, SourceError if the name is malformed, StorageError if nothing can be written
    into the folder.
    """
    check_folder(house)
    return _find_outdated(house, WheelName(filename))


def add_wheel(
    house: Path,
    wheel: Path,
    facts: Facts,
    *,
    say: Say = lambda _line: None,
) -> Path:
    """Put a finished wheel into the wheelhouse and the manifest; return its path there.

    ``facts`` are what the builder states about it (JSON). An older build of the same version, and a
    dependency of the same project, are replaced; ``say`` is called with a line for each. Raises
    UsageError if the wheel cannot be added because of another one, SourceError if it is damaged,
    StorageError for I/O, BusyError if another process keeps the folder locked for a minute.
    """
    name = WheelName(wheel.name)
    with open_for_writing(house):
        listed = listed_manifest(house)
        outdated = _find_outdated(house, name)
        leaving = {*outdated, name}
        staying = [entry for entry in listed.wheels if entry.name not in leaving]

        # What is checked and committed is a copy, since the original may change in between.
        with stage_copy(house, wheel) as copy:
            for fault in find_faults(copy):
                what = f"{wheel}: {fault}"
                why = "the wheel is damaged"
                raise SourceError(what, why=why, hint="build it again")

            fresh = ManifestEntry(
                name=name,
                sha256=sha256_of(copy),
                size=copy.stat().st_size,
                facts=facts,
            )
            after = replace(listed, wheels=(*staying, fresh))
            commit_files(house, write_documents(after), outdated, {name: copy})

    for filename in outdated:
        is_stock = filename in _dependencies(listed)
        replaced = "a dependency" if is_stock else f"an older build of {name.pinned}"
        say(f"{filename}: {replaced}, replaced")

    return house / name


def replace_dependencies(
    house: Path,
    before: Manifest,
    fresh: Collection[ManifestEntry],
    sources: Collection[Path],
) -> None:
    """Replace the dependencies of a wheelhouse by ``fresh`` ones, all or nothing.

    ``before`` is the manifest for whose built wheels and overrides they were resolved. ``sources``
    are the files that are not in the folder yet, on the same file system. Raises BusyError if a
    built wheel or an override changed since ``before``.
    """
    with open_for_writing(house):
        listed = listed_manifest(house)
        # Resolving takes long and leaves the wheelhouse unlocked, so a build may have changed it.
        if _decisions(listed) != _decisions(before):
            raise BusyError(
                f"{house}: its wheels changed while their dependencies were resolved",
                why="a build put a wheel there, one was dropped, or a pin was overridden",
                hint=f"{wheelhouse_command('fill', house)}; once more",
            )

        after = replace(listed, wheels=(*listed.built, *fresh))
        held = {entry.name for entry in after.wheels if entry.held}
        gone = [entry.name for entry in listed.wheels if entry.name not in held]
        arriving = {source.name: source for source in sources}
        commit_files(house, write_documents(after), gone, arriving)


def _decisions(manifest: Manifest) -> set[object]:
    """Return what decides which dependencies are needed: the overrides and the built wheels."""
    built = {(entry.name, entry.sha256) for entry in manifest.built}
    return {*manifest.overrides, *built}


def known_wheels(house: Path) -> list[WheelName]:
    """Return the name of every wheel that is listed or in the folder."""
    names = [entry.name for entry in listed_manifest(house).wheels]
    for path in sorted(house.glob("*.whl")):
        with contextlib.suppress(SourceError):  # no wheel has such a name
            names.append(WheelName(path.name))
    return list(dict.fromkeys(names))


def _find_outdated(house: Path, new: WheelName) -> Texts:
    """Return the file names of the wheels that a new wheel replaces.

    Dependencies and older builds are replaced. Raises UsageError if another wheel of the same
    project and CPU is in the way.
    """
    dependencies = _dependencies(listed_manifest(house))
    outdated = []

    for old in known_wheels(house):
        if not rivals(new, old):
            continue
        if old in dependencies or _is_older_build(new, old):
            outdated.append(old)
            continue

        drop = wheelhouse_command("prune", house, "--drop", old)
        raise UsageError(
            f"{house} holds {old}; {new} cannot be added",
            why=f"pip, given both, finds no {new.project} to install (ResolutionImpossible)",
            hint=f"{drop}; or build into another folder",
        )

    return tuple(outdated)


def _dependencies(manifest: Manifest) -> set[str]:
    return {entry.name for entry in manifest.dependencies}


def _is_older_build(new: WheelName, old: WheelName) -> bool:
    is_same_release = new.version.public == old.version.public
    return is_same_release and device_of(new) == device_of(old)
