"""Find the key of a server by reference: it stands in no argument, since those are seen by all."""

from __future__ import annotations

import contextlib
import os
import shlex
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from patchkit.errors import PatchkitError, UsageError
from patchkit.quoting import visible
from patchkit.reading import read_text

SECRETS = "~/.config/patchkit/secrets.env"
KEY = "VLLM_API_KEY"


def find_key(key_file: str) -> tuple[str, str]:
    """Return the server's key and where it was found: the file that the unit reads, or here.

    "" for none, and for one that no header can hold.
    """
    with contextlib.suppress(PatchkitError, OSError, ValueError):
        path = Path(key_file).expanduser()
        for line in read_text(path, limit=1 << 16).splitlines() if path.is_file() else ():
            name, sign, value = line.strip().partition("=")
            if sign and name.strip() == KEY:
                return _usable(" ".join(shlex.split(value))), key_file
    key = os.environ.get(KEY, "")
    return _usable(key), "the environment" if key else ""


def key_for(url: str, variable: str = "") -> str:
    """Return the key for a server, "" for none: of the variable, else of where keys usually are.

    The key of `patchkit up` goes to this machine alone. Raises UsageError for a variable without a
    key.
    """
    if variable:
        if key := _usable(os.environ.get(variable, "")):
            return key
        raise UsageError(
            f"{visible(variable)} holds no key",
            why="the variable is not set, or has characters that no header can hold",
            hint="give the name of the variable, not the key, and export it before",
        )
    host = urlsplit(url).hostname or ""
    here = host == "localhost"
    with contextlib.suppress(ValueError):
        here = ip_address(host).is_loopback
    return find_key(SECRETS)[0] if here else _usable(os.environ.get(KEY, ""))


def _usable(key: str) -> str:
    return key if key.isascii() and key.isprintable() else ""
