"""Write an env file as a whole, and never replace a file that somebody else wrote or edited."""

from __future__ import annotations

import stat
from pathlib import Path

from patchkit.durable.atomic import replacing, status_of_file
from patchkit.errors import UsageError, translated
from patchkit.reading import read_bytes
from patchkit.runtime.envfile.env_file import is_untouched
from patchkit.runtime.rules.secret_texts import mask_secrets

_PRIVATE = 0o600


def write(
    path: Path, text: str, *, force: bool, private: bool, by: str = "patchkit env"
) -> str:
    """Write a file, all or nothing, and return "created", "unchanged" or "replaced".

    An existing file keeps its mode, but with ``private`` only its owner may read the file. ``by``
    is the command that writes, for the message. Raise UsageError, with the difference, if the
    existing file was not written by patchkit or was edited since, unless ``force`` is set. Raise
    UsageError in any case if the path is a link or another thing that is no file. Raise
    StorageError if the file cannot be written; then nothing has changed.
    """
    with translated(at=path):
        status = status_of_file(path)
        # Do not follow a link: since the check of the status the path may have become one.
        old = read_bytes(path, follow=False) if status else b""

        # A file with the same bytes is written again if others may read the secret in it.
        is_too_open = private and status and stat.S_IMODE(status.st_mode) & ~_PRIVATE

        if status and old == text.encode() and not is_too_open:
            return "unchanged"

        if status and not force:
            _check_replaceable(path, old.decode(errors="replace"), text, by)

        with replacing(path, private=private) as file:
            file.write(text.encode())
    return "replaced" if status else "created"


def _check_replaceable(path: Path, old: str, new: str, by: str) -> None:
    """Raise UsageError, with the difference, if the old text is not patchkit's or was edited."""
    if old == new or is_untouched(old):
        return

    import difflib  # 5 ms, and seldom needed

    difference = difflib.unified_diff(
        mask_secrets(old).splitlines(),
        mask_secrets(new).splitlines(),
        str(path),
        by,
        lineterm="",
    )

    heading = f"{path}: is there already, with another content"
    raise UsageError(
        "\n".join([heading, *difference]),
        why="patchkit did not write it, or it was edited since",
        hint="--force replaces it; or name another file",
    )
