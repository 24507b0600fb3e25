"""Make findings about nodes from the texts in recipes/doctor, with commands that run there."""

from __future__ import annotations

from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.finding import (
    Finding,
    Level,
    finding_from_text,
    finding_texts,
)

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
