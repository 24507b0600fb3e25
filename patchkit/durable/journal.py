"""Change many files, all or none; the next run takes an interrupted change back.

The folder of the journal holds ::

    new/           files that the caller prepares, to be committed by their paths
    before/N       the old content of the N-th file: a second name of it, or a copy
    after/N        its new content, with its owner, group and mode
    back.json      the journal: the steps, which the next run takes back

Everything is staged before the journal is written, and files move by renames, so that taking a
change back needs no disk space. Every step can be repeated: the sha256 of a file tells whether it
is as before or as after. One rename removes the journal, and that commits the change.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Literal

from patchkit.digests import Digest, digest, sha256_of
from patchkit.durable.atomic import sync
from patchkit.durable.paths import (
    PlainPath,
    file_digest,
    is_file,
    is_plain,
    place_inside,
    place_of,
)
from patchkit.durable.signals import committed, deferred, undeferred
from patchkit.durable.staging import make_folders, second_name, write_staged
from patchkit.errors import (
    NOTHING,
    DriftError,
    PatchkitError,
    SourceError,
    StorageError,
    UsageError,
    reason,
    translated,
)
from patchkit.frozen import Texts, frozen, positional
from patchkit.quoting import quoted
from patchkit.reading import read_bytes
from patchkit.records import RecordError, read_json

_LARGEST = 16 << 20  # bytes of a journal; that of 10,000 files is a fifth of it


@positional
class Change:
    """The change of one file; ``path`` is relative to the root.

    ``before`` is the sha256 that the file must have, "" if there must be no file. ``after`` is the
    new content, or a file on the same file system that holds it; None removes the file.
    """

    path: str
    before: str
    after: bytes | Path | None


@positional
class FileChange:
    """The change of one file in a journal: sha256 before and after, "" for no file."""

    path: PlainPath
    before: Digest
    after: Digest


@positional
class Steps:
    """The content of a journal; ``folders`` are the folders that the change makes."""

    steps: tuple[FileChange, ...]
    folders: tuple[PlainPath, ...]
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        """Raise ValueError if a file is named twice."""
        if len({step.path for step in self.steps}) < len(self.steps):
            raise ValueError("a file is named twice")


@frozen
class Journal:
    """The journal of a root, in a folder below it. The caller holds the root's lock.

    ``again`` is the command that takes an interrupted change back, ``rescue`` the command that
    helps if the journal itself is damaged. ``allowed`` tells which paths a journal may name. Empty
    folders at and below ``home`` are removed.
    """

    root: Path
    folder: Path
    again: str
    rescue: str
    allowed: Callable[[str], bool] = is_plain
    home: Path | None = None

    def unfinished(self) -> Path | None:
        """Return the file of the journal if a change was interrupted, else None."""
        place = self.folder / "back.json"
        # lexists: a link of that name counts as a journal, and is refused when it is read.
        return place if os.path.lexists(place) else None

    def check_finished(self) -> None:
        """Raise StorageError if a change was interrupted: some files may be old and others new."""
        if self.unfinished():
            raise StorageError(
                f"{self.folder}: an earlier patchkit run was cut short in mid-commit",
                why="it was killed, or the disk failed",
                hint=f"take it back first: {self.again}",
            )

    def commit(self, changes: Sequence[Change]) -> None:
        """Make all changes or none.

        Raises DriftError if a file is not as ``before`` says, StorageError if a file cannot be
        written or an earlier change was interrupted. After an error nothing is changed; if files
        could not be restored, the error names them.
        """
        if not changes:
            return

        self.check_finished()
        self._check_folder()
        with deferred():
            with translated():
                try:
                    with undeferred():
                        steps = self._stage(changes)
                except BaseException:
                    self._clear()
                    raise

            try:
                (self.folder / "draft").rename(self.folder / "back.json")
                sync(self.folder)
                self._carry_out(steps)
                self._clear()
            except BaseException as error:
                self._give_up(steps, error)
                raise

            count = len(steps.steps)
            files = f"{count} file{'' if count == 1 else 's'}"
            committed(f"the commit was finished, {files}", self.root)

    def recover(self) -> None:
        """Take an interrupted change back, and remove what was only staged.

        Raises, before any file is touched, DriftError if a file was edited since, StorageError if
        the journal or a staged file is damaged.
        """
        with deferred(), translated("an interrupted commit is still unfinished"):
            self._check_folder()
            journal = self.unfinished()
            if journal is None:
                self._clear()  # staged without a journal: no file was changed
                return

            steps = self._read_steps(journal)
            self._check_possible(steps)
            self._put_back(steps)
            self._clear()
            committed("an interrupted commit was taken back")

    def _read_steps(self, journal: Path) -> Steps:
        try:
            # follow=False: patchkit writes no link there, so one is somebody else's.
            data = read_bytes(journal, limit=_LARGEST, follow=False)
            steps = read_json(Steps, data)

            for step in steps.steps:
                if not self.allowed(step.path):
                    what = f"{step.path!r} is not a file that patchkit changes here"
                    raise RecordError(what)
        except (UsageError, SourceError, RecordError) as error:
            what = str(error).partition("\n")[0].removeprefix(f"{journal}: ")
            raise self._damaged(f"{journal}: cannot be understood: {what}") from None

        return steps

    def _check_folder(self) -> None:
        """Raise SourceError if a link leads to the journal's folder."""
        place_inside(self.root, self.folder.relative_to(self.root).as_posix())

    def discard(self, to: Path) -> None:
        """Move the journal's folder to the new path ``to``, if there is one.

        This is for a journal that cannot be read.
        """
        with translated():
            self._check_folder()
            shutil.rmtree(f"{self.folder}.gone", ignore_errors=True)
            if self.folder.exists():
                make_folders(to.parent)
                self.folder.rename(to)

    def clear_staged(self) -> None:
        """Remove what was only staged, unless a change was interrupted. Raises OSError."""
        if not self.unfinished():
            self._clear()

    # Staging: nothing outside of the journal's folder is touched.

    def _stage(self, changes: Sequence[Change]) -> Steps:
        for side in ("before", "after"):
            shutil.rmtree(self.folder / side, ignore_errors=True)
            make_folders(self.folder / side)
        (self.folder / "draft").unlink(missing_ok=True)

        steps = [self._stage_change(n, change) for n, change in enumerate(changes)]
        staged = Steps(tuple(steps), self._new_folders(changes))
        draft = json.dumps(asdict(staged), indent=1).encode()
        write_staged(self.folder / "draft", BytesIO(draft), None, self.root)

        # These names must be on the disk before the journal is: it depends on them.
        for folder in (self.folder / "before", self.folder / "after", self.folder):
            sync(folder)
        return staged

    def _stage_change(self, number: int, change: Change) -> FileChange:
        place = place_of(self.root, change.path)
        if file_digest(place) != change.before:
            raise _changed_meanwhile(change.path)
        # Root may write anywhere; a file without a write bit is still not meant to be written.
        if change.before and not place.stat().st_mode & 0o222:
            raise StorageError(
                f"{change.path}: is read-only; {NOTHING}",
                hint=quoted("chmod", "u+w", place),
            )
        self._check_disk(place)

        old = None
        if change.before:
            # It takes no space, and the rename that replaces the file leaves it alone.
            second_name(place, self.folder / "before" / str(number))
            old = place.stat()

        result = self.folder / "after" / str(number)
        if isinstance(change.after, Path):
            second_name(change.after, result)
            return FileChange(change.path, change.before, sha256_of(result))
        if change.after is not None:
            write_staged(result, BytesIO(change.after), old, _nearest_folder(place))
        return FileChange(change.path, change.before, digest(change.after))

    def _new_folders(self, changes: Sequence[Change]) -> Texts:
        """Return the folders that the changes make, relative to the root, outer ones first."""
        folders: set[Path] = set()
        for change in changes:
            if change.after is not None:
                folders.update((self.root / change.path).parents)

        made = [f for f in folders if self.root in f.parents and not f.exists()]
        return tuple(
            sorted(folder.relative_to(self.root).as_posix() for folder in made)
        )

    def _check_disk(self, place: Path) -> None:
        # Files are replaced by renames, which work only within one file system.
        if _nearest_folder(place).stat().st_dev != self.root.stat().st_dev:
            raise StorageError(
                f"{place}: lies on another file system than {self.root}; {NOTHING}",
                why="what is there cannot be replaced together with the other files",
                hint=f"unmount what is mounted below {self.root}",
            )

    def _carry_out(self, steps: Steps) -> None:
        """Bring every file to its ``after``. A file that has this content already stays.

        Raises DriftError if another program changed a file after it was staged.
        """
        touched = set()
        for number, step in enumerate(steps.steps):
            place = place_of(self.root, step.path)
            present = file_digest(place)
            # Checked again: another program may have changed the file during staging.
            if present not in (step.before, step.after):
                raise _changed_meanwhile(step.path)
            if present == step.after:
                continue

            if step.after:
                make_folders(place.parent)
                (self.folder / "after" / str(number)).rename(place)
            else:
                place.unlink()
            touched.add(place.parent)

        for folder in touched:
            sync(folder)

    # The way back.

    def _give_up(self, steps: Steps, error: BaseException) -> None:
        """Take everything back after ``error``; raise an OSError as a StorageError.

        If files cannot be taken back, the journal is kept, and the error that is raised names them.
        """
        try:
            self._put_back(steps)
            self._clear()
        except (OSError, PatchkitError) as worse:
            kind = type(error) if isinstance(error, PatchkitError) else StorageError
            cause = _words_of(error) or type(error).__name__
            raise kind(
                f"{cause}; and taking it back failed, too: {_words_of(worse)}\n"
                f"  {self._describe_files(steps)}; the rest is as before",
                why=f"{self.folder} has what is needed to go on",
                hint=f"once the cause is mended: {self.again}",
            ) from error

        if isinstance(error, OSError):
            with translated():
                raise error

    def _describe_files(self, steps: Steps) -> str:
        """Return a text with the files that are changed, and those whose state is unknown."""
        changed = []
        unknown = []
        for step in steps.steps:
            present = None
            with contextlib.suppress(OSError, PatchkitError):
                present = file_digest(place_of(self.root, step.path))
            if present == step.before:
                continue
            if present == step.after:
                changed.append(step.path)
            else:
                unknown.append(step.path)

        text = f"{len(changed)} of {len(steps.steps)} files changed"
        if changed:
            text += f": {', '.join(changed)}"
        if unknown:
            text += f"; unknown: {', '.join(unknown)}"
        return text

    def _put_back(self, steps: Steps) -> None:
        """Bring every file that has its ``after`` back to its ``before``; other files stay.

        All files are tried before the first failure is raised (OSError or PatchkitError).
        """
        failed: list[OSError | PatchkitError] = []
        touched = set()
        for number, step in reversed([*enumerate(steps.steps)]):
            try:
                place = place_of(self.root, step.path)
                if step.before == step.after or file_digest(place) != step.after:
                    continue

                if step.before:
                    (self.folder / "before" / str(number)).rename(place)
                else:
                    place.unlink()
                touched.add(place.parent)
            except (OSError, PatchkitError) as error:
                failed.append(error)

        if failed:
            raise failed[0]
        for folder in touched:
            sync(folder)

        # Sorted outer folders first, so in reverse the inner ones are removed first.
        for path in reversed(steps.folders):
            # OSError: the folder was never made, or it holds files of others.
            with contextlib.suppress(OSError):
                (self.root / path).rmdir()

    # Recovery after an interrupted run.

    def _check_possible(self, steps: Steps) -> None:
        """Raise unless every file can be taken back.

        Raises DriftError for a file that is neither as before nor as after, StorageError if the
        staged copy of an old file is damaged or gone.
        """
        edited = []
        lost = []
        for number, step in enumerate(steps.steps):
            place = place_of(self.root, step.path)
            self._check_disk(place)
            present = file_digest(place)
            if present not in (step.before, step.after):
                edited.append(step.path)
            if step.before not in ("", present):
                staged = self.folder / "before" / str(number)
                is_plain_file = is_file(staged) and not staged.parent.is_symlink()
                if not is_plain_file or sha256_of(staged) != step.before:
                    lost.append(step.path)

        if edited:
            raise DriftError(
                f"{', '.join(edited)}: edited since an interrupted run",
                why="patchkit was killed in mid-commit, and the file was changed afterwards",
                hint=f"bring the file back to one of those in {self.folder}, then run again; "
                f"or: {self.rescue}",
            )
        if lost:
            what = f"what was staged for {', '.join(lost)} is damaged or gone"
            raise self._damaged(f"{self.folder}: {what}")

    def _damaged(self, what: str) -> StorageError:
        return StorageError(
            f"{what}; an interrupted commit is still unfinished",
            why="somebody edited or removed files in patchkit's folder, or the disk is failing",
            hint=self.rescue,
        )

    def _clear(self) -> None:
        # One rename removes the journal at once; deleting its files could be interrupted half-way.
        gone = self.folder.with_name(f"{self.folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(gone)
            with contextlib.suppress(
                OSError
            ):  # too late to fail: the change is committed
                sync(self.folder.parent)
            shutil.rmtree(gone, ignore_errors=True)

        if self.home is not None:
            for place, _, _ in os.walk(self.home, topdown=False):
                with contextlib.suppress(OSError):
                    if not os.listdir(place):  # noqa: PTH208
                        Path(place).rmdir()


def _changed_meanwhile(path: str) -> DriftError:
    return DriftError(
        f"{path}: changed while patchkit was working; nothing else was changed",
        why="another program wrote to it",
        hint="run the same command again",
    )


def _nearest_folder(place: Path) -> Path:
    """Return the innermost folder above a path that is there."""
    return next(folder for folder in place.parents if folder.is_dir())


def _words_of(error: BaseException) -> str:
    return reason(error) if isinstance(error, OSError) else getattr(error, "what", "")
