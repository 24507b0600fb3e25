"""Run programs by their words, never by a shell; what goes wrong is one of our errors.

``run`` is for a program that has to work, ``attempt`` for one whose failure is an answer, ``ask``
for a question to another Python; ``follow.py`` is for one that takes long, or whom somebody talks
to. Their output is read as UTF-8, with U+FFFD for what is not.

Those of proofs (``proof/child_process.py``) and a server that `patchkit bench` measures
(``measure/rounds.py``) are started where they are used.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted

_SHOWN = 8  # lines of a program's output that an error shows
_PATIENCE = 60.0  # seconds; sitecustomize may do anything
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
    ``umask`` is for the files that it makes. With ``terminal`` it shares the terminal of this
    process, if there is one: it may ask there, and its errors are seen there and not kept.
    """

    env: Mapping[str, str] | None
    cwd: Path | None
    input: bytes
    timeout: float | None
    umask: int
    terminal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """How a program ended.

    ``status`` is its exit status, negative for a signal, None if it did not start or did not end in
    time. ``trouble`` is what went wrong, with the program's last words but not its name; "" for
    status 0.
    """

    command: tuple[str, ...]
    status: int | None
    output: str = ""
    errors: str = ""
    trouble: str = ""
    started: bool = True

    @property
    def shown(self) -> str:
        """Return the command as it can be pasted; only its program if a word is a whole script."""
        if any("\n" in word for word in self.command):
            return self.command[0]
        return f"`{quoted(*self.command)}`"

    def error(
        self, kind: type[PatchkitError] = HostError, *, why: str = "", hint: str = ""
    ) -> PatchkitError:
        """Return the error that says what went wrong; if it did not start, that is a HostError."""
        if not self.started:
            what = f"{self.command[0]} {self.trouble}"
            return HostError(what, why=why, hint=hint or "install it, or look at PATH")
        what = f"{self.shown} failed: {self.trouble}"
        return kind(what, why=why, hint=hint)


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
    import subprocess  # a third of a fast probe's imports: only where a program is run

    command = tuple(map(str, words))
    env, given = options.get("env"), options.get("input", b"")
    timeout, terminal = options.get("timeout", _PATIENCE), options.get("terminal", False)
    try:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=options.get("cwd"),
            umask=options.get("umask", -1),  # -1: that of this process
            # Without input it reads end of file, and cannot wait for a person.
            stdin=subprocess.PIPE if given else None if terminal else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if terminal and os.isatty(2) else subprocess.PIPE,
        )
    except (OSError, ValueError) as error:
        return not_started(command, env, error)
    with process:
        try:
            output, errors = process.communicate(given or None, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return Completed(
                command=command, status=None, trouble=f"no answer within {timeout or 0:g} s"
            )
        except BaseException:
            process.kill()  # an interrupt: `with` would wait until the program ends by itself
            raise
    return completed(command, process.returncode, decoded(output), decoded(errors))


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
    done = attempt(python, *alone, "-c", _ASK, code, *arguments, env=env, timeout=timeout)
    if not done.started:
        raise done.error(hint=hint)
    answers = [each for each in done.output.splitlines() if each.startswith(_MARK)]
    if done.trouble or not answers:
        ended, _, words = (done.trouble or "exit code 0: it printed no answer").partition(": ")
        # Its own words may be a whole traceback, of which the last line says what went wrong.
        last = words.rpartition("\n")[2]
        raise HostError(
            f"{python}: {ended}{last and f': {last}'}",
            why="it is no Python, or a .pth file, sitecustomize or LD_PRELOAD stops it",
            hint=hint,
        )
    try:
        return json.loads(answers[-1].removeprefix(_MARK))
    except (ValueError, RecursionError):
        raise HostError(f"{python}: its answer is not JSON", hint=hint) from None


def ending(status: int) -> str:
    """Return how a process ended: ``exit code 2``, ``killed by SIGKILL``, "" for status 0."""
    if status >= 0:
        return f"exit code {status}" if status else ""
    names = {each.value: each.name for each in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"


def completed(command: tuple[str, ...], status: int, output: str, errors: str) -> Completed:
    """Return how a program ended, with its last words."""
    words = (errors.strip() or output.strip() or "it printed nothing").split("\n")[-_SHOWN:]
    trouble = f"{ending(status)}: {chr(10).join(words)}" if status else ""
    return Completed(command=command, status=status, output=output, errors=errors, trouble=trouble)


def not_started(
    command: tuple[str, ...], env: Mapping[str, str] | None, error: OSError | ValueError
) -> Completed:
    """Return why a program did not start: it is absent, or what the system or Python says."""
    path = None if env is None else env.get("PATH", os.defpath)
    # ENOENT alone may also be about the folder, or about the interpreter of a script.
    absent = "/" not in command[0] and shutil.which(command[0], path=path) is None
    words = getattr(error, "strerror", None) or str(error)
    if isinstance(error, OSError) and error.filename not in (None, command[0]):
        words = f"{error.filename}: {words}"  # the folder
    trouble = "is not installed" if absent else f"does not run: {words}"
    return Completed(command=command, status=None, trouble=trouble, started=False)


def decoded(data: bytes | None) -> str:
    """Return what a program wrote."""
    return (data or b"").decode(errors="replace")
