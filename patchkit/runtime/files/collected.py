"""Collect what the readers of the formats find in one file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import (
    Assignment,
    CommandLine,
    ContainerOptions,
    FileContent,
    FileKind,
    How,
    SaidVersion,
    Word,
)
from patchkit.runtime.files.value import Value, split
from patchkit.runtime.files.versions import (
    image_version,
    is_server_flag,
    named_image,
    requirement_versions,
    variable_version,
)

_Located = TypeVar("_Located", Assignment, CommandLine, Word, SaidVersion)
_LONGEST_OWN = 1_000  # characters of a script's own variable
_MOST_KEPT = 20_000  # words that a file may keep for commands, before it takes them
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Left for a reader of the file, or for a program that fills a template in.
_TEMPLATE = re.compile(r"[$`]|\{[{%]")


class Collected:
    """What was found so far. Readers add to it; nothing is ever taken away."""

    def __init__(self) -> None:
        self.assignments: list[Assignment] = []
        self.passed: list[Assignment] = []
        self.own: list[Assignment] = []
        self.defaults: list[Assignment] = []
        self.commands: list[CommandLine] = []
        self.containers: list[ContainerOptions] = []
        self.images: list[Word] = []
        self.problems: list[Finding] = []
        self.outer: dict[int, int] = {}
        self._left = _MOST_KEPT
        self._offered: list[Assignment] = []
        self._fragments: list[tuple[Word, ...]] = []

    @property
    def may_keep(self) -> bool:
        """Return whether words that no command takes are still looked at."""
        return self._left > 0

    def set(self, name: str, value: Value, line: int, how: How, block: int = 0) -> None:
        """Add a variable of the environment, or one that passes the caller's value on."""
        if not _NAME.fullmatch(name):
            return
        if _is_passed(name, value):
            self.pass_on(name, line, how, block)
            return
        self.assignments.append(_assignment(name, value, line, how, block))
        self._arguments(value)

    def pass_on(self, name: str, line: int, how: How, block: int = 0) -> None:
        """Add a variable that has the caller's value, if that has one."""
        if _NAME.fullmatch(name):
            why = "the caller's value"
            self.passed.append(
                Assignment(line, name, "", literal=False, block=block, how=how, why_unknown=why)
            )

    def offer(self, name: str, value: Value, line: int, block: int) -> None:
        """Add a variable that a file keeps for a container, unless a command there takes it."""
        self._left -= 1
        if self.may_keep:
            self._offered.append(_assignment(name, value, line, How.OPTION, block))

    def keep(self, name: str, value: Value, line: int, block: int = 0) -> None:
        """Add a variable of a script, which no other program sees."""
        if _NAME.fullmatch(name):
            kept = _assignment(name, value, line, How.OWN, block)
            # A text that grows line by line is not kept as a whole each time.
            self.own.append(replace(kept, value=kept.value[:_LONGEST_OWN]))
            self._arguments(value)

    def default(self, name: str, value: Value) -> None:
        """Add the value that ``${NAME:-value}`` gives a name."""
        if value.text and _NAME.fullmatch(name):
            each = _assignment(name, value.as_default(), value.line, How.DEFAULT, 0)
            self.defaults.append(each)

    def fragment(self, words: Iterable[Value]) -> None:
        """Add arguments that a file keeps for `vllm serve`, if they can be no other program's."""
        if not self.may_keep:
            return
        found = tuple(each.word() for each in words)
        self._left -= len(found)
        if any(is_server_flag(word.text.partition("=")[0]) for word in found):
            self._fragments.append(found)

    def _arguments(self, value: Value) -> None:
        if self.may_keep and value.text.lstrip().startswith("--"):
            self.fragment(split([(value, True)]))

    def _settle(self) -> None:
        """Add what is kept for a container or a server and no command of the file takes."""
        set_here = {(each.line, each.name) for each in self.assignments}
        self.assignments += [
            each for each in self._offered if (each.line, each.name) not in set_here
        ]
        taken = {(word.text, word.line) for each in self.commands for word in each.words}
        for words in self._fragments:
            if not any((word.text, word.line) in taken for word in words):
                line = words[0].line
                others = Word("", line, literal=False, several=True)
                every = (others, others, *words)
                self.commands.append(CommandLine(program="vllm serve", words=every, line=line))
        self._offered, self._fragments = [], []

    def problem(self, line: int, what: str) -> None:
        """Add what could not be read."""
        self.problems.append(
            Finding(
                line=line,
                level=Level.NOTE,
                what=f"not read: {what}",
                why="What a file says is checked as far as it can be read.",
            )
        )

    def add(self, other: Collected, lines: Sequence[int], block: int) -> None:
        """Add what a file says that this one writes; ``lines`` are those of its lines here."""

        def here(line: int) -> int:
            return lines[min(max(line, 1), len(lines)) - 1]

        def moved(assigned: Assignment) -> Assignment:
            inside = here(assigned.block) if assigned.block else block
            return replace(assigned, line=here(assigned.line), block=inside)

        other._settle()
        self.assignments += map(moved, other.assignments)
        self.passed += map(moved, other.passed)
        self.own += map(moved, other.own)
        self.defaults += map(moved, other.defaults)
        self.images += (replace(each, line=here(each.line)) for each in other.images)
        self.problems += (replace(each, line=here(each.line)) for each in other.problems)
        for command in other.commands:
            words = tuple(replace(each, line=here(each.line)) for each in command.words)
            inside = here(command.block) if command.block else block
            self.commands.append(
                replace(command, words=words, line=here(command.line), block=inside)
            )

    def content(self, kind: FileKind) -> FileContent:
        """Return all of it, in the order of the lines and without what was found twice."""
        self._settle()
        variables = (*self.own, *self.defaults, *self.assignments)
        self.images += filter(None, map(named_image, variables))
        versions = [
            *filter(None, map(image_version, self.images)),
            *(each for command in self.commands for each in requirement_versions(command)),
            *filter(None, map(variable_version, variables)),
        ]
        return FileContent(
            kind=kind,
            assignments=_in_order(self.assignments),
            passed=_in_order(self.passed),
            own=_in_order(self.own),
            defaults=_in_order(self.defaults),
            commands=_in_order(self.commands),
            containers=tuple(self.containers),
            images=_in_order(self.images),
            versions=_in_order(versions),
            problems=tuple(self.problems),
            outer=self.outer,
        )


def _is_passed(name: str, value: Value) -> bool:
    """Return whether a value is that which the caller has: ``${NAME:-}``, ``$NAME``."""
    if value.default and not value.text:
        return True
    return bool(value.why) and bool(re.fullmatch(rf"\$(\{{{name}[^{{}}]*\}}|{name})", value.text))


def _assignment(name: str, value: Value, line: int, how: How, block: int) -> Assignment:
    later = _TEMPLATE.search(value.text)
    why = value.why or (f"{later[0]} stands for something else" if later else "")
    return Assignment(
        line, name, value.text, not why, block, how, why_unknown=why, default=value.default
    )


def _in_order(found: Iterable[_Located]) -> tuple[_Located, ...]:
    return tuple(sorted(dict.fromkeys(found), key=lambda each: each.line))
