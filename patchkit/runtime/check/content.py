"""Hold what a file says literally: its variables, the servers it starts, its images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from patchkit.finding import Finding
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.rule import Situation
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.runtime.rules.variable_values import is_placeholder

ENV = "env file"
SHELL = "shell script"
YAML = "YAML"
DOCKERFILE = "Dockerfile"
UNIT = "systemd unit"
PYTHON = "Python program"
RUNNING = "running"  # no file: what a process was started with

SERVE = "vllm serve"
RAY = "ray start"

_SHOWN = 60  # characters of a name or a value
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")

# Left for a shell, for whoever fills a template in, or for the orchestrator.
_OPEN = re.compile(r"[$`]|\{[{%]|\{[A-Za-z_]\w*\}")

# A tag that is a variable, which may be anything: ${TAG:-latest}, $TAG.
_OPEN_TAG = re.compile(r":(?:\$\{[^}]*\}|\$\w+)$")


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

    @property
    def repository(self) -> str:
        """Return the name without tag and digest: ``vllm/vllm-openai``."""
        return self._split()[0]

    @property
    def tag(self) -> str:
        """Return the tag, "" if there is none or a variable is the tag."""
        return self._split()[1]

    @property
    def row(self) -> Mapping[str, str]:
        """Return the row of said.toml about the repository, {} if there is none."""
        for row in read_env_data("said")["image"]:
            if re.fullmatch(row["repository"], self.repository):
                return dict(row)
        return {}

    @property
    def is_upstream(self) -> bool:
        """Return whether the vLLM in it is upstream's own."""
        upstream = read_env_data("said")["server"]["upstream"]
        return self.repository.removeprefix("docker.io/") in upstream

    def _split(self) -> tuple[str, str]:
        name = _OPEN_TAG.sub("", self.text).partition("@")[0]
        repository, colon, tag = name.rpartition(":")

        # A colon before a slash is that of a port.
        if colon and "/" not in tag:
            return repository, tag

        return name, ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A variable that is set; ``is_private``: a script sets it for itself, in no environment.

    ``block`` is the line of what it belongs to (a service, a command, a line in a branch), 0 for
    the whole file.
    """

    line: int
    name: str
    value: str
    block: int = 0
    is_private: bool = False

    @property
    def is_literal(self) -> bool:
        """Return whether the file has the value itself."""
        return is_literal(self.value)

    @property
    def is_given(self) -> bool:
        """Return whether the value can be checked: known, and not still to be filled in."""
        if not self.value or not self.is_literal:
            return False
        return not is_placeholder(self.name, self.value)

    @property
    def shown(self) -> str:
        """Return ``NAME=value`` for messages, without the value of a secret."""
        return mask_secrets(f"{shorten(self.name)}={shorten(self.value)}")


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag of a command, as it is ``written``; ``value`` is empty if there is none or it is open.

    ``kept_in`` is the variable that keeps it for a script, "" where a command has it.
    """

    written: str
    name: str
    value: str
    line: int
    kept_in: str = ""

    @property
    def shown(self) -> str:
        """Return flag and value for messages, without a secret."""
        shown = mask_secrets(f"{shorten(self.written)} {shorten(self.value)}".strip())

        return f"{shown} of {shorten(self.kept_in)}" if self.kept_in else shown


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A server that is started, and its words; it has the variables of its block and of block 0.

    ``program`` is SERVE or RAY. ``kept_in`` is the variable that keeps the words for a script,
    which may start it or not.
    """

    program: str
    words: tuple[Word, ...]
    line: int
    block: int = 0
    kept_in: str = ""

    @cached_property
    def flags(self) -> tuple[GivenFlag, ...]:
        """Return ``--flag value``, ``--flag=value`` and ``--flag`` in their order, up to ``--``."""
        flags = []
        next_words = (*self.words[1:], Word("--", 0))

        for word, next_word in zip(self.words, next_words, strict=False):
            if word.text == "--":
                break

            written, sign, value = word.text.partition("=")
            if not _FLAG.fullmatch(written):
                continue

            # A word that begins with a dash is the next flag, not a value.
            is_value = next_word.text != "--" and not _FLAG.match(next_word.text)
            if not sign and is_value:
                value = next_word.text

            long_name = read_env_data("said")["short"].get(written, written)
            flag = GivenFlag(
                written=written,
                name=long_name.replace("_", "-"),
                value=value if is_literal(value) else "",
                line=word.line,
                kept_in=self.kept_in,
            )
            flags.append(flag)

        return tuple(flags)

    @cached_property
    def flag_names(self) -> frozenset[str]:
        """Return the names of all flags."""
        return frozenset(flag.name for flag in self.flags)

    @property
    def has_parser_plugin(self) -> bool:
        """Return whether a plugin brings parsers of its own."""
        return any(name.endswith("-parser-plugin") for name in self.flag_names)

    def find_flag(self, name: str) -> GivenFlag | None:
        """Return the last flag of a name, which is the one that counts; None if it is not given."""
        for flag in reversed(self.flags):
            if flag.name == name:
                return flag
        return None


@dataclass
class FileContent:
    """What a file says, in the order of its lines.

    ``kind`` is a constant of this module; ``variables`` are all that are set; ``passed`` are names
    that get the caller's value; ``problems`` say what could not be read.
    """

    kind: str
    variables: list[Assignment] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)
    commands: list[CommandLine] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    @property
    def assignments(self) -> list[Assignment]:
        """Return the variables of the environment, without a script's private ones."""
        return [variable for variable in self.variables if not variable.is_private]

    @property
    def literals(self) -> list[Assignment]:
        """Return the variables of the environment whose values stand in the file."""
        return [variable for variable in self.assignments if variable.is_literal]

    @property
    def flags(self) -> list[GivenFlag]:
        """Return the flags of all commands."""
        return [flag for command in self.commands for flag in command.flags]


@dataclass(frozen=True, slots=True)
class StatedVersion:
    """A version that a file states: ``project`` is vllm, nccl, torch …; ``text`` the place."""

    project: str
    version: str
    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class CheckedText:
    """A text with its name, what it says, and what is known of the machine that uses it.

    ``text`` is empty for what runs; ``mode`` are a file's rights, 0 where there is no file.
    ``host`` is the machine that is to use the text, None for any. ``home`` is the folder of the
    host's vLLM, whose names count instead of those of the version in ``situation``.
    """

    where: str
    content: FileContent
    text: str = ""
    mode: int = 0
    versions: Sequence[StatedVersion] = ()
    situation: Situation = field(default_factory=dict)
    host: Host | None = None
    home: Path | None = None

    @property
    def vllm(self) -> str:
        """Return the release of vLLM that it is checked against, "" for any."""
        return self.situation.get("vllm", "")

    @property
    def role(self) -> str:
        """Return the role of the node that uses it, "" if it is not known."""
        return self.situation.get("role", "")

    @cached_property
    def upstream_by_block(self) -> Mapping[int, bool]:
        """Return block → whether all of its images are upstream's own; 0 is the whole file."""
        by_block: dict[int, bool] = {}

        for image in self.content.images:
            blocks = {image.block, 0} if is_literal(image.text) else {image.block}
            for block in blocks:
                by_block[block] = by_block.get(block, True) and image.is_upstream

        return by_block

    def runs_upstream(self, block: int = 0) -> bool | None:
        """Return whether upstream's own vLLM runs in a block; None if the file does not say it."""
        return self.upstream_by_block.get(block, self.upstream_by_block.get(0))
