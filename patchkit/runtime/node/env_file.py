"""Read an env file of patchkit for another verb or node: checked, unedited unless accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HashMismatchError, SourceError
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.runtime.envfile.header import check_facts, head_facts, is_untouched
from patchkit.runtime.envfile.parse import lines_of, parse
from patchkit.runtime.envfile.syntax import Format

# What the first line of every such file says; those of several nodes have `head` as well.
_FACTS = ("role", "topology", "executor", "vllm", "nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFile:
    """``facts`` of the first line (``role``, ``topology`` …) and the variables.

    ``edited``: the digest is not that of the text, and the user accepts it.
    """

    where: str
    facts: Mapping[str, str]
    variables: Mapping[str, str]
    lines: Mapping[str, int]
    edited: bool

    @property
    def role(self) -> str:
        return self.facts["role"]

    @property
    def extra(self) -> dict[str, str]:
        """Return the variables that a user set there, against the rules or beside them."""
        asked = self.ids("set")
        return {name: value for name, value in self.variables.items() if name in asked}

    def ids(self, fact: str) -> frozenset[str]:
        """Return the names that a fact lists: ``set``, ``with`` or ``without``."""
        return frozenset(filter(None, self.facts.get(fact, "").split(",")))


def read_env_file(path: Path, *, accept_edited: bool = False) -> EnvFile:
    """Return an env file that patchkit wrote, for a node of any role.

    Raises UsageError if there is no such file, SourceError if patchkit did not write it or a fact
    is missing or malformed, HashMismatchError if it was edited, unless that is accepted.
    """
    text = read_text(path, hint="copy it from the head, or write it with `patchkit env`")
    return env_file(text, str(path), accept_edited=accept_edited)


def env_file(text: str, where: str, *, accept_edited: bool = False) -> EnvFile:
    """Return what a text in an env file says; raises as ``read_env_file`` does."""
    facts = head_facts(text)
    needed = _FACTS if facts.get("role") == "single" else (*_FACTS, "head")
    if missing := [name for name in needed if not facts.get(name)]:
        raise SourceError(
            f"{where}: is not an env file of patchkit",
            why=f"its first line does not say {', '.join(missing)}",
            hint="write one on the head: patchkit env --role head -o head.env",
        )
    edited = not is_untouched(text)
    if edited and not accept_edited:
        raise HashMismatchError(
            f"{where}: was edited after patchkit wrote it: the digest in its first line is not "
            "that of the text",
            why="a line was added, changed or removed, by a person, a program or on the way here",
            hint="write it anew where it comes from; or read it "
            f"({quoted('patchkit', 'check', Path(where))}), then add --accept-edited",
        )
    check_facts(facts, where)
    return EnvFile(
        where=where,
        facts=facts,
        variables=parse(Format(facts.get("format", Format.ENV)), text, where),
        lines=lines_of(text),
        edited=edited,
    )
