"""Landlock: which files a process may open from now on, and nothing else of the file system."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from patchkit.proof.seccomp import syscall

# LANDLOCK_ACCESS_FS_* of linux/landlock.h, by the bit.
_EXECUTE, _WRITE, _READ, _LIST = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_FIRST = (
    1 << 13
) - 1  # what the first version handles: also removing and making of each kind
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE
_VERSION = 1  # asks landlock_create_ruleset for the version alone
_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH


def version() -> int:
    """Return the version of Landlock's interface, 0 if the kernel has none or has it off."""
    try:
        return syscall("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return 0


def restrict(
    *,
    read: Iterable[Path] = (),
    write: Iterable[Path] = (),
    execute: Iterable[Path] = (),
) -> None:
    """Leave this process these files and folders, and no other. Raises OSError.

    Paths that do not exist are passed over. Needs no_new_privs or CAP_SYS_ADMIN.
    """
    found = version()
    rights = _FIRST
    # The kernel refuses a ruleset with a right that it does not know (EINVAL).
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL)):
        rights |= right if found >= since else 0
    attributes = struct.pack("Q", rights)
    if found >= 4:
        attributes += struct.pack("Q", 0b11)  # TCP: bind, connect
    if found >= 6:
        attributes += struct.pack("Q", 0b11)  # abstract sockets and signals of others
    ruleset = syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    for paths, given in (
        (read, _READ | _LIST),
        (write, _READ | _LIST | _WRITE | _TRUNCATE),
        (execute, _READ | _LIST | _EXECUTE),
    ):
        for path in paths:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            # For a file the kernel refuses the rights of folders (EINVAL).
            allowed = (
                given
                & rights
                & (-1 if stat.S_ISDIR(os.fstat(place).st_mode) else _OF_FILES)
            )
            # struct landlock_path_beneath_attr is packed: no bytes between or behind its fields.
            rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, place))
            syscall("landlock_add_rule", ruleset, _BENEATH, rule, 0)
            os.close(place)
    syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)
