"""Name the ways in which patchkit refuses or fails, each with an exit code of its own.

Scripts may rely on the codes: a code is never reused for another kind.
0 is success (including "already done"); 1 is left to bugs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

NOTHING = "nothing was changed"
_HINT = "check permissions and free space, then run the same command again"


class PatchkitError(Exception):
    """A failure that patchkit can explain.

    ``what`` says what happened and where, ``why`` the likely cause, ``hint`` what to do next.
    ``document`` is what a verb has told before it failed, for --json.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint
        self.document: dict[str, object] = {}

    def __str__(self) -> str:
        text = self.what
        if self.why:
            text += f"\n  why:  {self.why}"
        if self.hint:
            text += f"\n  next: {self.hint}"
        return text


class UsageError(PatchkitError):
    """The request itself makes no sense: unknown fix, bare arch, a path where no file is."""

    exit_code = 2


class SourceError(PatchkitError):
    """The tree, archive or package is not one that patchkit recognises or supports."""

    exit_code = 3


class DriftError(PatchkitError):
    """The code is not what a fix expects: an anchor is missing, altered or ambiguous.

    ``without`` are the fixes that the same command can leave out, and then works.
    """

    exit_code = 4
    without: tuple[str, ...] = ()


class AbsentError(DriftError):
    """The subject of a fix is not in the code at all: neither as expected nor in another form."""


class ProofError(PatchkitError):
    """The edits went in but their effect is not the one promised."""

    exit_code = 5


class BusyError(PatchkitError):
    """Another patchkit process is working on the same tree."""

    exit_code = 6


class StorageError(PatchkitError):
    """Reading, writing or downloading failed: permissions, full disk, network."""

    exit_code = 7


class HashMismatchError(PatchkitError):
    """Bytes are not the ones that the lock or the ledger names."""

    exit_code = 8


class HostError(PatchkitError):
    """This machine lacks what the request needs: a GPU, an importable vLLM, enough memory."""

    exit_code = 9


class BuildError(PatchkitError):
    """A compiler or a build tool failed; its own words are in the log that is named."""

    exit_code = 10


class RecipeError(PatchkitError):
    """A file of patchkit's own recipes is not what patchkit can read: a fix with a typo."""

    exit_code = 11


@contextlib.contextmanager
def translated(
    outcome: str = NOTHING,
    at: Path | None = None,
    hint: str = _HINT,
) -> Iterator[None]:
    """Raise an OSError as a StorageError that says the ``outcome`` of the work, and what to do.

    ``at`` is named if the error itself names no file.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{reason(error, at)}; {outcome}", hint=hint) from error


def reason(error: OSError, at: Path | None = None) -> str:
    """Return the text of an OSError: ``FILE: No space left on device``."""
    # shutil has a list of rows (source, target, words); the first will do.
    if error.args and isinstance(error.args[0], list):
        return str(error.args[0][0][2])
    # filename2 is the target of a rename or a link.
    where = error.filename2 or error.filename or at or "writing"
    return f"{where}: {error.strerror or error}"
