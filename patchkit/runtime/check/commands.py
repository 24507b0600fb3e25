"""Find variables and servers in shell text, behind whatever wraps them; nothing is expanded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from patchkit.runtime.check.content import (
    Assignment,
    CommandLine,
    FileContent,
    Image,
    Word,
    build_finding,
    find_image,
    is_literal,
)
from patchkit.runtime.rules.releases import read_env_data

_PIECE = re.compile(
    r"""
    (?P<blank>(?:[ \t\r]|\\\n)+)
  | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
  | (?P<document><<-?[ \t]*(?P<quote>["']?)(?P<end>[\w.-]+)(?P=quote))
  | (?P<redirect>\d?(?:>>|>\||[<>])(?:&\d?-?)?[ \t]*)
  | (?P<array>(?<![^\s;&|()])[A-Za-z_]\w*\+?=\()
  | (?P<stop>\n|;+|&+|\|+|[()])
  | (?P<word>(?:
        '[^']*' | "(?:[^"\\]|\\.)*" | \\.
      | (?<==)<[\w .-]{1,60}>  # a placeholder, whatever a shell would make of it
      | \$\((?:[^()]|\([^()]*\))*\) | \$\{[^{}\n]*\} | `[^`]*`
      | [^\s'"\\;&|()<>`]
    )+ | .)
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)""", re.DOTALL)
_SHELL = read_env_data("said")["shell"]
MOST_WORDS = 5000
"""Words of the servers of a file; more are not judged."""

_MOST_UNENDED = (
    50  # here-documents without an end: each is looked for to the end of the text
)
_DEEPEST = 6  # scripts in words of scripts
_PAIR = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_VLLM = re.compile(r"(.*/)?vllm|\$.*vllm\W*", re.IGNORECASE)
_DOCKER = re.compile(r"(.*/)?(docker|podman|nerdctl)")
_OPTION = re.compile(
    r"(?P<name>--[^=]*|-[dihPqt]*[^dihPqt])(?:=?(?P<value>.+))?", re.DOTALL
)
_SPEECH, _SWITCHES, _PROGRAM, _SCRIPT = (
    re.compile("|".join(_SHELL[name]))
    for name in ("speech", "switches", "programs", "scripts")
)
_IMAGE_VARIABLE = re.compile(r"ima?ge?", re.IGNORECASE)
_SERVE, _RAY, _CONTAINER = "vllm serve", "ray start", "container"


def unquote(text: str) -> str:
    """Return a word without its quotes."""

    def strip(match: re.Match[str]) -> str:
        single, double, escaped = match.groups()
        if double is not None:
            # A backslash before a line break stays: what reads the text as a script counts lines.
            return re.sub(r"\\([$`\"\\])", r"\1", double)
        return str(escaped).strip("\n") if single is None else str(single)

    return _QUOTED.sub(strip, text)


def split_statements(text: str, line: int = 1) -> Iterator[tuple[list[Word], bool]]:
    """Yield the commands of a script, and whether each is indented: in a branch or a function."""
    words: list[Word] = []
    documents: list[str] = []
    unended: set[str] = set()  # ends of here-documents that never come
    position, begins = 0, True
    indented = in_array = is_target = False
    while match := _PIECE.match(text, position):
        kind, piece, position = match.lastgroup, match[0], match.end()
        indented = kind == "blank" if begins else indented
        # A=( … ) is one list of words in several lines.
        in_array = kind == "array" or (in_array and piece != ")")
        begins = piece == "\n" and not in_array
        if kind == "word" and not is_target:
            words.append(Word(unquote(piece), line))
        elif kind == "document":
            documents.append(match["end"])
        elif kind == "stop" and not in_array and words:
            yield words, indented
            words = []
        is_target = kind == "redirect" and "&" not in piece  # the next word is a file
        line += piece.count("\n")
        for end in documents if piece == "\n" else ():
            form = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$\n?", re.MULTILINE)
            looked_for = end not in unended and len(unended) < _MOST_UNENDED
            if looked_for and (found := form.search(text, position)):
                line += text.count("\n", position, found.end())
                position = found.end()
            else:
                unended.add(end)
        documents = [] if piece == "\n" else documents
    if words:
        yield words, indented


@dataclass(frozen=True, slots=True)
class Place:
    """Where commands stand: the block of their variables, their image, how deep in other words."""

    block: int = 0
    image: str = ""
    depth: int = 0


_WHOLE_FILE = Place()


@dataclass(slots=True)
class CommandReader:
    """Add what command lines say to the content of a file."""

    content: FileContent
    exports_all: bool = False  # behind set -a
    exported: set[str] = field(default_factory=set)
    words_left: int = MOST_WORDS

    def read_script(self, text: str, line: int = 1, place: Place = _WHOLE_FILE) -> None:
        """Read the text of a script; an own variable that it exports anywhere is environment."""
        if place.depth > _DEEPEST:
            return
        for words, indented in split_statements(text, line):
            inside = replace(place, block=words[0].line) if indented else place
            self.read_command(words, inside)
        if place.depth == 0 and self.exported:
            own, self.content.own = self.content.own, []
            for assignment in own:
                self.content.add_variable(
                    replace(assignment, own=assignment.name not in self.exported)
                )

    def read_command(self, words: Sequence[Word], place: Place) -> None:
        """Read one command: its variables, then what it starts."""
        while words and words[0].text in _SHELL["keywords"]:
            words = words[1:]
        texts = [word.text for word in words]
        if not words or _SPEECH.fullmatch(name := texts[0].rpartition("/")[2]):
            return
        if name in ("export", "declare", "typeset"):
            if name == "export" or "-x" in texts:
                self.set_variables(words[1:], place.block)
        elif name == "set" and {"-a", "+a", "allexport"} & {*texts}:
            self.exports_all = "+a" not in texts
        elif all(map(_PAIR.fullmatch, texts)):
            self.set_variables(words, place.block, own=not self.exports_all)
        else:
            self._read_program(words, place)

    def set_variables(
        self, words: Sequence[Word], block: int, *, own: bool = False
    ) -> None:
        """Add each NAME=value, or NAME that passes the caller's value on."""
        for word in words:
            if match := _PAIR.fullmatch(word.text):
                self.content.add_variable(
                    Assignment(word.line, match["name"], match["value"], block, own)
                )
            elif word.text.isidentifier():
                self.exported.add(word.text)
                self.content.passed.add(word.text)

    def _read_program(self, words: Sequence[Word], place: Place) -> None:
        start, program, rest = _find_program(words) or (0, "", words)
        block = words[0].line
        while not program and start < len(words) and _PAIR.fullmatch(words[start].text):
            start += 1
        self.set_variables([word for word in words[:start] if "=" in word.text], block)
        if program == _CONTAINER:
            self._read_container(rest, replace(place, block=words[start].line))
        elif program:
            self._add_server(program, rest, block)
        elif (
            not place.block
            and words[0].text.startswith("-")
            and _has_server_flag(words)
        ):
            self._add_server(_SERVE, words, 0)  # flags that an array keeps for it
        else:
            before = ""
            for word in words[start:]:
                if before in ("-e", "--env", "-x") and _PAIR.fullmatch(word.text):
                    self.set_variables([word], block)
                elif _SCRIPT.search(word.text):  # as in `bash -c` and ssh
                    deeper = replace(place, block=block, depth=place.depth + 1)
                    self.read_script(word.text, word.line, deeper)
                before = word.text

    def _add_server(self, program: str, words: Sequence[Word], block: int) -> None:
        line = words[0].line if words else block
        if self.words_left < 0:
            return
        if len(words) > self.words_left:
            problem = build_finding("too-many-words", line, most=f"{MOST_WORDS:,}")
            self.content.problems.append(problem)
        read = tuple(words[: self.words_left])
        self.words_left -= len(words)
        command = CommandLine(program=program, words=read, line=line, block=block)
        self.content.commands.append(command)

    def _read_container(self, words: Sequence[Word], place: Place) -> None:
        """Read the words behind docker run: options, image, command."""
        rest = iter(words)
        for word in rest:
            option = _OPTION.fullmatch(word.text)
            if not word.text.startswith("-"):
                # What is not known here stands for options, unless its name says image.
                if is_literal(word.text) or _IMAGE_VARIABLE.search(word.text):
                    self.content.images.append(Image(word.text, word.line, place.block))
                    inside = replace(place, image=word.text)
                    self.read_entry([*rest], inside, has_entry=False)
                    return
            elif option and not _SWITCHES.fullmatch(word.text):
                text = option["value"]
                value = next(rest, None) if text is None else Word(text, word.line)
                if value and (
                    option["name"] == "--env" or re.match("-[^-]*e$", option["name"])
                ):
                    self.set_variables([value], place.block)

    def read_entry(
        self, words: Sequence[Word], place: Place, *, has_entry: bool
    ) -> None:
        """Read what a container is given: a command, or arguments of its image's entrypoint."""
        if not words or place.depth > _DEEPEST:
            return
        # A model, or flags: arguments of `vllm serve`, in an image that starts it.
        serves = find_image(place.image)[2].get("program") or _has_server_flag(words)
        starts_itself = (
            has_entry or _PROGRAM.fullmatch(words[0].text) or _find_program(words)
        )
        if serves and not starts_itself:
            self._add_server(_SERVE, words[words[0].text == "serve" :], place.block)
            return
        before = len(self.content.commands)
        self.read_command(words, replace(place, depth=place.depth + 1))
        # Whatever starts it in there, it has the container's variables.
        inside = [
            replace(command, block=place.block)
            for command in self.content.commands[before:]
        ]
        self.content.commands[before:] = inside


def _find_program(words: Sequence[Word]) -> tuple[int, str, Sequence[Word]] | None:
    """Return what a command starts: where, a server or a container, the words behind the verb."""
    texts = [word.text for word in words]
    for number, (text, following) in enumerate(pairwise(texts)):
        serves = following == "serve" and _VLLM.fullmatch(text)
        if serves or (
            text == "-m" and following in read_env_data("said")["server"]["modules"]
        ):
            return number, _SERVE, words[number + 2 :]
        if following == "start" and text.rpartition("/")[2] == "ray":
            return number, _RAY, words[number + 2 :]
        if _DOCKER.fullmatch(text):
            near = enumerate(texts[number + 1 : number + 8], number + 2)
            verb = next(
                (behind for behind, word in near if word in ("run", "create")), None
            )
            if verb is not None:  # what is behind exec is found by itself
                return number, _CONTAINER, words[verb:]
    return None


def _has_server_flag(words: Sequence[Word]) -> bool:
    names = (word.text.partition("=")[0].replace("_", "-") for word in words)
    return any(name in read_env_data("said")["server"]["flags"] for name in names)
