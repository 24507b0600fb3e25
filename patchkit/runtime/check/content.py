"""Hold the content of a file as it is written, and make the findings about it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from patchkit.errors import SourceError
from patchkit.finding import Finding, Level, fill_texts
from patchkit.frozen import Values, frozen, positional
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.rule import Avoid, Situation, VariableAdvice
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.runtime.rules.variable_values import is_placeholder

ENV = "env file"
SHELL = "shell script"
YAML = "YAML"
DOCKERFILE = "Dockerfile"
UNIT = "systemd unit"
PYTHON = "Python program"
RUNNING = "running"  # not a file, but the environment and the command of a process

SERVE = "vllm serve"

_SHOWN = 60  # characters of a name or a value in a message
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")

# A part that a shell expands, or that a template or an orchestrator fills in.
_OPEN = r"[$`]|\{[{%]|\{[A-Za-z_]\w*\}"

# The name of an image. A tag that is a variable is unknown: ${TAG:-latest}, $TAG. A colon before a
# slash belongs to the port of a registry.
_IMAGE = re.compile(
    r"\A(?P<repository>[^@]*?)(?::(?:\$\{[^}]{0,99}\}|\$\w+|(?P<tag>[^/:@]*)))?(?:@.*)?\Z",
    re.DOTALL,
)


def is_literal(text: str) -> bool:
    """Return whether a text stands for itself: no shell expands it, no template fills it in."""
    return re.search(_OPEN, text) is None


def shorten(text: str) -> str:
    """Return a text for a message: its first 60 characters, and "…" if there are more."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


@positional
class Word:
    """A word of a command, without quotes, and the line where it begins."""

    text: str
    line: int


@positional
class Image:
    """The name of a container image; ``block`` is the block of the container's variables."""

    text: str
    line: int
    block: int

    @property
    def repository(self) -> str:
        """Return the name without tag and digest: ``vllm/vllm-openai``."""
        return _IMAGE.sub(r"\g<repository>", self.text)

    @property
    def tag(self) -> str:
        """Return the tag, "" if there is none or if it is a shell variable."""
        return _IMAGE.sub(r"\g<tag>", self.text)

    @property
    def row(self) -> Values:
        """Return the row of said.toml whose pattern matches the repository, {} if none does."""
        for row in read_env_data("said")["image"]:
            if re.fullmatch(row["repository"], self.repository):
                return dict(row)
        return {}

    @property
    def is_upstream(self) -> bool:
        """Return whether the image is one that vLLM's project publishes."""
        upstream = read_env_data("said")["server"]["upstream"]
        return self.repository.removeprefix("docker.io/") in upstream


@positional
class Assignment:
    """A variable that is set.

    ``block`` tells what the variable is set for, by the line where that begins: a service, a
    command, or an indented line of a script; 0 means the whole file. ``is_private`` says that a
    script sets the variable and does not export it.
    """

    line: int
    name: str
    value: str
    block: int = 0
    is_private: bool = False

    @property
    def is_literal(self) -> bool:
        """Return whether the value is written in the file, not expanded or filled in later."""
        return is_literal(self.value)

    @property
    def is_given(self) -> bool:
        """Return whether the value can be judged: it is literal, not empty, and no placeholder."""
        if not self.value or not self.is_literal:
            return False
        return not is_placeholder(self.name, self.value)

    @property
    def shown(self) -> str:
        """Return ``NAME=value`` for messages, with secrets masked."""
        return mask_secrets(f"{shorten(self.name)}={shorten(self.value)}")


@frozen
class GivenFlag:
    """A flag of a command, or of a variable that keeps flags for a script.

    ``written`` is its spelling there, ``name`` its long name with dashes. ``value`` is "" if the
    flag has none or a value that is not literal. ``kept_in`` is the name of the variable, "" if the
    flag is in a command.
    """

    written: str
    name: str
    value: str
    line: int
    kept_in: str

    @property
    def shown(self) -> str:
        """Return flag and value for messages, with secrets masked."""
        shown = mask_secrets(f"{shorten(self.written)} {shorten(self.value)}".strip())

        return f"{shown} of {shorten(self.kept_in)}" if self.kept_in else shown


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command that starts ``program``, SERVE or "ray start"; ``words`` are its arguments.

    The server gets the variables of its block and of block 0. If a variable keeps the words for a
    script, ``kept_in`` is its name; whether the script starts a server with them is unknown.
    """

    program: str
    words: tuple[Word, ...]
    line: int
    block: int
    kept_in: str = ""

    @cached_property
    def flags(self) -> tuple[GivenFlag, ...]:
        """Return the flags in their order: ``--flag value``, ``--flag=value`` or ``--flag``.

        Words behind the word ``--`` are no flags.
        """
        flags = []

        for word, next_word in pairwise((*self.words, Word("--", 0))):
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

    def find_flag(self, name: str) -> GivenFlag | None:
        """Return the last flag of a name, which overrides earlier ones; None if there is none."""
        named = (flag for flag in reversed(self.flags) if flag.name == name)
        return next(named, None)


@dataclass
class FileContent:
    """The content of a file; the lists are in the order of lines.

    ``kind`` is a constant of this module, such as ENV. ``variables`` are all variables that are
    set. ``passed`` are names of variables whose values come from the caller's environment.
    ``problems`` are findings about parts that could not be read.
    """

    kind: str
    variables: list[Assignment] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)
    commands: list[CommandLine] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    def exports(self, variable: Assignment) -> bool:
        """Return whether a variable is set in the environment, also by an export elsewhere."""
        return not variable.is_private or variable.name in self.passed

    @property
    def assignments(self) -> list[Assignment]:
        """Return the variables of the environment, without a script's private ones."""
        return [variable for variable in self.variables if self.exports(variable)]

    @property
    def literals(self) -> list[Assignment]:
        """Return the variables of the environment whose values are written in the file."""
        return [variable for variable in self.assignments if variable.is_literal]

    @property
    def flags(self) -> list[GivenFlag]:
        """Return the flags of all commands."""
        return [flag for command in self.commands for flag in command.flags]


@positional
class StatedVersion:
    """A version of a project (``vllm``, ``nccl``, ``torch`` …) that a file states.

    ``text`` is the part of the file that states it: the name of an image, or ``NAME==VERSION``.
    """

    project: str
    version: str
    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class CheckedText:
    """A text to check, with its content and facts of the machine that is to use it.

    ``where`` names it in messages. ``text`` is empty for a running process. ``mode`` is the mode of
    the file, 0 if there is no file. ``host`` is the machine that is to use the text, None for any
    machine. ``home`` is the folder of the host's vLLM: if it is known, names are compared with
    those in it instead of those of the release in ``situation``.
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
        """Return the release of vLLM for which the text is checked, "" for any release."""
        return self.situation.get("vllm", "")

    @property
    def role(self) -> str:
        """Return the role of the node that uses the text, "" if it is not known."""
        return self.situation.get("role", "")

    @cached_property
    def upstream_by_block(self) -> Mapping[int, bool]:
        """Return block → whether vLLM's project publishes all images of the block.

        Block 0, the whole file, also has every image of other blocks with a literal name.
        """
        by_block: dict[int, bool] = {}

        for image in self.content.images:
            blocks = {image.block, 0} if is_literal(image.text) else {image.block}
            for block in blocks:
                by_block[block] = by_block.get(block, True) and image.is_upstream

        return by_block

    def runs_upstream(self, block: int = 0) -> bool | None:
        """Return whether only images that vLLM's project publishes run in a block.

        For a block without an image, judge the whole file. Return None if that has none either.
        """
        return self.upstream_by_block.get(block, self.upstream_by_block.get(0))


def build_finding(
    finding_id: str,
    place: int | Assignment | GivenFlag,
    *,
    level: Level | None = None,
    is_error: bool = False,
    **fields: object,
) -> Finding:
    """Return the finding that findings.toml has for an id, with ``fields`` filled into its texts.

    ``place`` is what it is about: the number of a line, a variable or a flag. ``level`` replaces
    the level of findings.toml, and ``is_error`` makes it an error in any case.
    """
    row = read_env_data("findings")[finding_id]
    if is_error:
        level = Level.ERROR

    if isinstance(place, int):
        line = place
        about = ""
    else:
        line = place.line
        about = place.name
        fields = {"shown": place.shown, "name": about, **fields}

    return Finding(
        id=finding_id,
        line=line,
        about=about,
        level=level or Level(row["level"]),
        kind=SourceError,
        **fill_texts(row, fields),
    )


def build_rule_finding(
    rule: Avoid | VariableAdvice,
    line: int,
    what: str,
    why: str,
    about: str = "",
) -> Finding:
    """Return a finding with the id, the severity, the advice and the source of a rule."""
    return Finding(
        id=rule.id,
        line=line,
        about=about,
        level=Level(rule.severity),
        kind=SourceError,
        what=what,
        why=why,
        hint=rule.instead,
        source=rule.source,
    )
