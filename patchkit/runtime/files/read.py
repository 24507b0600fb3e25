"""Read what a file says: the one entry for all formats."""

from __future__ import annotations

from patchkit.runtime.files.content import FileContent, FileKind
from patchkit.runtime.files.forms import is_env_file, scan


def read_content(text: str, where: str) -> FileContent:
    """Return what a file says; ``where`` is its name, which tells formats apart.

    Nothing is run. What cannot be read is among the ``problems``; nothing is raised for a text.
    """
    kind = FileKind.ENV if is_env_file(text, where) else FileKind.SHELL
    return FileContent(kind=kind, assignments=scan(text, where))
