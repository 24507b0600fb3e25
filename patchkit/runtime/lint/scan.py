"""Name what the rules read of a file, until they take it from runtime/files themselves."""

from patchkit.runtime.files.content import Assignment, is_open, short
from patchkit.runtime.files.forms import Commands, Lines, is_env_file, scan, without_comment

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
