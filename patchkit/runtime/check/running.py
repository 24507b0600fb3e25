"""Read running vLLM servers: /proc of a process, `docker inspect` of a container."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from patchkit.errors import HostError, UsageError
from patchkit.process import attempt
from patchkit.runtime.check.commands import CommandReader, Place
from patchkit.runtime.check.content import RUNNING, Assignment, FileContent, Image, Word
from patchkit.runtime.check.situation import CheckedText, StatedVersion

_LARGEST = 4 << 20  # bytes of an environment or a command line


def find_running(name: str, root: Path) -> list[CheckedText]:
    """Return the server of a PID or a container; of "" all that this user may read.

    Raises HostError if there is none, UsageError for a process or container that cannot be read.
    """
    if name and not name.isdecimal():
        return [_inspect_container(name)]
    folders = [root / "proc" / name] if name else sorted((root / "proc").glob("[0-9]*"))
    found = []
    for folder in folders:
        try:
            server = _read_process(folder)
        except OSError as error:
            if name:
                raise UsageError(
                    f"process {name}: {error.strerror}",
                    why="only its own user and root may read what a process was started with",
                    hint="run it as that user, or name a process that runs",
                ) from None
            continue
        if server.content.commands or name:
            found.append(server)
    if not found:
        raise HostError(
            "no vLLM server runs here that this user may read",
            hint="name a process or a container: patchkit check --running PID",
        )
    return found


def _read_process(folder: Path) -> CheckedText:
    texts = []
    for name in ("cmdline", "environ"):
        with (folder / name).open("rb") as file:
            texts.append(file.read(_LARGEST).decode(errors="replace"))
    words, environment = (text.split("\0") for text in texts)
    words = [word for word in words if word]
    content = _read_started([pair for pair in environment if "=" in pair], words, Place())
    name = content.commands[0].program if content.commands else words[0] if words else "?"
    # What is installed beside its program, without running anything of it.
    homes = [Path(word).parent.parent for word in words[:2] if word.startswith("/")]
    form = "lib/python3*/site-packages/vllm-*.dist-info"
    places = [place for home in homes for place in home.glob(form)]
    versions = [StatedVersion("vllm", place.stem.split("-")[1], 1, str(place)) for place in places]
    where = f"process {folder.name} ({name})"
    return CheckedText(where=where, content=content, versions=versions[:1])


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
        (found,) = json.loads(done.output)
        image = str(found["Config"]["Image"])
        words = [found["Path"], *(found["Args"] or ())]
        content = _read_started(found["Config"]["Env"] or (), words, Place(block=1, image=image))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HostError(
            f"{program} inspect {name}: an answer that cannot be read: {error}"
        ) from None
    return CheckedText(where=f"container {name}", content=content)


def _read_started(pairs: Iterable[str], words: Sequence[str], place: Place) -> FileContent:
    content = FileContent(RUNNING)
    if place.image:
        content.images.append(Image(place.image, 1, place.block))
    for pair in pairs:
        name, _sign, value = pair.partition("=")
        content.add_variable(Assignment(1, name, value, place.block))
    CommandReader(content).read_entry([Word(word, 1) for word in words], place, has_entry=False)
    return content
