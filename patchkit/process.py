"""Run programs without a shell, and raise failures as patchkit's errors.

``run`` is for a program that must succeed, ``attempt`` for one that may fail, and ``ask`` for code
that another Python runs. ``follow.py`` is for a long-running program, or a dialogue with a program.

Two other modules start processes themselves: ``proof/child_process.py`` and ``doctor/proof.py``.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from patchkit.errors import HostError, PatchkitError
from patchkit.follow import Completed, Follow, FollowLimits, Resources
from patchkit.foreign import read_json
from patchkit.frozen import Values

_PATIENCE = 60.0  # seconds
_MOST = 256 << 20  # bytes of a program's output
_MARK = "patchkit:"  # in front of an answer, since a sitecustomize may print lines, too
# The other Python runs this text. Its first argument is the code of the question; the others become
# sys.argv[1:] of that code.
_ASK = f"""\
import sys
if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current folder, whose files are nobody's modules
names = {{"__name__": "__main__"}}
exec(compile(sys.argv.pop(1), "<patchkit>", "exec"), names)
import json
sys.stdout.write("\\n{_MARK}" + json.dumps(names["answer"]) + "\\n")
"""


class ProgramOptions(TypedDict, total=False):
    """How a program runs.

    ``env`` are its variables and ``cwd`` its folder; default: those of this process. ``umask``
    applies to the files that the program makes. ``resources`` are limits of memory and time.
    """

    env: Values | None
    cwd: Path | None
    umask: int
    resources: Resources


class RunOptions(ProgramOptions, total=False):
    """How a program runs, and the options of ``attempt``."""

    input: bytes
    timeout: float | None


def run(
    *words: str | Path,
    kind: type[PatchkitError] = HostError,
    why: str = "",
    hint: str = "",
    check: bool = True,
    **options: Unpack[RunOptions],
) -> Completed:
    """Run a program that must succeed; return how it ended.

    Raises ``kind``, with the last lines of the program, if it fails or does not end in time;
    HostError if it does not start. Without ``check``, an exit status other than 0 is no failure;
    a signal or a broken limit still is one.
    """
    done = attempt(*words, **options)
    answered = done.status is not None and done.status >= 0
    if done.trouble and (check or not answered):
        raise done.error(kind, why=why, hint=hint)
    return done


def attempt(
    *words: str | Path,
    input: bytes = b"",  # noqa: A002
    timeout: float | None = _PATIENCE,
    **options: Unpack[ProgramOptions],
) -> Completed:
    """Run a program that may fail; return how it ended.

    ``input`` is written to standard input. ``timeout`` is in seconds; None is no limit. A failure
    is in ``trouble`` of the result, and not raised.
    """
    seconds = math.inf if timeout is None else timeout
    limits = FollowLimits(seconds=seconds, line=_MOST, size=_MOST)
    # Standard input ends behind the input, so the program cannot wait for a user.
    with Follow(*words, given=[input], limits=limits, **options) as running:
        output = "".join(running)
    return replace(running.done, output=output)


def ask(
    python: str | Path,
    code: str,
    *arguments: str,
    env: Values | None = None,
    isolated: bool = True,
    timeout: float = 120.0,
    hint: str = "",
) -> Any:
    """Run ``code`` in another Python, and return the value of its variable ``answer``.

    The value is sent as JSON. ``arguments`` are ``sys.argv[1:]`` of the code. ``isolated`` is
    Python's -I: variables, packages of the user and the current folder are ignored. The other
    Python is not trusted, so the caller must check the answer with ``records``. Raises HostError if
    the Python does not run or does not answer.
    """
    flags = ["-I"] if isolated else []
    words = (python, *flags, "-c", _ASK, code, *arguments)
    done = attempt(*words, env=env, timeout=timeout)
    if not done.started:
        raise done.error(hint=hint)

    answers = [line for line in done.output.splitlines() if line.startswith(_MARK)]
    if done.trouble or not answers:
        trouble = done.trouble or "exit code 0: it printed no answer"
        end, _, text = trouble.partition(": ")
        # The last line of a traceback says what went wrong.
        last_line = text.rpartition("\n")[2]
        raise HostError(
            f"{python}: {end}{last_line and f': {last_line}'}",
            why="it is no Python, or a .pth file, sitecustomize or LD_PRELOAD stops it",
            hint=hint,
        )
    try:
        return read_json(answers[-1].removeprefix(_MARK))
    except ValueError:
        raise HostError(f"{python}: its answer is not JSON", hint=hint) from None
