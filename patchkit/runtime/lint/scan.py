"""Name what the rules read of a file, until they take it from runtime/files themselves."""

from patchkit.runtime.files.content import Assignment, is_open, short
from patchkit.runtime.files.forms import Commands, Lines, is_env_file, without_comment
from patchkit.runtime.formats.read import read_content

__all__ = [
    "Assignment",
    "Commands",
    "Lines",
    "is_env_file",
    "is_open",
    "scan",
    "short",
    "without_comment",
]


def scan(text: str, where: str) -> tuple[Assignment, ...]:
    """Return every variable of an environment that a file sets, in the order of the lines."""
    return read_content(text, where).assignments
