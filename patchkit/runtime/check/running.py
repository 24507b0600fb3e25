"""Read from /proc or with `docker inspect` how running vLLM servers were started."""

from contextlib import suppress
from pathlib import Path

from patchkit.errors import HostError, UsageError
from patchkit.process import attempt
from patchkit.reading import read_strings
from patchkit.runtime.check.commands import CommandReader, Place
from patchkit.runtime.check.content import (
    RUNNING,
    Assignment,
    CheckedText,
    FileContent,
    Word,
)
from patchkit.runtime.check.formats import read_content


def find_running(name: str, root: Path) -> list[CheckedText]:
    """Return the environment and the command with which servers were started.

    ``name`` is a process id or the name of a container; "" means all vLLM servers that this user
    may read. ``root`` is the folder that contains ``proc``. Raises UsageError if the process or
    container cannot be read, HostError if no server runs or the answer of `docker inspect` is
    malformed.
    """
    if name and not name.isdecimal():
        return [_inspect_container(name)]

    servers = []
    for folder in sorted((root / "proc").glob(name or "[0-9]*")):
        with suppress(OSError):  # the process has ended, or belongs to another user
            process = _read_process(folder)
            if name or process.content.commands:
                servers.append(process)

    if name and not servers:
        raise UsageError(
            f"process {name}: cannot be read",
            why="it has ended, or is another user's: only that user and root may read it",
            hint="`ps -eo pid,user,args` lists those that run; run check as that user",
        )
    if not servers:
        raise HostError(
            "no vLLM server runs here that this user may read",
            hint="name a process or a container: patchkit check --running PID",
        )
    return servers


def _read_process(folder: Path) -> CheckedText:
    """Return the environment and command of a process. Raises OSError if /proc cannot be read."""
    content = FileContent(RUNNING)
    for pair in read_strings(folder / "environ"):
        name, _sign, value = pair.partition("=")
        content.variables.append(Assignment(1, name, value))

    words = [Word(word, 1) for word in read_strings(folder / "cmdline")]
    CommandReader(content).read_entry(words, Place(), has_entry=False)
    program = content.commands[0].program if content.commands else "no server"
    return CheckedText(where=f"process {folder.name} ({program})", content=content)


def _inspect_container(name: str) -> CheckedText:
    """Return the environment and command of a container, which are read like those in a file."""
    request = ("inspect", "--type=container", "--format={{json .Config}}", "--", name)
    for program in ("docker", "podman"):
        inspection = attempt(program, *request, timeout=30)
        if inspection.status == 0:
            break
    else:
        raise UsageError(
            f"no container {name!r}: {inspection.trouble}",
            hint="`docker ps` lists those that run; a process is named by its number",
        )

    content = read_content(inspection.output, "config.json")
    content.kind = RUNNING
    if not content.variables:
        raise HostError(f"{program} inspect {name}: an answer that cannot be read")

    return CheckedText(where=f"container {name}", content=content)
