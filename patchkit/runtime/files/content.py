"""State what a file says: the variables that it sets, the commands that it runs, its versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from patchkit.finding import Finding, Level
from patchkit.runtime.rules.secret_texts import mask_secrets

_SHOWN = 60  # characters of a name or a value
# Placeholders: <address>, {head}, your-token, HEAD_IP, xxx, ….
_OPEN = re.compile(r"<.*>|\{.*\}|(?i:.*(your|example|placeholder|changeme|_ip\b|ip_|xxx).*|x+|\.+)")
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
_ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")


class FileKind(StrEnum):
    """What a file is read as."""

    ENV = "env file"
    SHELL = "shell script"
    YAML = "YAML"
    JSON = "JSON"
    DOCKERFILE = "Dockerfile"
    SYSTEMD = "systemd unit"
    PYTHON = "Python"


class How(StrEnum):
    """How a variable is set."""

    LINE = "line of an env file"
    EXPORT = "export"  # also declare -x, typeset -x, and what stands behind set -a
    PREFIX = "prefix"  # NAME=value before a command, and env NAME=value command
    OPTION = "option"  # -e or --env of docker and podman
    MAPPING = "mapping"  # environment: of compose, env: of Kubernetes and of recipes
    ENV = "ENV"  # of a Dockerfile
    UNIT = "Environment="  # of a systemd unit
    CODE = "os.environ"  # of Python
    OWN = "own variable"  # of a script, a Dockerfile's ARG: no environment
    DEFAULT = "default"  # ${NAME:-value}


@dataclass(frozen=True, slots=True)
class Assignment:
    """A variable that is set. ``literal``: a reader needs no shell to know the value.

    ``block`` is the line that it belongs to (a branch, a service, a command), 0 for the whole file.
    ``why_unknown`` says why the value is not known, if it is not; ``value`` is then as written.
    ``default``: the value holds only if the caller, or another line, gives no other one.
    """

    line: int
    name: str
    value: str
    literal: bool = True
    block: int = 0
    how: How = How.LINE
    why_unknown: str = ""
    default: bool = False

    @property
    def is_given(self) -> bool:
        """Return whether the value can be checked: known, and not still to be filled in."""
        return self.literal and bool(self.value) and not is_open(self.value)

    @property
    def shown(self) -> str:
        """Return ``NAME=value`` for messages, without the value of a secret."""
        return mask_secrets(f"{short(self.name)}={short(self.value)}")

    def error(self, what: str, *, why: str, hint: str, source: str = "") -> Finding:
        """Return what is wrong with it."""
        return Finding(
            line=self.line, about=self.name, what=what, why=why, hint=hint, source=source
        )

    def warning(self, what: str, *, why: str, hint: str, source: str = "") -> Finding:
        """Return what is likely harmful in it."""
        return replace(self.error(what, why=why, hint=hint, source=source), level=Level.WARNING)


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, without quotes; as written if its value is not known.

    ``several``: the word stands for any number of words that are not known, as ``$OPTIONS`` does.
    """

    text: str
    line: int
    literal: bool = True
    several: bool = False
    default: bool = False


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag of a command with its value: ``""`` if it has none, as written if it is not known.

    ``value_line`` is where the value stands: at the flag, or where a variable has it from.
    """

    name: str
    value: str
    line: int
    literal: bool = True
    default: bool = False
    value_line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A program that a file runs, without what wraps it (exec, nohup, ssh, docker run IMAGE).

    ``program`` is its name and the verbs that decide what the words mean: ``vllm serve``, also for
    ``python -m vllm.entrypoints.openai.api_server`` and for what an image of vLLM gets; ``ray
    start``; ``""`` if the name is not known. ``words`` are what follows. ``image`` is the container
    image that it runs in, as far as it is known. ``block`` is the service, the branch or the
    command that it is of; assignments of the same block, and those of block 0, are in its
    environment.
    """

    program: str
    words: tuple[Word, ...]
    line: int
    image: str = ""
    block: int = 0

    @property
    def is_whole(self) -> bool:
        """Return whether all words are there: no variable stands for further ones.

        A variable behind a flag is taken for its value, and the first word for the model.
        """
        return not any(
            word.several and not _FLAG.fullmatch(before.text)
            for before, word in pairwise(self.words)
        )

    @property
    def flags(self) -> Iterator[GivenFlag]:
        """Yield ``--flag value``, ``--flag=value`` and ``--flag`` in their order, up to ``--``."""
        # A word that begins with a dash is the next flag, not a value.
        for number, word in enumerate(self.words):
            if word.text == "--":
                return
            name, sign, value = word.text.partition("=")
            if not _FLAG.fullmatch(name) or word.several:
                continue
            if sign:
                yield GivenFlag(name, value, word.line, word.literal, word.default, word.line)
                continue
            after = self.words[number + 1] if number + 1 < len(self.words) else None
            if after is None or after.text == "--" or _FLAG.match(after.text):
                yield GivenFlag(name, "", word.line)
            else:
                yield GivenFlag(
                    name, after.text, word.line, after.literal, after.default, after.line
                )

    def flag(self, name: str) -> GivenFlag | None:
        """Return the last flag of a name, which is the one that counts; None if it is not given."""
        return next((each for each in reversed(list(self.flags)) if each.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """State how a container is started: options of docker run, and what compose says likewise.

    ``program`` is docker, podman or compose; ``block`` that of what runs in it. ``is_whole``: no
    variable stands for further options.
    """

    program: str
    options: tuple[tuple[str, str], ...]
    line: int
    block: int
    is_whole: bool = True

    def has(self, name: str, part: str = "") -> bool:
        """Return whether an option is there, with a text in its value or with one unknown."""
        return any(each == name and (part in value or "$" in value) for each, value in self.options)


@dataclass(frozen=True, slots=True)
class SaidVersion:
    """A version that a file states: ``project`` is vllm, nccl, torch, ray …; ``text`` the place."""

    project: str
    version: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """What a file says, each in the order of the lines.

    ``assignments`` make an environment. ``passed`` are variables that get the caller's value or
    none at all (``-e NAME``, ``${NAME:-}``), ``own`` variables of a script and a Dockerfile's ARG,
    ``defaults`` what ``${NAME:-value}`` gives a name wherever it stands. ``images`` are the
    container images that are named. ``problems`` say what could not be read, and where. ``outer``
    is the block that a block lies in, if that is not the whole file.
    """

    kind: FileKind
    assignments: tuple[Assignment, ...] = ()
    passed: tuple[Assignment, ...] = ()
    own: tuple[Assignment, ...] = ()
    defaults: tuple[Assignment, ...] = ()
    commands: tuple[CommandLine, ...] = ()
    containers: tuple[ContainerOptions, ...] = ()
    images: tuple[Word, ...] = ()
    versions: tuple[SaidVersion, ...] = ()
    problems: tuple[Finding, ...] = ()
    outer: Mapping[int, int] = field(default_factory=dict)

    def version(self, project: str) -> SaidVersion | None:
        """Return the version that the file says of a project; None if it says none, or two."""
        said = {each.version: each for each in reversed(self.versions) if each.project == project}
        return next(iter(said.values())) if len(said) == 1 else None

    def environment(self, command: CommandLine) -> dict[str, Assignment]:
        """Return the variables of a command by name, as far as the file sets them."""
        blocks = self.blocks(command)
        return {each.name: each for each in self.assignments if each.block in blocks}

    def blocks(self, command: CommandLine) -> set[int]:
        """Return the block of a command, those around it, and 0 for the whole file."""
        blocks, block = {0}, command.block
        while block not in blocks:
            blocks.add(block)
            block = self.outer.get(block, 0)
        return blocks

    @property
    def addresses(self) -> tuple[Word, ...]:
        """Return the IPv4 addresses in the file that are another node's or this one's."""
        texts = [
            *((each.value, each.line) for each in (*self.assignments, *self.own, *self.defaults)),
            *((word.text, word.line) for command in self.commands for word in command.words),
        ]
        found = {
            Word(match[0], line)
            for text, line in texts
            for match in _ADDRESS.finditer(text)
            if not match[0].startswith(("127.", "0."))
        }
        return tuple(sorted(found, key=lambda word: word.line))


def short(text: str) -> str:
    """Return a text as messages show it: cut if it is too long for a line."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def is_open(value: str) -> bool:
    """Return whether a value stands for one that is still to be filled in."""
    return _OPEN.fullmatch(value) is not None
