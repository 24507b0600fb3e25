"""The facts of the other end: from a file, or of `patchkit probe --json` there, by ssh."""

from __future__ import annotations

import subprocess
from pathlib import Path

from patchkit.errors import HostError, UsageError
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.runtime.host.host import Host, from_json

_SECONDS = 60
_NOT_FOUND, _NO_CONNECTION = 127, 255
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")  # keys, and no question


def from_file(path: Path) -> Host:
    """Return the facts in a file.

    Raises UsageError if there is none, SourceError if it holds something else, StorageError if it
    cannot be read.
    """
    text = read_text(path, hint="write it on the peer: patchkit probe --json > peer.json")
    return from_json(text, str(path))


def from_ssh(destination: str, patchkit: str) -> Host:
    """Ask the peer itself; ``patchkit`` is the command there. Raises HostError with ssh's words."""
    if destination.startswith("-"):
        raise UsageError(f"--ssh {destination}: is no host", hint="--ssh user@host")
    command = ["ssh", *_OPTIONS, "--", destination, f"{patchkit} probe --json"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise HostError("`ssh` is not installed", hint="--peer-probe FILE does without") from None
    except subprocess.TimeoutExpired:
        raise HostError(f"`{quoted(*command)}` took more than {_SECONDS} s") from None
    if done.returncode:
        words = done.stderr.strip() or f"exit code {done.returncode}"
        raise HostError(f"`{quoted(*command)}` failed: {words}", hint=_hint(done.returncode))
    return from_json(done.stdout, f"`patchkit probe --json` on {destination}")


def _hint(code: int) -> str:
    if code == _NOT_FOUND:
        return "name it: --ssh-patchkit /path/to/bin/patchkit"
    if code == _NO_CONNECTION:
        return "ssh must work without a password: ssh-copy-id; or use --peer-probe FILE"
    return "run that command by hand"
