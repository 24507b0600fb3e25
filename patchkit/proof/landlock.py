"""Landlock: restrict this process to some files and folders of the file system."""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from patchkit.proof.seccomp import syscall

# Bits LANDLOCK_ACCESS_FS_* of linux/landlock.h.
_EXECUTE = 1 << 0
_WRITE = 1 << 1
_READ = 1 << 2
_LIST = 1 << 3
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL = 1 << 15
# All rights of the first version: these and the rights to remove and to make files.
_FIRST = (1 << 13) - 1
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE
_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION: return the version, create nothing
_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH


def version() -> int:
    """Return the version of Landlock's interface, 0 if the kernel has none or has it off."""
    try:
        return syscall("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return 0


def restrict(
    *,
    read: Iterable[Path],
    write: Iterable[Path],
    execute: Iterable[Path],
) -> None:
    """Take away this process's access to all files and folders but these.

    Paths that cannot be opened are skipped. Needs no_new_privs or CAP_SYS_ADMIN. Raises OSError if
    the kernel refuses.
    """
    interface = version()
    rights = _FIRST
    # The kernel refuses a ruleset with a right that it does not know (EINVAL).
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL)):
        if interface >= since:
            rights |= right

    attributes = struct.pack("Q", rights)
    if interface >= 4:
        attributes += struct.pack("Q", 0b11)  # TCP: bind, connect
    if interface >= 6:
        attributes += struct.pack("Q", 0b11)  # scope: abstract sockets, signals
    ruleset = syscall("landlock_create_ruleset", attributes, len(attributes), 0)

    for paths, granted in (
        (read, _READ | _LIST),
        (write, _READ | _LIST | _WRITE | _TRUNCATE),
        (execute, _READ | _LIST | _EXECUTE),
    ):
        for path in paths:
            _allow(ruleset, path, granted & rights)

    syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    """Grant rights on a file, or a folder and all below it; skip a path that cannot be opened."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return

    # On a file, the kernel refuses rights that only folders have (EINVAL).
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _OF_FILES
    # struct landlock_path_beneath_attr is packed: no bytes between or behind its fields.
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place))
    syscall("landlock_add_rule", ruleset, _BENEATH, rule, 0)
    os.close(place)
