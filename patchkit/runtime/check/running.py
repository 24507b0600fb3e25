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


def find_running(name: str, root: Path) -> list[CheckedText]:
    """Return the server of a PID or a container, or with "" all. Raises HostError, UsageError."""
    if name.isdecimal():
        try:
            return [_read_process(root / "proc" / name)]
        except OSError as error:
            raise UsageError(
                f"process {name}: {error.strerror}",
                why="only its own user and root may read what a process was started with",
                hint="run it as that user, or name a process that runs",
            ) from None
    if name:
        return [_inspect_container(name)]

    servers = []
    for folder in sorted((root / "proc").glob("[0-9]*")):
        try:
            process = _read_process(folder)
        except OSError:  # it has ended, or is another user's
            continue
        if process.content.commands:
            servers.append(process)

    if not servers:
        raise HostError(
            "no vLLM server runs here that this user may read",
            hint="name a process or a container: patchkit check --running PID",
        )
    return servers


def _read_process(folder: Path) -> CheckedText:
    """Return what a process was started with. Raises OSError."""
    texts = [
        (folder / name).read_bytes().decode(errors="replace")
        for name in ("cmdline", "environ")
    ]
    # The strings of a file of /proc end with NUL.
    words, pairs = ([row for row in text.split("\0") if row] for text in texts)
    content = _read_started(pairs, words, Place())
    program = content.commands[0].program if content.commands else "no server"
    return CheckedText(where=f"process {folder.name} ({program})", content=content)


def _inspect_container(name: str) -> CheckedText:
    """Return what a container was started with, by the JSON of `docker inspect`."""
    for program in ("docker", "podman"):
        inspection = attempt(
            program, "inspect", "--type=container", "--", name, timeout=30
        )
        if inspection.status == 0:
            break
    else:
        raise UsageError(
            f"no container {name!r}: {inspection.trouble}",
            hint="`docker ps` lists those that run; a process is named by its number",
        )

    try:
        (container,) = read_json(inspection.output)
        config = container["Config"]
        image = Image(str(config["Image"]), 1, 1)
        words = [container["Path"], *(container["Args"] or ())]
        place = Place(image.block, image.text)
        content = _read_started(config["Env"] or (), words, place)
        content.images.append(image)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HostError(
            f"{program} inspect {name}: an answer that cannot be read: {error}"
        ) from None

    return CheckedText(where=f"container {name}", content=content)


def _read_started(
    pairs: Iterable[str], words: Sequence[str], place: Place
) -> FileContent:
    content = FileContent(RUNNING)

    for pair in pairs:
        name, _sign, value = pair.partition("=")
        content.variables.append(Assignment(1, name, value, place.block))

    command = [Word(word, 1) for word in words]
    CommandReader(content).read_entry(command, place, has_entry=False)
    return content
