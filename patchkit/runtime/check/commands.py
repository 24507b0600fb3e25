"""Find variables and servers in commands, also in wrappers such as docker, ssh or sh -c."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from patchkit.frozen import positional
from patchkit.runtime.check.content import (
    SERVE,
    Assignment,
    CommandLine,
    FileContent,
    Image,
    Word,
    build_finding,
    is_literal,
)
from patchkit.runtime.check.shell_words import split_statements
from patchkit.runtime.rules.releases import read_env_data

_SHELL = read_env_data("said")["shell"]
_SERVER = read_env_data("said")["server"]
_DEEPEST = 6  # levels of scripts in words of other scripts, as in sh -c 'sh -c "…"'
_MOST_WORDS = 5000  # words of all servers of a file
# `docker exec` is not needed here: its server is found by the words behind it.
_CONTAINER = "container"
_STARTS = {name: re.compile(form) for name, form in _SERVER["starts"].items()}

_PAIR = re.compile(r"(?P<name>[A-Za-z_]\w*[ \t]*)=(?P<value>.*)", re.DOTALL)
_OPTION = re.compile(
    r"(?P<name>--[^=]*|-[dihPqt]*[^dihPqt])(?:=?(?P<value>.+))?", re.DOTALL
)
_SETS_VARIABLE = r"--env|-[^-]*e"
_IMAGE_VARIABLE = re.compile(r"ima?ge?", re.IGNORECASE)
_SPEECH = "|".join(_SHELL["speech"])
_SWITCHES = "|".join(_SHELL["switches"])
_PROGRAM = "|".join(_SHELL["programs"])
_SCRIPT = "|".join(_SHELL["scripts"])


@positional
class Place:
    """The place of a command: the block of its variables, and the image in which it runs.

    ``depth`` is the number of scripts around it that are words of other commands.
    """

    block: int = 0
    image: str = ""
    depth: int = 0

    @property
    def inside(self) -> Place:
        """Return the place of a script that is one word of a command at this place."""
        return replace(self, depth=self.depth + 1)


_WHOLE_FILE = Place()


@dataclass(slots=True)
class CommandReader:
    """Add the variables, servers and images of commands to the content of a file."""

    content: FileContent
    exports_all: bool = False  # all variables of a script count as exported
    words_left: int = _MOST_WORDS  # words of further servers that may be read

    def read_script(
        self,
        text: str,
        line: int = 1,
        place: Place = _WHOLE_FILE,
    ) -> None:
        """Read a script; ``line`` is the line of the file where its text begins."""
        if place.depth > _DEEPEST:
            return

        for statement in split_statements(text, line):
            words = statement.words
            block = words[0].line if statement.is_indented else place.block
            self.read_command(words, replace(place, block=block))

    def read_command(self, words: Sequence[Word], place: Place) -> None:
        """Read one command: the variables that it sets, and the server or container it starts."""
        while words and words[0].text in _SHELL["keywords"]:
            words = words[1:]

        if not words:
            return

        program = words[0].text.rpartition("/")[2]
        if re.fullmatch(_SPEECH, program):
            return

        if program == "export":
            self.set_variables(words[1:], place.block)
        elif _count_pairs(words) == len(words):
            self.set_variables(words, place.block, is_private=not self.exports_all)
        else:
            self._read_program(words, place)

    def set_variables(
        self, words: Sequence[Word], block: int, *, is_private: bool = False
    ) -> None:
        """Add each word NAME=value to ``variables``, and each word NAME to ``passed``."""
        for word in words:
            if pair := _PAIR.fullmatch(word.text):
                variable = Assignment(
                    word.line, pair["name"], pair["value"], block, is_private
                )
                self.content.variables.append(variable)
            elif word.text.isidentifier() and not is_private:
                self.content.passed.add(word.text)

    def _read_program(self, words: Sequence[Word], place: Place) -> None:
        block = words[0].line
        program, index = _find_start(words)
        arguments = words[index + 2 :]
        variables = [word for word in words[:index] if "=" in word.text]
        self.set_variables(variables, block)

        if program == _CONTAINER:
            inside = replace(place, block=words[index].line)
            self._read_container(arguments, inside)
        elif program:
            self._add_server(program, arguments, block)
        elif (
            words[0].text.startswith("-")
            and _has_server_flag(words)
            and not place.block
        ):
            # The words are an array in a script, which keeps flags for a server.
            self._add_server(SERVE, words, 0)
        else:
            self._read_arguments(words[index:], replace(place, block=block))

    def _read_arguments(self, words: Sequence[Word], place: Place) -> None:
        """Read the words of an unknown program: variables behind -e, and words that are scripts.

        So the contents of `ssh HOST 'SCRIPT'` and `sh -c 'SCRIPT'` are read.
        """
        option = ""

        for word in words:
            if option in ("-e", "--env", "-x") and _PAIR.fullmatch(word.text):
                self.set_variables([word], place.block)
            elif re.search(_SCRIPT, word.text):
                self.read_script(word.text, word.line, place.inside)

            option = word.text

    def _add_server(self, program: str, words: Sequence[Word], block: int) -> None:
        """Add the command of a server; ``block`` is the line where its block begins.

        All commands of a file may have ``_MOST_WORDS`` together; the rest is reported, not read.
        """
        line = words[0].line if words else block
        if len(words) > self.words_left:
            what = f"the words of servers beyond {_MOST_WORDS:,}"
            self.content.problems.append(build_finding("not-read", line, what=what))
            words = words[: self.words_left]
        self.words_left -= len(words)

        command = CommandLine(
            program=program, words=tuple(words), line=line, block=block
        )
        self.content.commands.append(command)

    def _read_container(self, words: Sequence[Word], place: Place) -> None:
        """Read the words behind `docker run`: its options, the image, the container's command."""
        remaining = iter(words)
        for word in remaining:
            if not word.text.startswith("-"):
                # A word with $ is taken for options, unless its variable's name contains "image".
                if is_literal(word.text) or _IMAGE_VARIABLE.search(word.text):
                    image = Image(word.text, word.line, place.block)
                    self.content.images.append(image)
                    inside = replace(place, image=word.text)
                    self.read_entry([*remaining], inside, has_entry=False)
                    return
                continue

            option = _OPTION.fullmatch(word.text)
            if option is None or re.fullmatch(_SWITCHES, word.text):
                continue

            value = Word(option["value"] or "", word.line)
            if option["value"] is None:
                value = next(remaining, value)

            if re.fullmatch(_SETS_VARIABLE, option["name"]):
                self.set_variables([value], place.block)

    def read_entry(
        self, words: Sequence[Word], place: Place, *, has_entry: bool
    ) -> None:
        """Read the words of a container: a command, or arguments for its image's entrypoint.

        ``has_entry`` says that ``words`` begin with the entrypoint.
        """
        if not words or place.depth > _DEEPEST:
            return

        is_program = re.fullmatch(_PROGRAM, words[0].text) or _find_start(words)[0]

        image = Image(place.image, 0, 0)
        # The words are arguments of `vllm serve` if the image starts that program, or if one of
        # them is a flag of it.
        are_of_server = image.row.get("program") or _has_server_flag(words)
        if are_of_server and not (has_entry or is_program):
            arguments = words[1:] if words[0].text == "serve" else words
            self._add_server(SERVE, arguments, place.block)
            return

        count = len(self.content.commands)
        self.read_command(words, place.inside)

        # A server gets the variables of its container, also if a script in it starts the server.
        commands = self.content.commands
        commands[count:] = [
            replace(command, block=place.block) for command in commands[count:]
        ]


def _find_start(words: Sequence[Word]) -> tuple[str, int]:
    """Return the first server or container that a command starts, and the position of its word.

    Return "" and the number of words NAME=value at the beginning if it starts none.
    """
    for index, (word, next_word) in enumerate(pairwise(words)):
        for program, form in _STARTS.items():
            if form.fullmatch(f"{word.text}\n{next_word.text}"):
                return program, index

    return "", _count_pairs(words)


def _count_pairs(words: Sequence[Word]) -> int:
    """Return the number of words NAME=value at the beginning of a command."""
    pairs = takewhile(lambda word: _PAIR.fullmatch(word.text), words)
    return len(list(pairs))


def _has_server_flag(words: Sequence[Word]) -> bool:
    names = (word.text.partition("=")[0].replace("_", "-") for word in words)
    return any(name in _SERVER["flags"] for name in names)
