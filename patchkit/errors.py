"""Define the errors with which patchkit refuses or fails, each with its own exit code.

Scripts may rely on the codes: a code is never reused for another kind of error. 0 is success
(including "already done"), and 1 is only for bugs.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

NOTHING = "nothing was changed"
_HINT = "check permissions and free space, then run the same command again"


class PatchkitError(Exception):
    """A failure that patchkit can explain.

    ``what`` says what happened and where, ``why`` the likely cause, ``hint`` what to do next.
    ``document`` holds the results that a command had before it failed, for --json.
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
    """The request itself is wrong: an unknown fix, an arch without suffix, a path to nothing."""

    exit_code = 2


class SourceError(PatchkitError):
    """The tree, archive or package is not one that patchkit recognises or supports."""

    exit_code = 3


class DriftError(PatchkitError):
    """The code is not what a fix expects: an anchor is missing, altered or ambiguous.

    ``without`` are the fixes without which the same command works.
    """

    exit_code = 4
    without: tuple[str, ...] = ()


class MissingError(DriftError):
    """Code of a fix is nowhere: upstream may have it in another form, or not yet."""


class AbsentError(MissingError):
    """The subject of a fix is not in the code at all: neither as expected nor in another form."""


class ProofError(PatchkitError):
    """The effect of edits, or the contents of a wheel, are not what they have to be."""

    exit_code = 5


class BusyError(PatchkitError):
    """Another process of patchkit has locked the same tree or folder."""

    exit_code = 6


class StorageError(PatchkitError):
    """Reading, writing or downloading failed: permissions, full disk, network."""

    exit_code = 7


class HashMismatchError(PatchkitError):
    """A file is not the one whose digest a lock, a ledger or a manifest names."""

    exit_code = 8


class HostError(PatchkitError):
    """This machine lacks what the request needs: a GPU, an importable vLLM, enough memory."""

    exit_code = 9


class BuildError(PatchkitError):
    """A compiler or a build tool failed; the error names the log with its output."""

    exit_code = 10


class RecipeError(PatchkitError):
    """A file of a recipe cannot be read, for example a fix with a typo."""

    exit_code = 11


@contextlib.contextmanager
def translated(
    outcome: str = NOTHING,
    at: Path | None = None,
    hint: str = _HINT,
) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError.

    ``outcome`` says what state the failure leaves, ``hint`` what to do. ``at`` is named if the
    OSError itself names no file.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{reason(error, at)}; {outcome}", hint=hint) from error


def reason(error: OSError, at: Path | None = None) -> str:
    """Return the text of an OSError: ``FILE: No space left on device``."""
    # shutil.Error has a list of rows (source, target, text); the first text is enough.
    if error.args and isinstance(error.args[0], list):
        return str(error.args[0][0][2])
    # filename2 is the target of a rename or a link.
    where = error.filename2 or error.filename or at
    text = error.strerror or str(error)
    return f"{where}: {text}" if where else text
