"""Read the version of a libnccl from its bytes."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

# Found as a literal first: a pattern over 300 MB of device code takes far longer.
_WORDS = b"NCCL version "
_VERSION = re.compile(rb"NCCL version (\d[\w.]*\+cuda[\d.]+)")


def nccl_version(place: Path) -> str:
    """Return ``2.30.7+cuda13.3``; "" if the file does not say, or cannot be read."""
    try:
        with place.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = data.find(_WORDS)
            while start >= 0:
                if match := _VERSION.match(data, start):
                    return match[1].decode()
                start = data.find(_WORDS, start + 1)
    except (OSError, ValueError):  # an empty file cannot be mapped
        pass
    return ""
