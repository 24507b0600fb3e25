"""Find the program that a command runs behind what wraps it, in containers as well."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePosixPath

from patchkit.runtime.files.collected import Collected
from patchkit.runtime.files.content import CommandLine, ContainerOptions, How
from patchkit.runtime.files.value import Value, joined, known
from patchkit.runtime.files.versions import is_server_flag, is_server_module, known_image

_DEEPEST = 8  # commands in texts of commands
_MOST_WRAPPERS = 16
_EXPORTED = re.compile(r"[A-Z][A-Z0-9]*_\w+=")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)=")
_PYTHON = re.compile(r"python[\d.]*")
_PIP = re.compile(r"pip[\d.]*")
_SHELLS = ("bash", "sh", "dash", "zsh", "ash")
_CONTAINERS = ("docker", "podman", "nerdctl")
_VERBS = ("run", "create", "exec")
# What runs the rest of its words: options with a value of their own, and words before the command.
_WRAPPERS = {
    "exec": ("-a", 0),
    "nohup": ("", 0),
    "time": ("-f -o", 0),
    "builtin": ("", 0),
    "setsid": ("", 0),
    "nice": ("-n --adjustment", 0),
    "ionice": ("-c -n", 0),
    "stdbuf": ("-i -o -e", 0),
    "timeout": ("-k -s --kill-after --signal", 1),
    "sudo": ("-u -g -h -p -C -D -R -T --user --group", 0),
    "doas": ("-u -C", 0),
    "env": ("-u -C --unset --chdir", 0),
    "tini": ("-p -e", 0),
    "dumb-init": ("", 0),
    "gosu": ("", 1),
    "su-exec": ("", 1),
}
# Options of other programs that start processes with NAME=value in their environment.
_ENV_OPTIONS = {
    "mpirun": "-x",
    "mpiexec": "-x",
    "orterun": "-x",
    "apptainer": "--env",
    "singularity": "--env",
}
# Programs that are known behind any other one, by the word that follows them.
_RUN_BY = {
    "vllm": ("serve",),
    "ray": ("start",),
    "docker": _VERBS,
    "python": ("-m",),
    "pip": ("install",),
    "bash": ("-c", "-lc", "-ec", "-xc", "-euc", "-exc"),
}
# Words that only say something, or look for a process; nothing behind them is run.
_SPEECH = re.compile(
    r"echo|printf|cat|log\w*|say|info|warn\w*|error|die|fail|usage|grep|[efz]grep|pgrep|pkill|ps|"
    r"killall|kill|which|type|alias|man|help|command|test|\[|read|trap|sed|awk|true|false|:"
)
_SSH_VALUED = "-b -c -D -E -e -F -I -i -J -L -l -m -O -o -p -Q -R -S -W -w"
# Options of docker and docker compose that stand before the verb and have a value.
_GLOBAL_VALUED = (
    *("--config", "-c", "--context", "-H", "--host", "-l", "--log-level", "-f", "--file"),
    *("-p", "--project-name", "--project-directory", "--profile", "--env-file"),
)
# Single letters of docker run and exec without a value.
_SWITCHES = frozenset("dihPqt")
# An image with its tag; a volume begins with a slash or a dot, a port has no letter.
_TAGGED = re.compile(r"(?=[^:]*[A-Za-z])\w[\w./-]*(?::\d+/[\w./-]+)?:\w[\w.-]*")
_LONG_SWITCHES = re.compile(
    r"--(detach|help|init|interactive|no-healthcheck|oom-kill-disable|privileged|publish-all|quiet|"
    r"read-only|rm|sig-proxy|tty|use-api-socket|replace|no-hosts|rmi|env-host|http-proxy|"
    r"tls-verify|disable-content-trust)"
)

# What docker run takes, and no server behind the image.
_CONTAINER_OPTION = re.compile(
    rf"{_LONG_SWITCHES.pattern}|-[evp]|--(env|volume|publish|name|entrypoint|gpus|ipc|network|ulimit)"
)
_OPTION_IF_SET = re.compile(r"\$\{\w+:?\+[\"']?-")  # ${NAME:+-e OTHER=…}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a command stands: line, block, the image that it runs in, texts that it lies in.

    ``is_entry``: it is what a container is given, which its image's entrypoint may take.
    ``environment`` is that of a container; None outside of one.
    """

    line: int
    block: int = 0
    image: str = ""
    depth: int = 0
    is_entry: bool = False
    environment: Mapping[str, Value] | None = None


class Programs:
    """Add commands to what was found; ``shell`` reads a text that a command hands to a shell."""

    def __init__(self, found: Collected, shell: Callable[[Value, Place], None]) -> None:
        self._found, self._shell = found, shell

    def run(self, words: Sequence[Value], place: Place, runners: Collection[str] = ()) -> None:
        """Read one command; ``runners`` are a script's functions that run what they are given."""
        while words and not words[0].text:
            words = words[1:]
        if place.is_entry and words and _serves(place.image, words):
            # An image whose entrypoint is vllm itself gets the verb first.
            self._add("vllm serve", words[words[0].text == "serve" :], place)
            return
        place = replace(place, is_entry=False)
        for _ in range(_MOST_WRAPPERS):
            while words and not words[0].text:
                words = words[1:]
            if not words:
                return
            name = _name(words)
            if name not in _WRAPPERS:
                break
            place, words = self._unwrapped(name, words[1:], place)
        else:
            return
        read = {
            "vllm": self._verb,
            "ray": self._verb,
            "git": self._verb,
            "pip": self._verb,
            "python": self._python,
            "ssh": self._ssh,
            "bash": self._bash,
            "docker": self._container,
        }.get(name, self._other)
        if name in runners or name in ("tmux", "screen", "su", "parallel", "watch", "xargs"):
            self._texts(words[1:], place)
        read(words, replace(place, line=words[0].line or place.line))

    def container(
        self, image: Value, entrypoint: Sequence[Value], words: Sequence[Value], place: Place
    ) -> None:
        """Read what a container runs; an empty ``entrypoint`` is that of the image."""
        if image.text:
            self._found.images.append(image.word(place.line))
        place = replace(place, image=image.text, is_entry=not entrypoint)
        self.run([*entrypoint, *words], place)

    def variable(self, value: Value, how: How, place: Place) -> None:
        """Add NAME=value, or a NAME that passes the caller's value on."""
        match = _ASSIGNED.match(value.text)
        line = value.line or place.line
        if match:
            self._found.set(match["name"], value.cut(match.end()), line, how, place.block)
        elif not value.why:
            self._found.pass_on(value.text, line, how, place.block)

    def options(self, name: str, items: Sequence[Value], place: Place) -> None:
        """Add what an array keeps for a container: -e NAME=value, or NAME=value in one for it."""
        named = all(_ASSIGNED.match(each.text) for each in items)
        is_environment = "ENV" in name.upper() and named
        for before, word in pairwise([known("", 0), *items]):
            match = _ASSIGNED.match(word.text)
            if match and (is_environment or before.text in ("-e", "--env")):
                inside = self.own_block(place, items[0].line or word.line)
                value = word.cut(match.end())
                self._found.offer(match["name"], value, word.line, inside.block)

    def printed(self, words: Sequence[Value], place: Place) -> None:
        """Add what printf writes as options of a container: ``printf -- '-e %s ' NAME=value``."""
        for number, word in enumerate(words):
            if re.search(r"(?:-e|--env)[ =]%", word.text):
                pairs = words[number + 1 :]
                self.options(
                    "", [each for value in pairs for each in (known("-e", 0), value)], place
                )
                return

    def _add(self, program: str, words: Sequence[Value], place: Place) -> None:
        self._found.commands.append(
            CommandLine(
                program=program,
                words=tuple(each.word(place.line) for each in words),
                line=place.line,
                image=place.image,
                block=place.block,
            )
        )

    def _unwrapped(
        self, name: str, words: Sequence[Value], place: Place
    ) -> tuple[Place, Sequence[Value]]:
        """Return a command without a wrapper, and set the variables that it sets."""
        valued, before = _WRAPPERS[name]
        count = _options(words, valued.split())
        words = words[count + before :]
        while name in ("env", "sudo", "doas") and words and _ASSIGNED.match(words[0].text):
            place = self.own_block(place, words[0].line)
            self.variable(words[0], How.PREFIX, place)
            words = words[1:]
        return place, words

    def own_block(self, place: Place, line: int) -> Place:
        """Return the place as that of a command with an environment of its own."""
        line = line or place.line
        if line == place.block:
            return place
        self._found.outer[line] = place.block
        return replace(place, block=line)

    def _verb(self, words: Sequence[Value], place: Place) -> None:
        name = _name(words)
        rest = words[1:]
        rest = rest[_options(rest, ()) :] if name == "pip" else rest
        verb = rest[0].text if rest and not rest[0].why else ""
        self._add(f"{name} {verb}".strip(), rest[1:], place)

    def _python(self, words: Sequence[Value], place: Place) -> None:
        rest = list(words[1:])
        while rest and rest[0].text.startswith("-") and rest[0].text not in ("-m", "-c", "-"):
            rest = rest[2 if rest[0].text in ("-X", "-W") else 1 :]
        if len(rest) > 1 and rest[0].text == "-m":
            module = rest[1].text
            if is_server_module(module):
                self._add("vllm serve", rest[2:], place)
            elif module in ("vllm", "vllm.entrypoints.cli.main", "pip", "ray"):
                self.run([known(module.split(".")[0], rest[1].line), *rest[2:]], place)
            else:
                self._add(f"python -m {module}", rest[2:], place)
        elif rest and _last_part(rest[0].text) in ("vllm", "ray", "pip"):
            self.run(rest, place)
        elif rest and rest[0].text.endswith(".py"):
            self._script(rest, place)
        elif rest:
            self._add(_last_part(rest[0].text) or "python", rest[1:], place)

    def _ssh(self, words: Sequence[Value], place: Place) -> None:
        rest = words[1:]
        rest = rest[_options(rest, _SSH_VALUED.split()) + 1 :]
        rest = rest[1:] if rest and rest[0].text == "--" else rest
        if rest:
            self._text(joined(rest, " "), place)

    def _bash(self, words: Sequence[Value], place: Place) -> None:
        for number, word in enumerate(words[1:], 1):
            if re.fullmatch(r"-[a-z]*c", word.text):
                if number + 1 < len(words):
                    self._text(words[number + 1], place)
                return
            if not word.text.startswith(("-", "+")):
                self._script(words[number:], place)
                return

    def _script(self, words: Sequence[Value], place: Place) -> None:
        """Read a script: what starts containers mostly hands -e NAME=value on to docker."""
        inside = self.own_block(place, words[0].line)
        for before, word in pairwise(words):
            if before.text in ("-e", "--env") and _EXPORTED.match(word.text):
                self.variable(word, How.OPTION, inside)
        self._add(_last_part(words[0].text), words[1:], place)

    def _container(self, words: Sequence[Value], place: Place) -> None:
        """Read docker run, create and exec, in whatever group of commands they stand."""
        rest = list(words[1:])
        verb = _options(rest, _GLOBAL_VALUED)
        while verb < len(rest) and rest[verb].text in ("container", "compose"):
            verb += 1 + _options(rest[verb + 1 :], _GLOBAL_VALUED)
        if verb >= len(rest) or rest[verb].text not in _VERBS:
            return
        environment: dict[str, Value] = {}
        inside = replace(self.own_block(place, words[0].line), environment=environment)
        entrypoint: list[Value] = []
        given: list[tuple[str, str]] = []
        position = verb + 1
        for option, value, after in _container_options(rest, position):
            position = after
            given.append((option, value.text if value else ""))
            if option in ("-e", "--env") and value:
                self.variable(value, How.OPTION, inside)
                if match := _ASSIGNED.match(value.text):
                    environment[match["name"]] = value.cut(match.end())
            elif option == "--entrypoint" and value:
                entrypoint = [value] if value.text else [known("", value.line)]
        if position >= len(rest):
            return
        image, command = rest[position], rest[position + 1 :]
        if rest[verb].text == "exec" or "compose" in (each.text for each in rest[:verb]):
            self.run(command, inside)
        else:
            options = ContainerOptions(
                program=_last_part(words[0].text),
                options=tuple(given),
                line=words[0].line or place.line,
                block=inside.block,
                is_whole=all(option for option, _ in given),
            )
            self._found.containers.append(options)
            self.container(image, entrypoint, command, inside)

    def _other(self, words: Sequence[Value], place: Place) -> None:
        """Read any other program: what it runs in its turn, if that can be seen, else itself."""
        name = _name(words)
        if name and _SPEECH.fullmatch(name):
            return
        if option := _ENV_OPTIONS.get(name):
            inside = self.own_block(place, words[0].line)
            for before, word in pairwise(words):
                if before.text == option:
                    self.variable(word, How.OPTION, inside)
        for number in range(1, len(words) - 1):
            rest = words[number:]
            inner = _name(rest)
            if rest[1].text in _RUN_BY.get(inner, ()):
                self.run(rest, place)
                return
        if name.endswith((".sh", ".bash")):
            self._script(words, place)
        else:
            self._add(name, words[1:], place)

    def _texts(self, words: Sequence[Value], place: Place) -> None:
        for word in words:
            if re.search(r"\S\s+\S", word.text):
                self._text(word, place)

    def _text(self, value: Value, place: Place) -> None:
        if place.depth < _DEEPEST:
            # What one shell exports another one does not see.
            inside = self.own_block(place, value.line)
            self._shell(value, replace(inside, depth=place.depth + 1, is_entry=False))


def _name(words: Sequence[Value]) -> str:
    """Return the name of a program: of a path its last part, of an unknown one by its verb."""
    text = words[0].text
    name = _last_part(text)
    if words[0].why and (not name or "$" in name):
        name = _by_verb([each.text for each in words[1:3]], text.lower())
    if _PYTHON.fullmatch(name):
        return "python"
    if _PIP.fullmatch(name):
        return "pip"
    if name in _SHELLS:
        return "bash"
    return "docker" if name in _CONTAINERS else name


def _by_verb(verbs: Sequence[str], text: str) -> str:
    verb = verbs[0] if verbs else ""
    if verb == "-m":
        return "python"
    if verb == "serve" and "vllm" in text:
        return "vllm"
    if verb == "start" and "ray" in text:
        return "ray"
    is_container = re.search(r"docker|podman|container|engine|runtime", text)
    return "docker" if verb in _VERBS and is_container else ""


def _last_part(path: str) -> str:
    try:
        return PurePosixPath(path).name
    except ValueError:
        return ""


def _options(words: Sequence[Value], valued: Collection[str]) -> int:
    """Return how many words from the first on are options and their values."""
    count = 0
    while count < len(words) and words[count].text.startswith("-"):
        if words[count].text == "--":
            return count + 1
        count += 2 if words[count].text in valued else 1
    return count


def _container_options(
    words: Sequence[Value], position: int
) -> Iterator[tuple[str, Value | None, int]]:
    """Yield the options of docker run: name, value, and the place of the next word."""
    while position < len(words):
        word = words[position]
        if word.text == "--":
            yield "--", None, position + 1
            return
        if not word.text.startswith("-"):
            if not _stands_for_options(words, position):
                return
            position += 1
            yield "", None, position
            continue
        position += 1
        name, sign, _ = word.text.partition("=")
        if name.startswith("--"):
            value = word.cut(len(name) + 1) if sign else None
            has_value = not sign and not _LONG_SWITCHES.fullmatch(name)
        else:
            name, value, has_value = _letters(word)
        if has_value and position < len(words):
            value = words[position]
            position += 1
        yield name, value, position


def _letters(word: Value) -> tuple[str, Value | None, bool]:
    """Return the last of several single letters, its value, and whether that is the next word."""
    for number, letter in enumerate(word.text[1:], 1):
        if letter not in _SWITCHES:
            rest = word.cut(number + 1)
            return f"-{letter}", rest if rest.text else None, not rest.text
    return word.text, None, False


def _stands_for_options(words: Sequence[Value], position: int) -> bool:
    """Return whether a word that is not known stands for options, and not for the image."""
    word = words[position]
    if _OPTION_IF_SET.match(word.text):
        return True
    if not word.several or "image" in word.text.lower():
        return False
    following = words[position + 1 :]
    first = next((each for each in following if not each.several), None)
    if first and not first.why and _TAGGED.fullmatch(first.text):
        return True
    return any(_CONTAINER_OPTION.fullmatch(each.text) for each in following[:40]) or any(
        "image" in each.text.lower() for each in following[:3] if each.why
    )


def _serves(image: str, words: Sequence[Value]) -> bool:
    """Return whether words without a program are arguments of `vllm serve`."""
    first = words[0].text
    row = known_image(image)
    serves = any(is_server_flag(each.text.partition("=")[0]) for each in words)
    if not first.startswith("-") and first != "serve":
        name = _name(words)
        is_program = name in (*_WRAPPERS, "vllm", "ray", "python", "bash", "pip", "sleep")
        # A model is one word, of its owner and its name, or a folder; most often a variable.
        is_model = bool(words[0].why or "/" in first) and not name.endswith((".sh", ".py"))
        given = bool(row and row.program) or (serves and is_model)
        return given and not is_program and not words[0].several
    return bool(row and row.version == "vllm") or serves


def takes_script(texts: Sequence[str]) -> bool:
    """Return whether a command runs what it reads: bash, bash -s, ssh host, docker exec -i x sh."""
    for number, text in enumerate(texts):
        if _last_part(text) in _SHELLS:
            rest = texts[number + 1 :]
            return "-c" not in rest and (not rest or rest[0].startswith("-"))
    return texts[0] == "ssh"
