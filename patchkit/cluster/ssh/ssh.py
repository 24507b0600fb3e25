"""Make the words of ssh commands; turn failures of ssh and of nodes into errors and findings.

ssh reads the user's own configuration. It asks no question, and gives up a dead link.
"""

from patchkit import errors
from patchkit.errors import HostError, PatchkitError, StorageError, UsageError
from patchkit.finding import (
    Finding,
    Level,
    finding_from_text,
    finding_texts,
)
from patchkit.follow import Completed
from patchkit.frozen import Texts, Values, frozen
from patchkit.quoting import quoted
from patchkit.records import RECIPES, RecordError, read_toml, record

HERE = "localhost"
"""The destination that stands for this machine, where ssh is not used."""

TOOLS = RECIPES / "units/tools.toml"
TOOL_WORDS = read_toml(dict[str, Texts], TOOLS, key="words")
"""Program → words of each call."""

_DID_NOT_CONNECT = 255  # exit status of ssh itself; others are the command's
_NOT_FOUND = 127  # of a shell that has no such program
_CAUSES = read_toml(
    tuple[dict[str, str], ...], RECIPES / "doctor/ssh.toml", key="cause"
)


def ssh_words(destination: str, *options: str) -> Texts:
    """Return the words of an ssh command up to the remote command.

    ``options`` come before the usual ones, since ssh takes the first value of each option. Raises
    UsageError for a wrong destination.
    """
    check_destination(destination)
    return ("ssh", "-T", *options, *TOOL_WORDS["ssh"], "--", destination)


def check_destination(destination: str) -> None:
    """Raise UsageError for a text that ssh would not read as a host."""
    # A dash begins an option, and -oProxyCommand=… runs a program.
    is_option = destination.startswith("-")
    is_word = destination.isprintable() and " " not in destination
    if is_option or not destination or not is_word:
        raise UsageError(
            f"{destination!r} is not a host", hint="write it as for ssh: user@host"
        )


def ssh_command(node: str, *words: str) -> str:
    """Return a command line to paste on this machine that runs these words on a node."""
    if node == HERE:
        return quoted(*words)
    return quoted("ssh", "-t", node, quoted(*words)) if words else quoted("ssh", node)


def ssh_error(done: Completed, destination: str) -> PatchkitError:
    """Return the error of a failed ssh command, with a hint."""
    if not done.started:
        message = f"{done.command[0]} {done.trouble}"
        return HostError(message, hint="sudo apt install openssh-client")

    lines = (done.errors.strip() or done.trouble).split("\n")
    if done.status not in (None, _DID_NOT_CONNECT):
        message = lines[-1] if done.status == _NOT_FOUND else done.trouble
        return HostError(
            f"{destination}: {message}",
            why="the login shell there, or Python 3.11 or later, which patchkit needs, did not run",
            hint=ssh_command(destination, "python3", "--version"),
        )

    if done.status is None:
        lines = [done.trouble]
    line = min(reversed(lines), key=_find_cause).strip("@ ")
    reason, hint = explain_failure(line, destination)
    return HostError(f"{destination}: {line}", why=reason, hint=hint)


def _find_cause(line: str) -> int:
    """Return the number of the first cause whose text is in a line; the last one fits all lines."""
    return next(number for number, cause in enumerate(_CAUSES) if cause["text"] in line)


def explain_failure(line: str, destination: str) -> tuple[str, str]:
    """Return the cause of a line that ssh printed about a destination, and a hint."""
    cause = _CAUSES[_find_cause(line)]
    return cause["why"], cause["hint"].format(node=quoted(destination))


_LONGEST = 2000  # characters of a text from a node


@frozen
class _SentError:
    kind: str
    what: str
    why: str = ""
    hint: str = ""


def error_fields(error: PatchkitError) -> Values:
    """Return an error as an object of JSON, as ``sent_error`` reads it."""
    kind = type(error).__name__
    return {"kind": kind, "what": error.what, "why": error.why, "hint": error.hint}


def sent_error(fields: object, where: str) -> PatchkitError:
    """Return the error that a node sent, with the name of the node before its text.

    The hint of the node becomes part of ``why``. Our own hint is never a command that a node sent:
    the node may be another machine than it should be. Return HostError if ``fields`` are no error.
    """
    try:
        sent = record(_SentError, fields)
    except RecordError as error:
        look = ssh_command(where, "python3", "-V")
        return HostError(f"{where}: an answer that does not fit: {error}", hint=look)

    kind = _error_kind(sent.kind)
    if where == HERE:
        return kind(f"{where}: {sent.what}", why=sent.why, hint=sent.hint)

    message = _one_line(sent.what)
    reason = _one_line(sent.why)
    advice = _one_line(sent.hint)
    if kind is StorageError:
        reason = reason or advice
        if "No space left" in message:
            reason = "the disk there is full"
        look = ssh_command(where, "df", "-h", ".")
        return kind(f"{where}: {message}", why=reason, hint=look)

    if advice:
        advice = f"{where} advises: {advice}"
    reason = "; ".join(filter(None, (reason, advice)))
    return kind(f"{where}: {message}", why=reason, hint=ssh_command(where))


def _error_kind(name: str) -> type[PatchkitError]:
    """Return the class of error with this name, HostError for an unknown name."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, PatchkitError):
        return kind
    return HostError


def _one_line(text: str) -> str:
    """Return a text as one line, without the backticks that mark a command."""
    return " ".join(text[:_LONGEST].replace("`", "'").split())


_TEXT_FILES = (
    "peers.toml",
    "survey.toml",
    "machine.toml",
    "images.toml",
    "nccl.toml",
    "server.toml",
    "gpu.toml",
    "boot.toml",
    "bandwidth.toml",
)


def _file_of(about: str) -> str:
    return next(name for name in _TEXT_FILES if about in finding_texts(name))


def make_finding(about: str, where: str, **fields: object) -> Finding:
    """Return the finding with the id ``about``; ``fields`` fill in its text.

    The field ``command``, unless given, is made from the words of a command that the text has. It
    runs on the node ``where``, or on that of the field ``node``.
    """
    file = _file_of(about)
    run = finding_texts(file)[about].run
    if run and "command" not in fields:
        words = [word.format_map(fields) for word in run]
        fields["command"] = ssh_command(str(fields.get("node", where)), *words)

    return finding_from_text(file, about, where, **fields)


def make_fine(about: str, where: str, **fields: object) -> Finding:
    """Return the finding that nothing is wrong; ``fields`` fill in the text of ``about``."""
    text = finding_texts(_file_of(about))[about]
    return Finding(
        level=Level.OK,
        where=where,
        about=about,
        what=text.fine.format_map(fields),
        source=text.source.format_map(fields),
    )


def unchecked(
    about: str,
    where: str,
    reason: str,
    hint: str = "",
) -> Finding:
    """Return the finding that a check was not made, with the reason."""
    return Finding(
        level=Level.UNKNOWN,
        where=where,
        about=about,
        what=f"not checked: {reason}",
        hint=hint,
    )
