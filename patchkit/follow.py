"""Follow a program while it runs: read its lines as they come, within limits, and write to it.

The output is read as UTF-8; U+FFFD replaces bytes that are not UTF-8.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import select
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from patchkit.errors import HostError, PatchkitError
from patchkit.frozen import Texts, Values, frozen
from patchkit.quoting import quoted
from patchkit.units import BYTES_PER_MIB

if TYPE_CHECKING:
    # At run time they are imported only where a program is run, since they take a third of the
    # time in which a fast command loads.
    import subprocess
    import threading

FOLLOWED: set[subprocess.Popen[bytes]] = set()
_SHOWN = 8  # lines of a program's output that an error shows
_TAIL = 400  # lines of a program's output that are kept
_WIDEST = 1 << 14  # characters of each kept line
_ERRORS = 1 << 18  # bytes of a program's standard error that are kept
# Bytes after which the unfinished part of a line is yielded, if lines have no limit.
_LONGEST = 1 << 20
_PIECE = 1 << 16  # bytes that are read at once
_SILENCE_S = 0.5  # seconds until a silent program is reported as such
_GRACE_S = 10  # seconds for a program to end when it is told to
_FAREWELL_S = 3  # seconds for a program to end when its pipes are closed
# Signals that others send: the kernel if memory is short, a user, an administrator.
_FROM_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}
)


@frozen
class Completed:
    """How a program ended.

    ``status`` is its exit status, negative for a signal, None if it did not start or broke its
    ``FollowLimits``. ``trouble`` says what went wrong and has the last lines of the program, but
    not its name; it is "" for status 0.
    """

    command: Texts
    status: int | None
    output: str = ""
    errors: str = ""
    trouble: str = ""
    started: bool = True

    @property
    def ended_itself(self) -> bool:
        """Return whether the program started, and was not ended by a signal from others.

        A program that broke a limit of the kernel also counts as ended by itself, since it would
        break the limit again with the same input.
        """
        return self.status is not None and -self.status not in _FROM_OUTSIDE

    @property
    def shown(self) -> str:
        """Return the command in backticks, quoted for a shell.

        If a word has several lines, return only the program.
        """
        if any("\n" in word for word in self.command):
            return self.command[0]
        return f"`{quoted(*self.command)}`"

    def last_line(self, noise: str = "(?!)") -> str:
        """Return the last line that the program wrote, or how it ended if there is none.

        A line in which the pattern ``noise`` occurs does not count.
        """
        for line in reversed(f"{self.output}\n{self.errors}".splitlines()):
            if line.strip() and not re.search(noise, line):
                return line.strip()
        return self.trouble

    def error(
        self,
        kind: type[PatchkitError] = HostError,
        *,
        why: str = "",
        hint: str = "",
    ) -> PatchkitError:
        """Return the failure as an error of ``kind``, or as HostError if it did not start."""
        if not self.started:
            what = f"{self.command[0]} {self.trouble}"
            return HostError(what, why=why, hint=hint or "install it, or look at PATH")
        what = f"{self.shown} failed: {self.trouble}"
        return kind(what, why=why, hint=hint)


@frozen
class FollowLimits:
    """The limits of a program.

    ``silence`` is the longest time in seconds without a line, ``seconds`` the longest time in all.
    ``line`` and ``size`` are the most bytes of a line and of the output. With ``mark``, only lines
    that contain this text count: the rest of the line behind it is yielded, and other lines do not
    end a silence.
    """

    mark: str = ""
    silence: float = math.inf
    seconds: float = math.inf
    line: float = math.inf
    size: float = math.inf


@frozen
class Resources:
    """Limits that the kernel enforces; None is no limit.

    ``memory`` are bytes of address space, ``processor`` seconds of processor time, ``written`` the
    bytes of each file that is written.
    """

    memory: int | None = None
    processor: int | None = None
    written: int | None = None

    def bind(self, process: int) -> None:
        """Set the limits of a process that was just started; its children inherit them.

        They are not set before the start, since Python code must not run between fork and exec if
        there are other threads. The short time without limits does no harm: the program still
        loads.
        """
        limits = {
            resource.RLIMIT_AS: self.memory,
            resource.RLIMIT_CPU: self.processor,
            resource.RLIMIT_FSIZE: self.written,
        }
        for kind, limit in limits.items():
            if limit is None:
                continue

            # A limit above the hard limit of this process is not allowed.
            hard = resource.getrlimit(kind)[1]
            soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            with contextlib.suppress(ProcessLookupError):  # the program has ended
                resource.prlimit(process, kind, (soft, hard))

    def breach(self, status: int) -> str:
        """Return a text about the limit whose signal ended the program, "" for another status.

        The limit of memory has no signal.
        """
        match -status:
            case signal.SIGXCPU:
                return f"it took more than {self.processor} s of the processor"
            case signal.SIGXFSZ:
                return f"it wrote more than {self.written} bytes"
            case _:
                return ""


class Follow(contextlib.AbstractContextManager["Follow"]):
    """A program whose lines are read while it runs; after the last one, ``done`` says how it ended.

    The iterator yields each line with its line feed, and "" while the program is silent. Standard
    output and standard error are one stream. A carriage return also ends a line, since programs
    draw their progress with it. The output in ``done`` is the last 400 lines. If the ``with`` block
    is left early, the program is ended. With ``inherit``, the program gets this process's open
    files, such as a lock.

    With ``given`` it is a dialogue: ``given`` is written to the program's standard input while its
    lines are read, so that neither is in memory as a whole. Standard error is kept apart, in
    ``done.errors``; the output in ``done`` is the last 8 lines. An exception that ``given`` raises
    is raised by the iterator. With ``beat``, the program gets a line feed every ``beat`` seconds,
    as a sign that this process still listens. Its input ends when the block ends, and the program
    is ended when its output has ended.

    A program that breaks one of ``limits`` is killed, and its status is None. ``resources`` are
    enforced by the kernel, and the status is then the program's.
    """

    done: Completed

    def __init__(
        self,
        *words: str | Path,
        env: Values | None = None,
        cwd: Path | None = None,
        umask: int = -1,
        inherit: bool = False,
        given: Iterable[bytes] | None = None,
        beat: float = 0.0,
        limits: FollowLimits = FollowLimits(),
        resources: Resources = Resources(),
    ) -> None:
        import subprocess
        import threading

        self._command = tuple(map(str, words))
        self._limits = limits
        self._beat = beat
        self._resources = resources
        self._process: subprocess.Popen[bytes] | None = None
        self._feeder: threading.Thread | None = None
        self._over = threading.Event()
        self._errors = bytearray()
        self._given_up = ""
        self._failed: list[BaseException] = []
        is_dialogue = given is not None

        try:
            self._process = subprocess.Popen(
                self._command,
                env=env,
                cwd=cwd,
                umask=umask,
                close_fds=not inherit,
                stdin=subprocess.PIPE if is_dialogue else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if is_dialogue else subprocess.STDOUT,
                bufsize=0,
            )
        except (OSError, ValueError) as error:
            self.done = Completed(
                command=self._command,
                status=None,
                trouble=_start_trouble(self._command[0], env, error),
                started=False,
            )
            return

        FOLLOWED.add(self._process)
        resources.bind(self._process.pid)
        self._began = self._heard = time.monotonic()
        if given is not None:
            # In a thread, so that the limits also hold for a program that does not read its input.
            self._feeder = threading.Thread(
                target=self._feed, args=(given,), daemon=True
            )
            self._feeder.start()

    def __exit__(self, *_error: object) -> None:
        """End the program if it still runs, and kill it if it has not ended after ten seconds."""
        import subprocess

        if (process := self._process) is None:
            return

        FOLLOWED.discard(process)
        self._hang_up()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()

        with process:  # waits for the program, and closes its output
            pass

    def __iter__(self) -> Iterator[str]:
        if (process := self._process) is None:
            return

        tail: deque[str] = deque(maxlen=_SHOWN if self._feeder else _TAIL)
        mark = self._limits.mark

        for line in self._lines():
            if line:
                tail.append(line[-_WIDEST:])
            if mark in line:
                yield line.partition(mark)[2] if mark else line
                self._heard = time.monotonic()

        self._hang_up()
        if self._failed:
            raise self._failed[0]
        self.done = self._complete(process.wait(), "".join(tail))

    def _complete(self, status: int, output: str) -> Completed:
        """Return how the program ended, with its last lines."""
        errors = self._errors.decode(errors="replace")
        trouble = self._given_up
        if status and not trouble:
            words = errors.strip() or output.strip() or "it printed nothing"
            last_lines = "\n".join(words.split("\n")[-_SHOWN:])
            trouble = (
                f"{self._resources.breach(status) or ending(status)}: {last_lines}"
            )

        return Completed(
            command=self._command,
            status=None if self._given_up else status,
            output=output,
            errors=errors,
            trouble=trouble,
        )

    def _feed(self, given: Iterable[bytes]) -> None:
        stdin = self._pipe("stdin")
        # An OSError means that the program has ended or reads no more.
        with contextlib.suppress(OSError), stdin:
            for part in self._without_errors(given):
                view = memoryview(part)
                while view:
                    view = view[stdin.write(view) :]
            while self._beat and not self._failed and not self._over.wait(self._beat):
                stdin.write(b"\n")

    def _without_errors(self, given: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the input of the program. Keep an error of ``given`` for ``__iter__`` to raise.

        The error is kept before the input is closed, since the program may end as soon as it is.
        """
        try:
            yield from given
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001
            self._failed.append(error)

    def _pipe(self, name: str) -> IO[bytes]:
        return cast("IO[bytes]", getattr(self._process, name))

    def _lines(self) -> Iterator[str]:
        """Yield each line with its line feed, and "" while the program is silent.

        The last line may lack a line feed.
        """
        limits = self._limits
        unfinished = bytearray()
        size = 0
        for part in self._parts():
            if not part:
                yield ""
                continue

            size += len(part)
            if size > limits.size:
                self._give_up(f"it sent more than {limits.size / BYTES_PER_MIB:g} MiB")
                return

            data = part if self._feeder else part.replace(b"\r", b"\n")
            unfinished += data
            if b"\n" in data:
                *lines, unfinished = unfinished.split(b"\n")
                yield from (line.decode(errors="replace") + "\n" for line in lines)
            elif len(unfinished) > limits.line:
                longest = limits.line / BYTES_PER_MIB
                self._give_up(f"it sent a line of more than {longest:g} MiB")
                return
            elif len(unfinished) > _LONGEST and limits.line == math.inf:
                yield unfinished.decode(errors="replace")
                unfinished.clear()

        if unfinished and not self._given_up:
            yield unfinished.decode(errors="replace")

    def _parts(self) -> Iterator[bytes]:
        """Yield the output as it comes, and b"" in silence, up to its end or a limit of time.

        The last part of the standard error of a dialogue is kept in ``_errors``.
        """
        stdout = self._pipe("stdout")
        stderr = self._pipe("stderr") if self._feeder else None
        ends = [stdout, stderr] if stderr else [stdout]
        while stdout in ends or (ends and self._may_print_errors()):
            deadline, reason = self._deadline()
            seconds_left = max(deadline - time.monotonic(), 0.0)
            # After the deadline, only output that is ready is read, since a program can write to
            # standard error for ever.
            awaited = ends
            if not seconds_left:
                awaited = [end for end in ends if end is stdout]
            timeout = min(seconds_left, _SILENCE_S)
            ready = select.select(awaited, [], [], timeout)[0]
            if not ready and not seconds_left:
                self._give_up(reason)
                return

            for pipe in ready:
                data = os.read(pipe.fileno(), _PIECE)
                if not data:
                    ends.remove(pipe)
                elif pipe is stdout:
                    yield data
                else:
                    self._keep_errors(data)
            if not ready and not stderr:
                yield b""

    def _may_print_errors(self) -> bool:
        """Return whether to wait for standard error after the end of the output."""
        process = cast("subprocess.Popen[bytes]", self._process)
        return not self._beat and process.poll() is None

    def _deadline(self) -> tuple[float, str]:
        """Return the time (of ``time.monotonic``) at which to kill the program, and the reason."""
        silent = self._heard + self._limits.silence
        late = self._began + self._limits.seconds
        if silent <= late:
            return silent, f"no sign of life for {self._limits.silence:g} s"
        return late, f"no answer within {self._limits.seconds:g} s"

    def _keep_errors(self, errors: bytes) -> None:
        self._errors[:] = (self._errors + errors)[-_ERRORS:]

    def _give_up(self, reason: str) -> None:
        assert self._process is not None
        self._given_up = reason
        self._process.kill()

    def _hang_up(self) -> None:
        """End a dialogue: close input and output, wait three seconds, then kill the program.

        Of standard error, only what has come already is read: a master process of ssh keeps that
        pipe open after the program's end.
        """
        import subprocess

        if (feeder := self._feeder) is None or self._process is None:
            return
        self._over.set()
        feeder.join(1)
        if feeder.is_alive():
            self._process.kill()  # the program does not read its input
            feeder.join(1)

        self._pipe("stdout").close()
        try:
            self._process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

        stderr = self._pipe("stderr")
        if not stderr.closed:
            os.set_blocking(stderr.fileno(), False)
            self._keep_errors(stderr.read(_ERRORS) or b"")
            stderr.close()


def _start_trouble(
    program: str,
    env: Values | None,
    error: Exception,
) -> str:
    """Return why a program did not start, to follow its name: ``is not installed``."""
    path = None if env is None else env.get("PATH", os.defpath)
    # ENOENT alone does not tell this: it can be about cwd or about a script's interpreter, too.
    if "/" not in program and shutil.which(program, path=path) is None:
        return "is not installed"

    reason = getattr(error, "strerror", None) or str(error)
    file = getattr(error, "filename", None)
    if file not in (None, program):
        reason = f"{file}: {reason}"  # the file is cwd then
    return f"does not run: {reason}"


def ending(status: int) -> str:
    """Return how a process ended: ``exit code 2``, ``killed by SIGKILL``, "" for status 0."""
    if status >= 0:
        return f"exit code {status}" if status else ""
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
