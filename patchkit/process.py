"""Run programs by their words, never by a shell; what goes wrong is one of our errors.

``run`` is for a program that has to work, ``attempt`` for one whose failure is an answer, ``ask``
for a question to another Python; ``follow.py`` is for one that takes long, or whom somebody talks
to.

The children of proofs (``proof/child_process.py``) and the server of `patchkit proof`
(``doctor/proof.py``) are started where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from patchkit.errors import HostError, PatchkitError
from patchkit.follow import Completed, Follow, FollowLimits, Resources
from patchkit.foreign import read_json

_PATIENCE = 60.0  # seconds; sitecustomize may do anything
_MOST = 256 << 20  # bytes of a program's output
_MARK = "patchkit:"  # before an answer: a sitecustomize may also print
# Run by the other Python: the question is its first argument, the rest are the question's own.
_ASK = f"""\
import sys
if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current folder, whose files are nobody's modules
names = {{"__name__": "__main__"}}
exec(compile(sys.argv.pop(1), "<patchkit>", "exec"), names)
import json
sys.stdout.write("\\n{_MARK}" + json.dumps(names["answer"]) + "\\n")
"""


class RunOptions(TypedDict, total=False):
    """How a program runs: by default with the variables and in the folder of this process.

    ``input`` is what it reads on standard input; ``timeout`` is in seconds, None for ever;
    ``umask`` is for the files that it makes; ``resources`` are what it may take of the machine.
    """

    env: Mapping[str, str] | None
    cwd: Path | None
    input: bytes
    timeout: float | None
    umask: int
    resources: Resources


def run(
    *words: str | Path,
    kind: type[PatchkitError] = HostError,
    why: str = "",
    hint: str = "",
    check: bool = True,
    **options: Unpack[RunOptions],
) -> Completed:
    """Run a program that has to work.

    Raises ``kind`` with the program's own last words if it fails or does not end in time, HostError
    if it is missing. Without ``check`` any exit status but a signal is an answer.
    """
    done = attempt(*words, **options)
    answered = done.status is not None and done.status >= 0
    if done.trouble and (check or not answered):
        raise done.error(kind, why=why, hint=hint)
    return done


def attempt(*words: str | Path, **options: Unpack[RunOptions]) -> Completed:
    """Run a program that may fail; raises nothing."""
    timeout = options.get("timeout", _PATIENCE)
    seconds = math.inf if timeout is None else timeout
    running = Follow(
        *words,
        env=options.get("env"),
        cwd=options.get("cwd"),
        umask=options.get("umask", -1),  # -1: that of this process
        given=[
            options.get("input", b"")
        ],  # behind it comes end of file: it waits for no person
        limits=FollowLimits(seconds=seconds, line=_MOST, size=_MOST),
        resources=options.get("resources", Resources()),
    )
    with running:
        output = "".join(running)
    return replace(running.done, output=output)


def ask(
    python: str | Path,
    code: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    isolated: bool = True,
    timeout: float = 120.0,
    hint: str = "",
) -> Any:
    """Return what ``code`` leaves in ``answer``, run by another Python and sent back as JSON.

    ``arguments`` are its ``sys.argv[1:]``. ``isolated`` is Python's -I: no variables, no user's
    packages, no current folder. The answer is as much worth as that Python: check it (``records``).
    Raises HostError, with its last words, if it does not run or does not answer.
    """
    alone = ["-I"] if isolated else []
    done = attempt(
        python, *alone, "-c", _ASK, code, *arguments, env=env, timeout=timeout
    )
    if not done.started:
        raise done.error(hint=hint)
    answers = [each for each in done.output.splitlines() if each.startswith(_MARK)]
    if done.trouble or not answers:
        ended, _, words = (
            done.trouble or "exit code 0: it printed no answer"
        ).partition(": ")
        # Its own words may be a whole traceback, of which the last line says what went wrong.
        last = words.rpartition("\n")[2]
        raise HostError(
            f"{python}: {ended}{last and f': {last}'}",
            why="it is no Python, or a .pth file, sitecustomize or LD_PRELOAD stops it",
            hint=hint,
        )
    try:
        return read_json(answers[-1].removeprefix(_MARK))
    except ValueError:
        raise HostError(f"{python}: its answer is not JSON", hint=hint) from None
