"""Read vLLM servers that run: /proc of a process, `docker inspect` of a container."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from patchkit.errors import HostError, UsageError
from patchkit.foreign import read_json
from patchkit.process import attempt
from patchkit.runtime.check.commands import CommandReader, Place
from patchkit.runtime.check.content import (
    RUNNING,
    Assignment,
    CheckedText,
    FileContent,
    Image,
    Word,
)

_LARGEST = 4 << 20  # bytes of an environment or a command line


def find_running(name: str, root: Path) -> list[CheckedText]:
    """Return the server of a PID or a container, of "" all. Raises HostError, UsageError."""
    if name and not name.isdecimal():
        return [_inspect_container(name)]
    found = []
    for folder in (
        [root / "proc" / name] if name else sorted((root / "proc").glob("[0-9]*"))
    ):
        texts = []
        try:
            for part in ("cmdline", "environ"):
                with (folder / part).open("rb") as file:
                    texts.append(file.read(_LARGEST).decode(errors="replace"))
        except OSError as error:
            if name:
                raise UsageError(
                    f"process {name}: {error.strerror}",
                    why="only its own user and root may read what a process was started with",
                    hint="run it as that user, or name a process that runs",
                ) from None
            continue
        words, pairs = ([part for part in text.split("\0") if part] for text in texts)
        content = _read_started(pairs, words, Place())
        if content.commands or name:
            program = content.commands[0].program if content.commands else "no server"
            found.append(
                CheckedText(where=f"process {folder.name} ({program})", content=content)
            )
    if not found:
        raise HostError(
            "no vLLM server runs here that this user may read",
            hint="name a process or a container: patchkit check --running PID",
        )
    return found


def _inspect_container(name: str) -> CheckedText:
    for program in ("docker", "podman"):
        done = attempt(program, "inspect", "--type=container", "--", name, timeout=30)
        if done.status == 0:
            break
    else:
        raise UsageError(
            f"no container {name!r}: {done.trouble}",
            hint="`docker ps` lists those that run; a process is named by its number",
        )
    try:
        (found,) = read_json(done.output)
        image = str(found["Config"]["Image"])
        words = [found["Path"], *(found["Args"] or ())]
        content = _read_started(
            found["Config"]["Env"] or (), words, Place(block=1, image=image)
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{program} inspect {name}: an answer that cannot be read: {error}"
        raise HostError(what) from None
    content.images.append(Image(image, 1, 1))
    return CheckedText(where=f"container {name}", content=content)


def _read_started(
    pairs: Iterable[str], words: Sequence[str], place: Place
) -> FileContent:
    content = FileContent(RUNNING)
    for name, _sign, value in (pair.partition("=") for pair in pairs):
        content.add_variable(Assignment(1, name, value, place.block))
    CommandReader(content).read_entry(
        [Word(word, 1) for word in words], place, has_entry=False
    )
    return content
