"""Follow a program while it runs: read its lines as they come, within limits, and write to it.

What it prints is read as UTF-8, with U+FFFD for what is not.
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted
from patchkit.units import BYTES_PER_MIB

if TYPE_CHECKING:
    # At run time they are imported where a program is run: a third of a fast probe's imports.
    import subprocess
    import threading

FOLLOWED: set[subprocess.Popen[bytes]] = set()
_SHOWN = 8  # lines of a program's output that an error shows
_TAIL, _WIDEST = (
    400,
    1 << 14,
)  # lines of a program's output that are kept, characters of each
_ERRORS = 1 << 18  # bytes of a program's errors that are kept
_LONGEST = 1 << 20  # bytes of a line that are waited for, without a limit
_SILENCE_S, _GRACE_S, _FAREWELL_S = 0.5, 10, 3
# Signals that come from outside: the kernel's for want of memory, a person's, an administrator's.
_FROM_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}
)


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
    def ended_itself(self) -> bool:
        """True unless it did not start, or something else ended it.

        A limit on its resources counts as its own doing: the same input breaks it again.
        """
        return self.status is not None and -self.status not in _FROM_OUTSIDE

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowLimits:
    """When a program is given up: after seconds of silence, or in all; bytes of a line, or in all.

    Lines without ``mark`` are no sign of life and are not yielded, those with it from behind it.
    """

    mark: str = ""
    silence: float = math.inf
    seconds: float = math.inf
    line: float = math.inf
    size: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a program may take: bytes of address space, seconds of processor, bytes of a file.

    The kernel holds it to that. None is no limit.
    """

    memory: int | None = None
    processor: int | None = None
    written: int | None = None

    def bind(self, process: int) -> None:
        """Set the limits of a process that was just started, and of what it starts itself.

        Not between fork and exec, where Python may not run beside other threads: what a program
        does until then is to load itself.
        """
        for kind, most in (
            (resource.RLIMIT_AS, self.memory),
            (resource.RLIMIT_CPU, self.processor),
            (resource.RLIMIT_FSIZE, self.written),
        ):
            if most is not None:
                # A hard limit of the caller's own can only be lowered.
                _, hard = resource.getrlimit(kind)
                least = most if hard == resource.RLIM_INFINITY else min(most, hard)
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    resource.prlimit(process, kind, (least, hard))

    def breach(self, status: int) -> str:
        """Return which limit a signal tells of; "" for none. Of memory only the program tells."""
        match -status:
            case signal.SIGXCPU:
                return f"it took more than {self.processor} s of the processor"
            case signal.SIGXFSZ:
                return f"it wrote more than {self.written} bytes"
            case _:
                return ""


class Follow(contextlib.AbstractContextManager["Follow"]):
    """A program whose lines are read while it runs; ``done`` says how it ended once all are read.

    As an iterator it gives each line with its line feed, errors among the others, and "" while the
    program is silent. A carriage return ends a line as well: that is how progress is drawn. The
    output in ``done`` are the last 400 lines. A block of ``with`` that is left early ends the
    program. With ``inherit`` it keeps this process's open files, such as a lock.

    With ``given`` it is a dialogue: the program reads that while its lines are read, neither is in
    memory as a whole, errors are apart, and an error of ``given`` is raised here. ``done`` has the
    last 8 lines. With ``beat`` the program is sent a line feed each so many seconds, so that it can
    tell that somebody listens, and its input ends with the block: it may not outlive its output.

    One that breaks a limit is killed: its status is None then. ``resources`` are held by the
    kernel; its status is then that of the program.
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

        self._command, self._limits, self._beat = tuple(map(str, words)), limits, beat
        self._resources = resources
        self._process: subprocess.Popen[bytes] | None = None
        self._feeder: threading.Thread | None = None
        self._over, self._errors, self._given_up = threading.Event(), bytearray(), ""
        self._failed: list[BaseException] = []
        try:
            self._process = subprocess.Popen(
                self._command,
                env=env,
                cwd=cwd,
                umask=umask,
                close_fds=not inherit,
                stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if given is None else subprocess.PIPE,
                bufsize=0,
            )
        except (OSError, ValueError) as error:
            program, path = (
                self._command[0],
                None if env is None else env.get("PATH", os.defpath),
            )
            # ENOENT alone may also be about the folder, or about the interpreter of a script.
            absent = "/" not in program and shutil.which(program, path=path) is None
            what = getattr(error, "strerror", None) or str(error)
            if isinstance(error, OSError) and error.filename not in (None, program):
                what = f"{error.filename}: {what}"  # the folder
            trouble = "is not installed" if absent else f"does not run: {what}"
            self.done = Completed(
                command=self._command, status=None, trouble=trouble, started=False
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
        """End the program if it still runs: after some seconds it is killed."""
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
        output, errors = "".join(tail), self._errors.decode(errors="replace")
        status, trouble = process.wait(), self._given_up
        if status and not trouble:
            words = (errors.strip() or output.strip() or "it printed nothing").split(
                "\n"
            )[-_SHOWN:]
            end = self._resources.breach(status) or ending(status)
            trouble = f"{end}: {chr(10).join(words)}"
        self.done = Completed(
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
        """Yield what the program reads, and keep an error: one of a thread is seen by nobody.

        It is kept before the program's input ends: once that is noticed, nobody asks again.
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
        """Yield each line, the last one of a program that ended even if it is a part."""
        rest, taken, limits = bytearray(), 0, self._limits
        for read in self._parts():
            taken += len(read)
            if taken > limits.size:
                self._give_up(f"it sent more than {limits.size / BYTES_PER_MIB:g} MiB")
                return
            rest += read if self._feeder else read.replace(b"\r", b"\n")
            if not read:
                yield ""
            elif b"\n" in rest[-len(read) :]:
                *whole, last = bytes(rest).split(b"\n")
                rest = bytearray(last)
                yield from (line.decode(errors="replace") + "\n" for line in whole)
            elif len(rest) > limits.line:
                self._give_up(
                    f"it sent a line of more than {limits.line / BYTES_PER_MIB:g} MiB"
                )
                return
            elif len(rest) > _LONGEST and limits.line == math.inf:
                yield rest.decode(errors="replace")
                rest.clear()
        if rest and not self._given_up:
            yield rest.decode(errors="replace")

    def _parts(self) -> Iterator[bytes]:
        """Yield what comes until it ends, or for as long as it may take; keep the last errors."""
        process, limits = cast("subprocess.Popen[bytes]", self._process), self._limits
        stdout = self._pipe("stdout")
        stderr = self._pipe("stderr") if self._feeder else None
        ends = [stdout, stderr] if stderr else [stdout]
        while stdout in ends or (ends and not self._beat and process.poll() is None):
            end = min(self._heard + limits.silence, self._began + limits.seconds)
            left = max(end - time.monotonic(), 0.0)
            # Behind its time only an answer counts: errors may come for ever.
            open_ends = [each for each in ends if left or each is stdout]
            ready = select.select(open_ends, [], [], min(left, _SILENCE_S))[0]
            if not ready and not left:
                silent = self._heard + limits.silence == end
                late = f"no sign of life for {limits.silence:g} s"
                self._give_up(
                    late if silent else f"no answer within {limits.seconds:g} s"
                )
                return
            if stderr in ready and stderr:
                said = os.read(stderr.fileno(), 1 << 16)
                self._errors[:] = (self._errors + said)[-_ERRORS:]
                if not said:
                    ends.remove(stderr)
            if stdout in ready:
                if read := os.read(stdout.fileno(), 1 << 16):
                    yield read
                else:
                    ends.remove(stdout)
            elif not ready and not stderr:
                yield b""

    def _give_up(self, why: str) -> None:
        assert self._process is not None
        self._given_up = why
        self._process.kill()

    def _hang_up(self) -> None:
        """End a dialogue: close both pipes and wait for the end of the program, for some seconds.

        What is left of its errors is read; ssh's master in the background keeps them open.
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
        if not (stderr := self._pipe("stderr")).closed:
            os.set_blocking(stderr.fileno(), False)
            self._errors[:] = (self._errors + (stderr.read(_ERRORS) or b""))[-_ERRORS:]
            stderr.close()


def ending(status: int) -> str:
    """Return how a process ended: ``exit code 2``, ``killed by SIGKILL``, "" for status 0."""
    if status >= 0:
        return f"exit code {status}" if status else ""
    names = {each.value: each.name for each in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"
