"""Get the facts of the other end: from a file, or from `patchkit probe --json` there by ssh."""

from __future__ import annotations

from pathlib import Path

from patchkit.errors import HostError, UsageError
from patchkit.process import attempt
from patchkit.reading import read_text
from patchkit.runtime.host.host import Host, from_json

_HINTS = {  # by ssh's exit status, and the shell's there
    127: "name it: --ssh-patchkit /path/to/bin/patchkit",
    255: "ssh must work without a password: ssh-copy-id; or use --peer-probe FILE",
}
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")  # no prompt; seconds


def from_file(path: Path) -> Host:
    """Return the facts in a file.

    Raises UsageError if there is none, SourceError if it holds something else, StorageError if it
    cannot be read.
    """
    text = read_text(path, hint="write it on the peer: patchkit probe --json > peer.json")
    return from_json(text, str(path))


def from_ssh(destination: str, patchkit: str) -> Host:
    """Ask the peer itself; ``patchkit`` is the command there. Raises HostError with ssh's words."""
    # ssh would take it for an option, and -oProxyCommand=… runs a program.
    if destination.startswith("-"):
        raise UsageError(f"--ssh {destination}: is not a host", hint="--ssh user@host")
    command = ["ssh", *_OPTIONS, "--", destination, f"{patchkit} probe --json"]
    done = attempt(*command)
    if done.trouble:
        hint = (
            "use --peer-probe FILE"
            if not done.started
            else _HINTS.get(done.status or 0, "run that command by hand")
        )
        raise done.error(HostError, hint=hint)
    return from_json(done.output, f"`patchkit probe --json` on {destination}")
