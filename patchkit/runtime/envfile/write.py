"""Write an env file: replaced as a whole, and never over somebody's work."""

from __future__ import annotations

import stat
from pathlib import Path

from patchkit.durable.atomic import replacing, status_of_file
from patchkit.errors import UsageError, translated
from patchkit.reading import read_bytes
from patchkit.runtime.envfile.header import is_untouched
from patchkit.runtime.rules.secret_texts import mask_secrets

_PRIVATE = 0o600


def write(
    path: Path, text: str, *, force: bool, private: bool, by: str = "patchkit env"
) -> str:
    """Write a file, all or nothing, and return what was done: created, unchanged or replaced.

    ``private`` takes the rights of others away, ``by`` is the verb that writes. A file that is
    there keeps its mode. Raises UsageError, with the difference, for one that patchkit did not
    write or that was edited since, unless ``force``; for a link and anything else that is not a
    file in any case; StorageError if the disk or the rights fail, and then nothing has changed.
    """
    with translated(at=path):
        status = status_of_file(path)
        # Not followed: the path could have become a link since then.
        old = read_bytes(path, follow=False) if status else b""

        # The same bytes are no reason to leave a secret readable for others.
        is_too_open = private and status and stat.S_IMODE(status.st_mode) & ~_PRIVATE

        if status and old == text.encode() and not is_too_open:
            return "unchanged"

        if status and not force:
            _check_replaceable(path, old.decode(errors="replace"), text, by)

        with replacing(path, private=private) as file:
            file.write(text.encode())
    return "replaced" if status else "created"


def _check_replaceable(path: Path, old: str, new: str, by: str) -> None:
    """Raise UsageError, with the difference, for a text that patchkit does not replace."""
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
