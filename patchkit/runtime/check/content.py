"""Hold what a file says literally, and what is known of its node, images and versions.

Findings have the words of findings.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from patchkit.errors import SourceError
from patchkit.finding import Finding, Level
from patchkit.runtime.envfile.header import fact_problems, head_facts
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.releases import read_env_data, release, within
from patchkit.runtime.rules.rule import Situation
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.runtime.rules.variable_rules import Avoid, VariableAdvice
from patchkit.runtime.rules.variable_values import is_placeholder
from patchkit.runtime.rules.variables import variable_table
from patchkit.target import DEFAULT_TARGET, targets

ENV, SHELL, YAML, DOCKERFILE = "env file", "shell script", "YAML", "Dockerfile"
RUNNING = "running"  # no file: what a process was started with
UNIT, PYTHON = "systemd unit", "Python program"
_SHOWN = 60  # characters of a name or a value
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
# Three numbers at least: v0.11 may be a branch, and 25.11 is a month.
_VERSION = r"v?(?P<version>\d+\.\d+\.\d+(?:\.post\d+|rc\d+|a\d+|b\d+)?(?:\.dev\d+)?)"
_TAG = re.compile(rf"{_VERSION}(?:[-_+].*)?")
_PINNED = re.compile(
    rf"(?<![\w.-])(?P<name>[A-Za-z][\w.-]{{0,40}})(?:\[[\w,-]*\])?==={{0,1}}{_VERSION}"
)
_FACTS = ("role", "topology", "executor", "vllm", "nccl", "nodes", "quantization")
_WORDS = ("what", "why", "hint", "source")
_SOFTWARE = ("vllm", "nccl", "torch", "triton")
# With one GPU in a node, more than one of these takes several nodes.
_COUNTS = ("--nnodes", "--tensor-parallel-size", "--pipeline-parallel-size")
_ONE_GPU = ("gb10", "thor")
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
    def is_given(self) -> bool:
        """Return whether the value can be checked: known, and not still to be filled in."""
        return (
            bool(self.value)
            and is_literal(self.value)
            and not is_placeholder(self.name, self.value)
        )

    @property
    def shown(self) -> str:
        """Return ``NAME=value`` for messages, without the value of a secret."""
        return mask_secrets(f"{shorten(self.name)}={shorten(self.value)}")


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag of a command, as it is ``written``; an empty value is none, or not known.

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

    ``kept_in`` is the variable that keeps the words for a script, which may start it or not.
    """

    program: str
    words: tuple[Word, ...]
    line: int
    block: int = 0
    kept_in: str = ""

    @cached_property
    def flags(self) -> tuple[GivenFlag, ...]:
        """Return ``--flag value``, ``--flag=value`` and ``--flag`` in their order, up to ``--``."""
        found = []
        for word, following in zip(
            self.words, (*self.words[1:], Word("--", 0)), strict=False
        ):
            if word.text == "--":
                break
            name, sign, value = word.text.partition("=")
            if not _FLAG.fullmatch(name):
                continue
            # A word that begins with a dash is the next flag, not a value.
            if not sign and following.text != "--" and not _FLAG.match(following.text):
                value = following.text
            long = read_env_data("said")["short"].get(name, name).replace("_", "-")
            literal = value if is_literal(value) else ""
            found.append(GivenFlag(name, long, literal, word.line, self.kept_in))
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


@dataclass(frozen=True, slots=True)
class StatedVersion:
    """A version that a file states: ``project`` is vllm, nccl, torch …; ``text`` the place."""

    project: str
    version: str
    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class CheckedText:
    """What is checked: a text with its name, what it says, and what is known of its machine.

    ``text`` is empty for what runs; ``mode`` are a file's rights. ``host`` is the machine that is
    to use it, None for any; ``home`` the folder of its vLLM, whose names count instead of those of
    the version in ``situation``.
    """

    where: str
    content: FileContent
    text: str = ""
    mode: int | None = None
    versions: Sequence[StatedVersion] = ()
    situation: Situation = field(default_factory=dict)
    host: Host | None = None
    home: Path | None = None

    @cached_property
    def upstream_by_block(self) -> Mapping[int, bool]:
        """Whether upstream's own vLLM runs in a block, where its image is known; 0: in the file."""
        found: dict[int, bool] = {}
        upstream = read_env_data("said")["server"]["upstream"]
        for image in self.content.images:
            name = find_image(image.text)[0].removeprefix("docker.io/")
            for block in {image.block, *([0] if is_literal(image.text) else [])}:
                found[block] = found.get(block, True) and name in upstream
        return found

    def runs_upstream(self, block: int = 0) -> bool | None:
        """Return whether upstream's own vLLM runs in a block; None if the file does not say it."""
        return self.upstream_by_block.get(block, self.upstream_by_block.get(0))


# What fills it in is not known: ${TAG:-latest}, $TAG.
_TAG_OF_A_VARIABLE = re.compile(r":(?:\$\{[^}]*\}|\$\w+)$")


def find_image(image: str) -> tuple[str, str, Mapping[str, str]]:
    """Return an image's name, its tag and its row; a colon before a slash is that of a port."""
    name, _, _digest = _TAG_OF_A_VARIABLE.sub("", image).partition("@")
    before, colon, tag = name.rpartition(":")
    name, tag = (before, tag) if colon and "/" not in tag else (name, "")
    rows = read_env_data("said")["image"]
    return (
        name,
        tag,
        next((row for row in rows if re.fullmatch(row["repository"], name)), {}),
    )


def _find_versions(text: str, content: FileContent) -> Iterator[StatedVersion]:
    """Yield what a file states: tags of images, and NAME==VERSION."""
    for image in content.images:
        _name, text_of_tag, row = find_image(image.text)
        tag = _TAG.fullmatch(text_of_tag)
        if row.get("version") and tag and within(tag["version"], row["versions"]):
            yield StatedVersion(row["version"], tag["version"], image.line, image.text)
    for number, row_text in enumerate(text.split("\n") if "==" in text else (), 1):
        for match in _PINNED.finditer(row_text.partition("#")[0]):
            distribution = re.sub(r"[-_.]+", "-", match["name"]).lower()
            if project := read_env_data("said")["distributions"].get(distribution):
                yield StatedVersion(project, match["version"], number, match[0])


def add_situation(
    checked: CheckedText, host: Host | None, asked: Mapping[str, str | None]
) -> CheckedText:
    """Add what is asked for, else said by the file's first line or its text, else found here.

    The target is a GB10 unless one is asked for or this host is another known device. A file that
    names a container image does not run with this host's software, and one that names several
    versions of a project is checked against any. Raises UsageError for a version that is none.
    """
    content = checked.content
    stated: dict[tuple[str, str], StatedVersion] = {}
    for version in sorted(
        _find_versions(checked.text, content), key=lambda row: row.line
    ):
        stated.setdefault((version.project, version.version), version)
    versions = [*stated.values(), *checked.versions]
    for name in _SOFTWARE:
        release(
            asked.get(name) or "0"
        )  # raises for what is no version, before any is compared
    found: dict[str, str] = {}
    if host:
        # An unknown device, as a laptop is one, says nothing of the machine that the file is for.
        target = host.target
        found["target"] = target if target in targets() else ""
        found["topology"] = "roce" if any(device.active for device in host.rdma) else ""
        found |= {} if content.images else host.versions
    for name in _SOFTWARE:
        known = [version.version for version in versions if version.project == name]
        if known:
            # Other images have tags of their own numbers.
            newest = release(variable_table("vllm").newest)
            is_vllm = variable_table("vllm").oldest <= release(known[0]) <= newest
            is_sure = len(known) == 1 and (name != "vllm" or is_vllm)
            found[name] = known[0] if is_sure else ""
    facts = head_facts(checked.text)
    wrong = fact_problems(facts)
    head = {name: facts[name] for name in _FACTS if name in facts and name not in wrong}
    situation = {"target": DEFAULT_TARGET}
    for source in (found, head, asked):
        situation |= {name: value for name, value in source.items() if value}
    counts = _COUNTS if situation["target"] in _ONE_GPU else _COUNTS[:1]
    flags = [flag for command in content.commands for flag in command.flags]
    ranks = [flag.value[:9] for flag in flags if flag.name in counts]
    joins = any(
        row.program == "ray start" and row.find_flag("--address")
        for row in content.commands
    )
    if joins or any(value.isdecimal() and int(value) > 1 for value in ranks):
        situation.setdefault("role", "head")
    home = host.vllm_home(situation.get("vllm", "")) if host else None
    return replace(
        checked, versions=versions, situation=situation, host=host, home=home
    )


def build_finding(
    key: str,
    place: int | Assignment | GivenFlag,
    level: Level | None = None,
    **fields: object,
) -> Finding:
    """Return a finding about a line, a variable or a flag; ``level`` instead of the table's."""
    message = read_env_data("findings")[key]
    line, about = (place, "") if isinstance(place, int) else (place.line, place.name)
    if not isinstance(place, int):
        fields = {"shown": place.shown, "name": about, **fields}
    words = {
        part: text.format(**fields) for part, text in message.items() if part in _WORDS
    }
    level = level or Level(message["level"])
    return Finding(
        id=key, line=line, about=about, level=level, kind=SourceError, **words
    )


def rule_finding(
    rule: Avoid | VariableAdvice, line: int, what: str, why: str, about: str = ""
) -> Finding:
    """Return a finding of a rule, with its id and its words."""
    words = {
        "what": what,
        "why": why,
        "hint": rule.instead,
        "source": rule.source,
        "about": about,
    }
    return Finding(
        id=rule.id, line=line, level=Level(rule.severity), kind=SourceError, **words
    )
