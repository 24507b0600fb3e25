"""Read the lines of the kernel's log that may tell of trouble."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from patchkit.process import attempt

_SECONDS = 3.0
_LINES, _LONGEST = 400, 500
_TROUBLE = (
    "NVRM|Xid|mlx5|AER:|PCIe Bus Error|Out of memory|oom-kill|oom_reaper|temperature above"
    "|critical temperature|I/O error|EXT4-fs error|segfault|Linux version"
)


class UnreadError(Exception):
    """A fact cannot be had, and why."""


def kernel_log() -> tuple[str, ...]:
    """Return the last of these lines of this boot, oldest first. Raises UnreadError.

    That there are none says something only of a log that may be read as a whole.
    """
    done = attempt("dmesg", "--time-format=iso", timeout=_SECONDS)
    if not done.trouble:
        return tuple(_picked(done.output))
    why = f"dmesg: {done.errors.strip() or done.trouble}".splitlines()[0]
    if not any(os.access(each, os.R_OK) for each in _system_journals()):
        raise UnreadError(f"{why}; the journal of the system is for root and the group adm")
    options = ("--dmesg", "--quiet", "--no-pager", "--output=short-iso")
    done = attempt("journalctl", *options, timeout=_SECONDS)
    if done.trouble or not done.output.strip():
        raise UnreadError(f"{why}; journalctl: {done.trouble or 'has no line of the kernel'}")
    return tuple(_picked(done.output))


def _system_journals() -> Iterator[Path]:
    for home in ("/var/log/journal", "/run/log/journal"):
        yield from Path(home).glob("*/system.journal")


def _picked(text: str) -> list[str]:
    found = (line[:_LONGEST] for line in text.splitlines() if re.search(_TROUBLE, line))
    return list(found)[-_LINES:]
