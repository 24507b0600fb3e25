"""State what a file says literally, and make findings with the words of findings.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from patchkit.errors import SourceError
from patchkit.finding import Finding, Level
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.runtime.rules.variable_rules import Avoid, VariableAdvice
from patchkit.runtime.rules.variable_values import is_placeholder

ENV, SHELL, YAML, DOCKERFILE = "env file", "shell script", "YAML", "Dockerfile"
RUNNING = "running"  # no file: what a process was started with
UNIT, PYTHON = "systemd unit", "Python program"
_SHOWN = 60  # characters of a name or a value
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
_SHORT_FLAGS = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-n": "--nnodes",
}
# Left for a shell, for whoever fills a template in, or for the orchestrator.
_OPEN = re.compile(r"[$`]|\{[{%]|\{[A-Za-z_]\w*\}")


def is_literal(text: str) -> bool:
    """Return whether a text is the value itself: nothing expands it or fills it in."""
    return _OPEN.search(text) is None


def shorten(text: str) -> str:
    """Return a text as messages show it: cut if it is too long for a line."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, without quotes, and the line where it begins."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Image:
    """The name of a container image; ``block`` is that of the container's variables."""

    text: str
    line: int
    block: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """A variable that is set; ``own``: by a script for itself, in no environment.

    ``block`` is the line that it belongs to (a service, a command, a line in a branch), 0 for the
    whole file.
    """

    line: int
    name: str
    value: str
    block: int = 0
    own: bool = False

    @property
    def is_known(self) -> bool:
        return is_literal(self.value)

    @property
    def is_given(self) -> bool:
        """Return whether the value can be checked: known, and not still to be filled in."""
        return bool(self.value) and self.is_known and not is_placeholder(self.name, self.value)

    @property
    def shown(self) -> str:
        """Return ``NAME=value`` for messages, without the value of a secret."""
        return mask_secrets(f"{shorten(self.name)}={shorten(self.value)}")


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag of a command, as it is ``written``; an empty value is none, or not known."""

    written: str
    name: str
    value: str
    line: int

    @property
    def shown(self) -> str:
        """Return flag and value for messages, without a secret."""
        return mask_secrets(f"{shorten(self.written)} {shorten(self.value)}".strip())


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A server that is started, and its words; it has the variables of its block and of block 0."""

    program: str
    words: tuple[Word, ...]
    line: int
    block: int = 0

    @cached_property
    def flags(self) -> tuple[GivenFlag, ...]:
        """Return ``--flag value``, ``--flag=value`` and ``--flag`` in their order, up to ``--``."""
        found = []
        for word, following in zip(self.words, (*self.words[1:], Word("--", 0)), strict=False):
            if word.text == "--":
                break
            name, sign, value = word.text.partition("=")
            if not _FLAG.fullmatch(name):
                continue
            # A word that begins with a dash is the next flag, not a value.
            if not sign and following.text != "--" and not _FLAG.match(following.text):
                value = following.text
            long = _SHORT_FLAGS.get(name, name).replace("_", "-")
            found.append(GivenFlag(name, long, value if is_literal(value) else "", word.line))
        return tuple(found)

    def find_flag(self, name: str) -> GivenFlag | None:
        """Return the last flag of a name, which is the one that counts; None if it is not given."""
        return next((flag for flag in reversed(self.flags) if flag.name == name), None)


@dataclass
class FileContent:
    """What a file says, in the order of its lines. ``problems`` say what could not be read.

    ``kind`` is one of the words above; ``passed`` are names that get the caller's value.
    """

    kind: str
    assignments: list[Assignment] = field(default_factory=list)
    own: list[Assignment] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)
    commands: list[CommandLine] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    def add_variable(self, assignment: Assignment) -> None:
        """Add a variable that is set."""
        (self.own if assignment.own else self.assignments).append(assignment)


@cache
def load_messages() -> Mapping[str, Mapping[str, str]]:
    """Return the messages by id."""
    return read_toml(dict[str, dict[str, str]], RECIPES / "env" / "findings.toml")


def build_finding(
    key: str, place: int | Assignment | GivenFlag, level: Level | None = None, **fields: object
) -> Finding:
    """Return a finding about a line, a variable or a flag; ``level`` instead of the table's."""
    message = load_messages()[key]
    line, about = (place, "") if isinstance(place, int) else (place.line, place.name)
    if not isinstance(place, int):
        fields = {"shown": place.shown, "name": about, **fields}
    words = {part: text.format(**fields) for part, text in message.items() if part != "level"}
    level = level or Level(message["level"])
    return Finding(id=key, line=line, about=about, level=level, kind=SourceError, **words)


def rule_finding(
    rule: Avoid | VariableAdvice, line: int, what: str, why: str, about: str = ""
) -> Finding:
    """Return a finding of a rule, with its id and its words."""
    words = {"what": what, "why": why, "hint": rule.instead, "source": rule.source, "about": about}
    return Finding(id=rule.id, line=line, level=Level(rule.severity), kind=SourceError, **words)
