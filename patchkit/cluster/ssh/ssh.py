"""Name the words of an ssh command, and the errors of ssh and of nodes.

The user's own configuration counts; no question is asked, and a dead link ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from patchkit import errors
from patchkit.errors import HostError, PatchkitError, StorageError, UsageError
from patchkit.follow import Completed
from patchkit.quoting import quoted
from patchkit.records import RecordError, record

HERE = "localhost"
"""The destination that means this machine, without ssh."""

_BATCH = (
    *("-o", "BatchMode=yes"),  # no question in the middle
    *("-o", "ConnectTimeout=10"),  # seconds
    # Seconds and tries: a cut cable is found out after 15 s, not after TCP's quarter of an hour.
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
    # What the user's configuration forwards is for logins: a node needs neither keys nor screen.
    *("-o", "ClearAllForwardings=yes"),
    *("-o", "ForwardAgent=no"),
    *("-o", "ForwardX11=no"),
    *("-o", "Tunnel=no"),
    *("-o", "RemoteCommand=none"),  # beside one, ssh takes no command of its caller
)
_DID_NOT_CONNECT = 255  # ssh's own exit status; others are the command's
_NO_KEY = (
    "a host key is never accepted unseen, and this one is not known, "
    "or another one than before"
)
_OFF = "no sshd answers there: switched off, another network, frozen, or a firewall"
_HANGS = "sshd answers, and then nothing: a login script, a home on a network, or a frozen disk"
# What ssh says, why that is, and what to do; {node} is the destination, quoted.
_CAUSES = (
    (
        "IDENTIFICATION HAS CHANGED",
        _NO_KEY,
        "ask its owner; then `ssh-keygen -R {node}`",
    ),
    (
        "Host key verification failed",
        _NO_KEY,
        "compare its key once by hand: `ssh {node}`",
    ),
    (
        "Permission denied",
        "ssh has to log in without a password",
        "`ssh-copy-id {node}`",
    ),
    (
        "Could not resolve hostname",
        "no such name here",
        "correct it, or add it to ~/.ssh/config",
    ),
    (
        "Connection refused",
        "no sshd listens there",
        "at its console: `sudo systemctl start ssh`",
    ),
    ("no sign of life", _HANGS, "see where the login stops: `ssh -v {node} true`"),
    ("", _OFF, "`ssh {node} true`, `ping {node}`"),
)


def ssh_words(destination: str, *options: str) -> tuple[str, ...]:
    """Return the words up to the remote command. Raises UsageError for what is no destination.

    The first word about an option counts for ssh: ``options`` stand before those of every command.
    """
    check_destination(destination)
    return ("ssh", "-T", *options, *_BATCH, "--", destination)


def check_destination(destination: str) -> None:
    """Raise UsageError for what ssh would not take for a host."""
    # A dash begins an option, and -oProxyCommand=… runs a program.
    bad = (
        not destination or destination.startswith("-") or not destination.isprintable()
    )
    if bad or " " in destination:
        raise UsageError(
            f"{destination!r} is not a host", hint="write it as for ssh: user@host"
        )


def ssh_command(node: str, *words: str) -> str:
    """Return a command line that runs these words on a node, to paste here."""
    if node == HERE:
        return quoted(*words)
    return quoted("ssh", "-t", node, quoted(*words)) if words else quoted("ssh", node)


def ssh_error(done: Completed, destination: str) -> PatchkitError:
    """Return what went wrong between here and the node, with what to do about it."""
    if not done.started:
        return HostError(
            f"{done.command[0]} {done.trouble}", hint="sudo apt install openssh-client"
        )
    lines = (done.errors.strip() or done.trouble).split("\n")
    if done.status not in (None, _DID_NOT_CONNECT):
        missing = done.status == 127
        return HostError(
            f"{destination}: {lines[-1] if missing else done.trouble}",
            why="the login shell there, or Python 3.11 or later, which patchkit needs, did not run",
            hint=ssh_command(destination, "python3", "--version"),
        )
    known = (line for text, *_ in _CAUSES[:-1] for line in lines if text in line)
    line = done.trouble if done.status is None else next(known, lines[-1]).strip("@ ")
    why, hint = advice(line, destination)
    return HostError(f"{destination}: {line}", why=why, hint=hint)


def advice(line: str, destination: str) -> tuple[str, str]:
    """Return why ssh says this of a destination, and what to do."""
    why, hint = next((why, hint) for text, why, hint in _CAUSES if text in line)
    return why, hint.format(node=quoted(destination))


_LONGEST = 2000  # characters of a text of a node's


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentError:
    kind: str
    what: str
    why: str = ""
    hint: str = ""


def error_fields(error: PatchkitError) -> dict[str, str]:
    """Return an error as JSON takes it."""
    kind = type(error).__name__
    return {"kind": kind, "what": error.what, "why": error.why, "hint": error.hint}


def sent_error(fields: object, where: str) -> PatchkitError:
    """Return the error that a node sent; its text begins with the node's name.

    What the node advises is shown as its words: the next step is never a command of a node's, which
    may be another machine than it should be.
    """
    try:
        sent = record(_SentError, fields)
    except RecordError as error:
        look = ssh_command(where, "python3", "-V")
        return HostError(f"{where}: an answer that does not fit: {error}", hint=look)
    kind = getattr(errors, sent.kind, HostError)
    if not (isinstance(kind, type) and issubclass(kind, PatchkitError)):
        kind = HostError
    if where == HERE:
        return kind(f"{where}: {sent.what}", why=sent.why, hint=sent.hint)
    # One line each, without marks of a command.
    what, why, hint = (
        " ".join(text[:_LONGEST].replace("`", "'").split())
        for text in (sent.what, sent.why, sent.hint)
    )
    if kind is StorageError:
        full = "the disk there is full" if "No space left" in what else ""
        return kind(
            f"{where}: {what}",
            why=full or why or hint,
            hint=ssh_command(where, "df", "-h", "."),
        )
    why = "; ".join(filter(None, (why, hint and f"{where} advises: {hint}")))
    return kind(f"{where}: {what}", why=why, hint=ssh_command(where))
