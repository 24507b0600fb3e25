"""Run programs by their words, never by a shell; what goes wrong is one of our errors.

``run`` is for a program that has to work, ``attempt`` for one whose failure is an answer,
``Follow`` for one that takes long and tells how far it is, ``sieve`` for one that lets parts of a
stream through, ``ask`` for a question to another Python; ``dialogue.py`` is for one that answers by
lines as long as somebody listens. Their output is read as UTF-8, with U+FFFD for what is not.

Those of proofs (``proof/child_process.py``) and a server that `patchkit bench` measures
(``measure/rounds.py``) are started where they are used.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, TypedDict, Unpack

from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted

if TYPE_CHECKING:
    import subprocess

RUNNING: set[subprocess.Popen[bytes]] = set()
"""Programs that an interrupt ends: those that are followed, and of dialogues."""

_TAIL, _SHOWN = 400, 8  # lines of a program's output that are kept, and that an error shows
_LONGEST = 1 << 20  # bytes of a line that are waited for
_SILENCE_S, _GRACE_S = 0.5, 10
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


class Follow:
    """A program whose lines are read while it runs; ``done`` says how it ended once all are read.

    As an iterator it gives each line with its line feed, errors among the others, and "" while the
    program is silent. A carriage return ends a line as well: that is how progress is drawn. A block
    of ``with`` that is left early ends the program. The output in ``done`` are the last 400 lines.
    """

    done: Completed

    def __init__(
        self,
        *words: str | Path,
        env: Mapping[str, str],
        cwd: Path | None = None,
        umask: int = -1,
        inherit: bool = False,
    ) -> None:
        """Start it; with ``inherit`` it keeps this process's open files, such as a lock."""
        import subprocess

        self._command = tuple(map(str, words))
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                self._command,
                env=env,
                cwd=cwd,
                umask=umask,
                close_fds=not inherit,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
            )
            RUNNING.add(self._process)
        except (OSError, ValueError) as error:
            self.done = not_started(self._command, env, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """End the program if it still runs: after some seconds it is killed."""
        import subprocess

        if (process := self._process) is None:
            return
        RUNNING.discard(process)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        with process:  # waits, and closes its output
            pass

    def __iter__(self) -> Iterator[str]:
        if (process := self._process) is None:
            return
        tail: deque[str] = deque(maxlen=_TAIL)
        for line in self._lines():
            if line:
                tail.append(line)
            yield line
        self.done = completed(self._command, process.wait(), "".join(tail), "")

    def _lines(self) -> Iterator[str]:
        import select

        assert self._process is not None
        assert self._process.stdout is not None
        stdout, rest = self._process.stdout, b""
        while True:
            if not select.select([stdout], [], [], _SILENCE_S)[0]:
                yield ""
                continue
            if not (read := stdout.read(1 << 16)):
                break
            *whole, rest = (rest + read).replace(b"\r", b"\n").split(b"\n")
            yield from (decoded(line) + "\n" for line in whole)
            if len(rest) > _LONGEST:
                yield decoded(rest)
                rest = b""
        if rest:
            yield decoded(rest)


def sieve(
    *words: str | Path, given: Iterable[bytes], env: Mapping[str, str]
) -> Generator[bytes, None, Completed]:
    """Yield the lines that a program lets through of what it is given; return how it ended.

    It is given as much as it takes, while its lines are read: neither is in memory as a whole. An
    error of ``given`` is raised here. If the generator is closed, the program is ended first.
    """
    import subprocess
    import tempfile
    import threading

    command = tuple(map(str, words))
    failed: list[BaseException] = []
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        except (OSError, ValueError) as error:
            return not_started(command, env, error)
        assert process.stdin is not None
        assert process.stdout is not None

        def feed(into: IO[bytes]) -> None:
            try:
                with into:
                    for each in given:
                        into.write(each)
            except BrokenPipeError:
                pass  # it ended, or nobody reads on
            except BaseException as error:  # noqa: BLE001  # a thread's errors are seen by nobody
                failed.append(error)

        feeder = threading.Thread(target=feed, args=(process.stdin,), daemon=True)
        feeder.start()
        try:
            yield from process.stdout
            feeder.join()
        except BaseException:
            process.kill()
            raise
        finally:
            process.stdout.close()
            process.wait()
        if failed:
            raise failed[0]
        errors.seek(0)
        return completed(command, process.returncode, "", decoded(errors.read()))


def end_dialogues() -> None:
    """End the programs of ``dialogue`` and ``Follow`` in all threads: an interrupt came."""
    for each in list(RUNNING):
        each.terminate()


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
