"""Run a program or a Python call in a sandboxed child process, with limits on what it uses.

Limits on time, memory and output (rlimits, and a clock in the parent) end a child that does not end
by itself. The child has only its outputs open. It ends when the parent ends.
"""

import contextlib
import fcntl
import gc
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from patchkit.durable.signals import SIGNALS, deferred, undeferred
from patchkit.errors import HostError, PatchkitError, StorageError
from patchkit.follow import Resources, ending
from patchkit.frozen import Values, frozen
from patchkit.proof.sandbox import Box, enter

_READY = b"."  # the child writes this when its sandbox is set up
# In the child, the pipe's writing end: it closes when the child and all its children are gone.
_ALIVE = 3
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@frozen
class Limits:
    """Limits of a child: seconds of processor and clock, bytes of memory and of each file."""

    processor: int = 60
    clock: float = 120.0
    memory: int = 2 << 30
    output: int = 16 << 20


LIMITS = Limits()


@frozen
class Ended:
    """The result of a child: its two outputs, and ``trouble``, "" if it ended with status 0."""

    output: bytes
    errors: bytes
    trouble: str

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")

    @property
    def error_text(self) -> str:
        return self.errors.decode(errors="replace")


def run(
    command: Sequence[str],
    box: Box | None,
    *,
    folder: Path,
    environment: Values,
    limits: Limits = LIMITS,
) -> Ended:
    """Run a program in ``folder``, with the variables of ``environment`` and no others.

    A failing program raises nothing: see ``trouble``. Raises what ``forked`` raises.
    """
    return forked(
        lambda: os.execve(command[0], list(command), dict(environment)),  # noqa: S606
        box,
        limits=limits,
        folder=folder,
    )


def forked(
    action: Callable[[], object],
    box: Box | None,
    *,
    limits: Limits = LIMITS,
    folder: Path | None = None,
) -> Ended:
    """Call ``action`` in a child process and return its outputs 1 and 2, and what went wrong.

    An error or a limit that ends the child is not raised: see ``trouble`` of the result. Raises
    HostError if the sandbox cannot be set up (``action`` has not been called then), StorageError if
    no child process can be started or set up.
    """
    # Files in memory, unlike pipes, need no reader meanwhile, and RLIMIT_FSIZE limits them.
    outputs = [os.memfd_create(name) for name in ("output", "errors")]
    ended, alive = os.pipe()
    try:
        parent = os.getpid()
        with deferred():  # a signal must not leave a child running
            child = _fork()
            if not child:
                _live_as_child(action, box, limits, folder, parent, (*outputs, alive))
            try:
                with undeferred():
                    os.close(alive)
                    # Event mask 0: POLLHUP is reported anyway, and says that every process that
                    # holds the writing end is gone.
                    poll = select.poll()
                    poll.register(ended, 0)
                    has_ended = poll.poll(limits.clock * 1000)
            finally:
                status = _kill(child)
        is_ready = _was_ready(ended)
        output = os.pread(outputs[0], limits.output, 0)
        errors = os.pread(outputs[1], limits.output, 0)
    finally:
        for descriptor in (*outputs, ended):
            os.close(descriptor)

    if not is_ready and has_ended:
        raise _setup_error(box, errors)
    bound = Resources(processor=limits.processor, written=limits.output)
    trouble = bound.breach(status) or ending(status)
    if not has_ended:
        trouble = f"it ran longer than {limits.clock:g} s"
    if not trouble and limits.output in (len(output), len(errors)):
        trouble = f"it wrote {limits.output} bytes or more"
    return Ended(output=output, errors=errors, trouble=trouble)


def _kill(child: int) -> int:
    """Kill a child and its process group; return the exit code, -N if signal N ended the child."""
    # os.kill comes first: the child may not have reached setpgid yet.
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    # Before waitpid, an ended child keeps its number, so the kill cannot have hit another process.
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _was_ready(ended: int) -> bool:
    """Return whether a child that has ended had set up its sandbox."""
    os.set_blocking(ended, False)
    # BlockingIOError: a process that the kill did not reach still holds the writing end.
    with contextlib.suppress(BlockingIOError):
        return os.read(ended, 1) == _READY
    return False


def _setup_error(box: Box | None, errors: bytes) -> PatchkitError:
    words = errors.decode(errors="replace").strip()
    if box is None:
        return StorageError(f"a child process cannot be set up: {words}")
    return HostError(
        f"the sandbox cannot be set up: {words}",
        why="the kernel has one, and this machine's settings or files are in its way",
        hint="--trust-source runs the tree's own code as you, without a sandbox",
    )


def _fork() -> int:
    """Fork, and return what ``os.fork`` returns.

    SIGNALS stay blocked in the child until it has set its handlers. Raises StorageError if no
    process can be started.
    """
    # Block signals, so that no handler runs inside a hook of os.fork.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    child = -1
    try:
        child = os.fork()
    except OSError as error:
        raise StorageError(
            f"no process can be started: {error.strerror}",
            why="this user has as many as are allowed, or there is no memory left",
        ) from error
    finally:
        if child:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    if not child:
        gc.disable()  # a collection would write to all objects, and so copy the parent's memory
    return child


def _live_as_child(
    action: Callable[[], object],
    box: Box | None,
    limits: Limits,
    folder: Path | None,
    parent: int,
    files: Sequence[int],
) -> NoReturn:
    """Set the child up, call ``action`` and exit; never return into the parent's code."""
    status = 1
    try:
        os.setpgid(0, 0)  # own group: killpg then reaches its children too
        # Without ctypes there is no prctl, and no sandbox either (see sandbox.missing).
        with contextlib.suppress(ImportError):
            from patchkit.proof.seccomp import libc

            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # prctl(2): if the parent ended before that call, the signal is not sent.
        if os.getppid() != parent:
            os._exit(1)

        _arrange_child(files)
        if folder is not None:
            os.chdir(folder)
        _set_limits(limits)
        if box is not None:
            enter(box)
        os.write(_ALIVE, _READY)
        action()
        status = 0
    except BaseException as error:  # noqa: BLE001
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(status)


def _set_limits(limits: Limits) -> None:
    # RLIMIT_AS counts the whole address space, and a forked child begins with that of its parent.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    memory = pages * resource.getpagesize() + limits.memory

    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        # SIGXCPU at the soft limit, which Python can report; SIGKILL a second later.
        (resource.RLIMIT_CPU, limits.processor, limits.processor + 1),
        (resource.RLIMIT_FSIZE, limits.output, limits.output),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_AS, memory, memory),
    ):
        # A hard limit that is set already can only be lowered.
        _soft, ceiling = resource.getrlimit(kind)
        if ceiling == resource.RLIM_INFINITY:
            ceiling = hard
        resource.setrlimit(kind, (min(soft, ceiling), min(hard, ceiling)))


def _arrange_child(files: Sequence[int]) -> None:
    """Make ``files`` descriptors 1 to 3 and /dev/null 0, close all others, and reset the signals.

    ``files`` are output, errors and the pipe whose closing tells the parent that the child ended.
    """
    # dup2 overwrites 0 to 3 below, so the descriptors move above 10 first.
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in files]
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate([nothing, *copies]):
        os.dup2(descriptor, number)

    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor > _ALIVE:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # The answer is written to descriptor 1 directly, and the text of a print must not mix with it.
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    # Python ignores SIGPIPE and SIGXFSZ; programs inherit that and would not end at their limit.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
