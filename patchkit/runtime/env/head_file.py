"""The env file of a head as a worker reads it: checked, and unedited unless that is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HashMismatchError, SourceError
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.runtime.envfile.facts import check_facts
from patchkit.runtime.envfile.header import head_facts, untouched
from patchkit.runtime.envfile.parse import lines_of, parse
from patchkit.runtime.envfile.syntax import Format

_FACTS = ("topology", "executor", "vllm", "nodes", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFile:
    """``facts`` of its first line (``role``, ``topology`` …) and its variables.

    ``edited``: the digest is not that of the text, and the user accepts it.
    """

    where: str
    facts: Mapping[str, str]
    variables: Mapping[str, str]
    lines: Mapping[str, int]
    edited: bool

    @property
    def extra(self) -> dict[str, str]:
        """What a user set on the head, against the rules or beside them."""
        asked = _ids(self.facts.get("set", ""))
        return {name: value for name, value in self.variables.items() if name in asked}

    @property
    def wanted(self) -> frozenset[str]:
        return _ids(self.facts.get("with", ""))

    @property
    def unwanted(self) -> frozenset[str]:
        return _ids(self.facts.get("without", ""))

    def line(self, name: str) -> int:
        """Return the line that sets a variable."""
        return self.lines.get(name, 1)


def _ids(text: str) -> frozenset[str]:
    return frozenset(filter(None, text.split(",")))


def read_head(path: Path, *, accept_edited: bool = False) -> HeadFile:
    """Return the file of a head.

    Raises UsageError if there is no such file, SourceError if it is not a head's or a fact of it is
    malformed, HashMismatchError if it was edited, unless that is accepted.
    """
    text = read_text(path, hint="copy it from the head")
    facts = head_facts(text)
    if facts.get("role") != "head" or any(not facts.get(key) for key in _FACTS):
        raise SourceError(
            f"{path}: is not the env file of a head",
            why=f"its first line says role={facts.get('role') or '(nothing)'}",
            hint="write one on the head: patchkit env --role head -o head.env",
        )
    edited = check_digest(text, path, accept_edited=accept_edited)
    check_facts(facts, str(path))
    kind = Format(facts.get("format", Format.ENV))
    variables = parse(kind, text, str(path))
    return HeadFile(
        where=str(path),
        facts=facts,
        variables=variables,
        lines=lines_of(text),
        edited=edited,
    )


def check_digest(text: str, path: Path, *, accept_edited: bool) -> bool:
    """Return whether a file of patchkit was edited. Raises HashMismatchError unless accepted."""
    edited = not untouched(text)
    if edited and not accept_edited:
        raise HashMismatchError(
            f"{path}: was edited after patchkit wrote it: the digest in its first line is not that "
            "of the text",
            why="a line was added, changed or removed, by a person, a program or on the way here",
            hint="write it anew where it comes from; or read it "
            f"({quoted('patchkit', 'env', 'check', path)}), then add --accept-edited",
        )
    return edited
