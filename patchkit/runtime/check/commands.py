"""Find variables and servers in commands, behind whatever wraps them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from patchkit.runtime.check.content import (
    RAY,
    SERVE,
    Assignment,
    CommandLine,
    FileContent,
    Image,
    Word,
    Words,
    is_literal,
)
from patchkit.runtime.check.shell_words import split_statements
from patchkit.runtime.rules.releases import read_env_data

_SHELL = read_env_data("said")["shell"]
_SERVER = read_env_data("said")["server"]
_SERVER_FLAGS = {*_SERVER["flags"]}
_DEEPEST = 6  # scripts in words of scripts
_DECLARATIONS = ("export", "declare", "typeset")
_EXPORT_OPTIONS = {"-a", "+a", "allexport"}  # of set
_CONTAINER = "container"
_CONTAINER_VERBS = ("run", "create")  # what is behind exec is found by itself
_VERB_DISTANCE = 7  # words from docker to its verb, at most

_PAIR = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_VLLM = re.compile(r"(.*/)?vllm|\$.*vllm\W*", re.IGNORECASE)
_DOCKER = re.compile(r"(.*/)?(docker|podman|nerdctl)")
_OPTION = re.compile(
    r"(?P<name>--[^=]*|-[dihPqt]*[^dihPqt])(?:=?(?P<value>.+))?", re.DOTALL
)
_SETS_VARIABLE = re.compile(r"--env|-[^-]*e")
_IMAGE_VARIABLE = re.compile(r"ima?ge?", re.IGNORECASE)
_SPEECH = re.compile("|".join(_SHELL["speech"]))
_SWITCHES = re.compile("|".join(_SHELL["switches"]))
_PROGRAM = re.compile("|".join(_SHELL["programs"]))
_SCRIPT = re.compile("|".join(_SHELL["scripts"]))


@dataclass(frozen=True, slots=True)
class Place:
    """Where commands stand: the block of their variables, their image, how deep in other words."""

    block: int = 0
    image: str = ""
    depth: int = 0


@dataclass(frozen=True, slots=True)
class _Start:
    """A program that a command starts: SERVE, RAY or a container, in a word with ``index``.

    ``arguments`` are the words behind its verb.
    """

    program: str
    index: int
    arguments: Words


@dataclass(slots=True)
class CommandReader:
    """Add what command lines say to the content of a file."""

    content: FileContent
    exports_all: bool = False  # behind set -a

    def read_script(self, text: str, line: int, place: Place) -> None:
        """Read a script; a private variable that it exports anywhere is environment."""
        if place.depth > _DEEPEST:
            return

        for statement in split_statements(text, line):
            words = statement.words
            block = words[0].line if statement.is_indented else place.block
            self.read_command(words, replace(place, block=block))

        if place.depth == 0:
            variables = self.content.variables
            for index, variable in enumerate(variables):
                if variable.name in self.content.passed:
                    variables[index] = replace(variable, is_private=False)

    def read_command(self, words: Words, place: Place) -> None:
        """Read one command: its variables, then what it starts."""
        while words and words[0].text in _SHELL["keywords"]:
            words = words[1:]

        if not words:
            return

        texts = [word.text for word in words]
        program = texts[0].rpartition("/")[2]
        if _SPEECH.fullmatch(program):
            return

        if program in _DECLARATIONS:
            if program == "export" or "-x" in texts:
                self.set_variables(words[1:], place.block)
        elif program == "set" and not _EXPORT_OPTIONS.isdisjoint(texts):
            self.exports_all = "+a" not in texts
        elif all(map(_PAIR.fullmatch, texts)):
            self.set_variables(words, place.block, is_private=not self.exports_all)
        else:
            self._read_program(words, place)

    def set_variables(
        self, words: Words, block: int, *, is_private: bool = False
    ) -> None:
        """Add each NAME=value, or NAME that passes the caller's value on."""
        for word in words:
            if pair := _PAIR.fullmatch(word.text):
                variable = Assignment(
                    word.line, pair["name"], pair["value"], block, is_private
                )
                self.content.variables.append(variable)
            elif word.text.isidentifier():
                self.content.passed.add(word.text)

    def _read_program(self, words: Words, place: Place) -> None:
        block = words[0].line
        start = _find_start(words)
        pairs = takewhile(lambda word: _PAIR.fullmatch(word.text), words)
        index = start.index if start else len([*pairs])

        # What is started may stand behind `env` or the like.
        variables = [word for word in words[:index] if "=" in word.text]
        self.set_variables(variables, block)

        if start and start.program == _CONTAINER:
            container_place = replace(place, block=words[index].line)
            self._read_container(start.arguments, container_place)
        elif start:
            self._add_server(start.program, start.arguments, block)
        else:
            self._read_arguments(words[index:], replace(place, block=block))

    def _read_arguments(self, words: Words, place: Place) -> None:
        """Read the words of an unknown program: variables behind -e, scripts as behind ssh."""
        inside = replace(place, depth=place.depth + 1)
        option = ""

        for word in words:
            if option in ("-e", "--env", "-x") and _PAIR.fullmatch(word.text):
                self.set_variables([word], place.block)
            elif _SCRIPT.search(word.text):
                self.read_script(word.text, word.line, inside)

            option = word.text

    def _add_server(self, program: str, words: Words, block: int) -> None:
        command = CommandLine(program=program, words=tuple(words), block=block)
        self.content.commands.append(command)

    def _read_container(self, words: Words, place: Place) -> None:
        """Read the words behind docker run: options, image, command."""
        remaining = iter(words)
        for word in remaining:
            if not word.text.startswith("-"):
                # A variable stands for options here, unless its name says image.
                if is_literal(word.text) or _IMAGE_VARIABLE.search(word.text):
                    image = Image(word.text, word.line, place.block)
                    self.content.images.append(image)
                    inside = replace(place, image=word.text)
                    self.read_entry([*remaining], inside, has_entry=False)
                    return
                continue

            option = _OPTION.fullmatch(word.text)
            if option is None or _SWITCHES.fullmatch(word.text):
                continue

            value = Word(option["value"] or "", word.line)
            if option["value"] is None:
                value = next(remaining, value)

            if _SETS_VARIABLE.fullmatch(option["name"]):
                self.set_variables([value], place.block)

    def read_entry(self, words: Words, place: Place, *, has_entry: bool) -> None:
        """Read what a container is given: a command, or arguments of its image's entrypoint."""
        if not words or place.depth > _DEEPEST:
            return

        is_program = _PROGRAM.fullmatch(words[0].text) or _find_start(words)

        image = Image(place.image, 0, 0)
        names = {word.text.partition("=")[0].replace("_", "-") for word in words}
        # A model, or flags: arguments of `vllm serve`, in an image that starts it.
        are_of_server = image.row.get("program") or names & _SERVER_FLAGS
        if are_of_server and not (has_entry or is_program):
            arguments = words[1:] if words[0].text == "serve" else words
            self._add_server(SERVE, arguments, place.block)
            return

        commands = self.content.commands
        count = len(commands)
        self.read_command(words, replace(place, depth=place.depth + 1))

        # A server has the variables of the container, whatever starts it there.
        inner = [replace(command, block=place.block) for command in commands[count:]]
        commands[count:] = inner


def _find_start(words: Words) -> _Start | None:
    """Return the first server or container that a command starts."""
    for index, (word, next_word) in enumerate(pairwise(words)):
        arguments = words[index + 2 :]
        program = _find_server(word.text, next_word.text)
        if program:
            return _Start(program, index, arguments)

        if _DOCKER.fullmatch(word.text):
            near_words = words[index + 1 : index + 1 + _VERB_DISTANCE]
            for distance, verb in enumerate(near_words):
                if verb.text in _CONTAINER_VERBS:
                    return _Start(_CONTAINER, index, arguments[distance:])

    return None


def _find_server(program: str, verb: str) -> str:
    """Return the server that two words start, "" for none."""
    if verb == "serve" and _VLLM.fullmatch(program):
        return SERVE
    if program == "-m" and verb in _SERVER["modules"]:
        return SERVE
    if verb == "start" and program.rpartition("/")[2] == "ray":
        return RAY
    return ""
