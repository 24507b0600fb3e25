"""Follow a program while it runs: read its lines as they come, within limits, and write to it.

Its output is read as UTF-8, with U+FFFD for other bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from patchkit.errors import HostError, PatchkitError
from patchkit.frozen import frozen
from patchkit.quoting import quoted
from patchkit.units import BYTES_PER_MIB

if TYPE_CHECKING:
    # At run time they are imported where a program is run: a third of a fast probe's imports.
    import subprocess
    import threading

FOLLOWED: set[subprocess.Popen[bytes]] = set()
_SHOWN = 8  # lines of a program's output that an error shows
_TAIL = 400  # lines of a program's output that are kept
_WIDEST = 1 << 14  # characters of each line that is kept
_ERRORS = 1 << 18  # bytes of a program's errors that are kept
_LONGEST = 1 << 20  # bytes of a line that are waited for, without a limit
_PIECE = 1 << 16  # bytes that are read at once
_SILENCE_S = 0.5  # seconds until a silent program is reported as such
_GRACE_S = 10  # seconds for a program to end when it is told to
_FAREWELL_S = 3  # seconds for a program to end when its pipes are closed
# Signals that come from outside: the kernel's for want of memory, a person's, an administrator's.
_FROM_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}
)


@frozen
class Completed:
    """How a program ended.

    ``status`` is its exit status, negative for a signal, None if it did not start or broke its
    ``FollowLimits``. ``trouble`` says what went wrong, with the last lines of the program but
    without its name; "" for status 0.
    """

    command: tuple[str, ...]
    status: int | None
    output: str = ""
    errors: str = ""
    trouble: str = ""
    started: bool = True

    @property
    def ended_itself(self) -> bool:
        """Return whether the program started, and nobody else ended it.

        A program that broke a limit on its resources ended itself: the same input breaks the limit
        again.
        """
        return self.status is not None and -self.status not in _FROM_OUTSIDE

    @property
    def shown(self) -> str:
        """Return the command, quoted for a shell; only the program if a word has several lines."""
        if any("\n" in word for word in self.command):
            return self.command[0]
        return f"`{quoted(*self.command)}`"

    def error(
        self,
        kind: type[PatchkitError] = HostError,
        *,
        why: str = "",
        hint: str = "",
    ) -> PatchkitError:
        """Return the failure as an error of ``kind``; HostError if it did not start."""
        if not self.started:
            what = f"{self.command[0]} {self.trouble}"
            return HostError(what, why=why, hint=hint or "install it, or look at PATH")
        what = f"{self.shown} failed: {self.trouble}"
        return kind(what, why=why, hint=hint)


@frozen
class FollowLimits:
    """The limits of a program.

    ``silence`` and ``seconds`` are the longest times without a line and in all; ``line`` and
    ``size`` are the most bytes of a line and of the output. With ``mark`` only lines that contain
    it count: the text after the mark is yielded, and other lines do not end a silence.
    """

    mark: str = ""
    silence: float = math.inf
    seconds: float = math.inf
    line: float = math.inf
    size: float = math.inf


@frozen
class Resources:
    """Limits that the kernel holds: bytes of address space, seconds of processor, bytes of a file.

    None is no limit.
    """

    memory: int | None = None
    processor: int | None = None
    written: int | None = None

    def bind(self, process: int) -> None:
        """Set the limits of a process that was just started, and of its children.

        The limits are set after the start, since Python code must not run between fork and exec if
        there are other threads. Until then the program only loads itself.
        """
        limits = {
            resource.RLIMIT_AS: self.memory,
            resource.RLIMIT_CPU: self.processor,
            resource.RLIMIT_FSIZE: self.written,
        }
        for kind, limit in limits.items():
            if limit is None:
                continue

            # The hard limit of this process can only be lowered.
            hard = resource.getrlimit(kind)[1]
            soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                resource.prlimit(process, kind, (soft, hard))

    def breach(self, status: int) -> str:
        """Return a text about the limit that a signal reports, "" for another exit status.

        No signal reports the limit of memory.
        """
        match -status:
            case signal.SIGXCPU:
                return f"it took more than {self.processor} s of the processor"
            case signal.SIGXFSZ:
                return f"it wrote more than {self.written} bytes"
            case _:
                return ""


class Follow(contextlib.AbstractContextManager["Follow"]):
    """A program whose lines are read while it runs; ``done`` says how it ended once all are read.

    Its iterator yields each line with its line feed, errors among the others, and "" while the
    program is silent. A carriage return ends a line as well: that is how progress is drawn. The
    output in ``done`` is the last 400 lines. A block of ``with`` that is left early ends the
    program. With ``inherit`` it keeps this process's open files, such as a lock.

    With ``given`` it is a dialogue: the program reads that while its lines are read, neither is in
    memory as a whole, errors are apart, and an error of ``given`` is raised here. ``done`` has the
    last 8 lines. With ``beat`` the program gets a line feed every so many seconds, so that it knows
    that somebody listens, and its input ends with the block: it may not outlive its output.

    A program that breaks one of ``limits`` is killed, and its status is None. The kernel holds
    ``resources``; the status is then that of the program.
    """

    done: Completed

    def __init__(
        self,
        *words: str | Path,
        env: Mapping[str, str] | None = None,
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
            # A thread: a program that does not read must not keep this one from its limits.
            self._feeder = threading.Thread(
                target=self._feed, args=(given,), daemon=True
            )
            self._feeder.start()

    def __exit__(self, *_error: object) -> None:
        """End the program if it still runs; kill it if it takes more than ten seconds to end."""
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

        with process:  # waits, and closes its output
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
        with contextlib.suppress(OSError), stdin:  # it ended, or nobody reads on
            for part in self._without_errors(given):
                view = memoryview(part)
                while view:
                    view = view[stdin.write(view) :]
            while self._beat and not self._failed and not self._over.wait(self._beat):
                stdin.write(b"\n")

    def _without_errors(self, given: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the input of the program. Keep an error of ``given``, to be raised by ``__iter__``.

        The error is kept before the input ends, since the program may end at once then.
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
        """Yield each line with its line feed, a last line also without one, "" in silence."""
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
        """Yield the output as it comes, b"" in silence, until it ends or breaks a limit of time.

        The end of what the program writes to standard error is kept in ``_errors``.
        """
        stdout = self._pipe("stdout")
        stderr = self._pipe("stderr") if self._feeder else None
        ends = [stdout, stderr] if stderr else [stdout]
        while stdout in ends or (ends and self._may_print_errors()):
            deadline, reason = self._deadline()
            seconds_left = max(deadline - time.monotonic(), 0.0)
            # After the deadline only output that is ready counts: errors may come for ever.
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
        """Return whether the program may still write errors after the end of its output."""
        process = cast("subprocess.Popen[bytes]", self._process)
        return not self._beat and process.poll() is None

    def _deadline(self) -> tuple[float, str]:
        """Return the monotonic time at which the program is killed, and the reason."""
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
        """End a dialogue: close both pipes, wait three seconds for the program, then kill it.

        Errors are read only as far as they came, since ssh's master process keeps that pipe open.
        """
        import subprocess

        if (feeder := self._feeder) is None or self._process is None:
            return
        self._over.set()
        feeder.join(1)
        if feeder.is_alive():
            self._process.kill()  # it does not read
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
    env: Mapping[str, str] | None,
    error: Exception,
) -> str:
    """Return why a program did not start."""
    path = None if env is None else env.get("PATH", os.defpath)
    # ENOENT alone does not tell: it may be about cwd, or about the interpreter of a script.
    if "/" not in program and shutil.which(program, path=path) is None:
        return "is not installed"

    reason = getattr(error, "strerror", None) or str(error)
    file = getattr(error, "filename", None)
    if file not in (None, program):
        reason = f"{file}: {reason}"  # the folder
    return f"does not run: {reason}"


def ending(status: int) -> str:
    """Return how a process ended: ``exit code 2``, ``killed by SIGKILL``, "" for status 0."""
    if status >= 0:
        return f"exit code {status}" if status else ""
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
