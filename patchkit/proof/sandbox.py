"""A child process for what upstream's code does while a plan is proved: it can read, and compute.

Before the first statement that is not ours the child gives up, for good: every file but those in
its ``Box`` (Landlock), every system call in ``seccomp``, all capabilities but that of reading, its
environment and its open files. Limits on time, memory and output (rlimits, and a clock in the
parent) end what does not end by itself; the child and its children end with the parent.

Of the libraries on the package index, py-landlock has no seccomp and sandlock needs Linux 6.12.
Namespaces would add nothing: there is no right left that they could hide.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NoReturn

from patchkit.errors import HostError, PatchkitError, StorageError
from patchkit.paths import RECIPES
from patchkit.source.tree import Sandboxed, SourceTree

_PATCHKIT = Path(__file__).parents[1]
_SYSTEM = tuple(map(Path, ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", os.devnull)))
_PACKAGES = ("site-packages", "dist-packages")  # not all of sys.path: it may begin with the home
_LOADERS = (("/lib", "ld-*"), ("/lib64", "ld-*"), ("/lib", "*-linux-*/ld-*"))
_READY = b"."  # what the child says once its sandbox is closed
_TOO_MUCH = "it wrote {} bytes or more"
_ALIVE = 3  # the descriptor that closes when a child, and all that it has started, is gone
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What a child may open: files and folders, with all that is in them.

    ``programs`` may be executed; unless ``children`` is set, once, in place of the child itself.
    """

    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    programs: tuple[Path, ...] = ()
    children: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a child may use: seconds of processor and clock, bytes of memory and of each file."""

    processor: int = 60
    clock: float = 120.0
    memory: int = 2 << 30
    output: int = 16 << 20


LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended: its two outputs, and what went wrong ("" if it ended with status 0)."""

    output: bytes
    errors: bytes
    trouble: str

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")

    @property
    def error_text(self) -> str:
        return self.errors.decode(errors="replace")


@cache
def missing() -> str:
    """Say why there can be no sandbox on this machine; "" if there can be one."""
    try:
        from patchkit.proof import landlock, seccomp
    except ImportError as error:
        return f"this Python has no ctypes: {error}"
    if reason := seccomp.missing():
        return reason
    if landlock.version() < 1:
        return "the kernel has no Landlock, or has it switched off"
    for programs in (False, True):
        seccomp.compiled(programs=programs, children=False)  # here, and not in each child
    return ""


def box_for(tree: SourceTree, box: Box) -> Box | None:
    """Return ``box`` with the tree readable, None where the tree's code may run without one.

    Raises HostError where it may not, and this machine has no sandbox.
    """
    if tree.sandboxed is Sandboxed.NEVER:
        return None
    reason = missing()
    if not reason:
        return replace(box, read=(*box.read, tree.root, *_SYSTEM))
    if tree.sandboxed is Sandboxed.IF_POSSIBLE:
        return None
    raise HostError(
        f"{tree.root}: its own code has to be run, and there is no sandbox here: {reason}",
        why="a proof asks upstream's CMake and Python files, and nobody vouches for those of a "
        "folder, a checkout or an archive; Linux has had Landlock since 5.13, and seccomp",
        hint="--trust-source runs them as you, without a sandbox; a release that is locked by "
        "hash, such as vllm==0.24.0, needs neither",
    )


def python_box() -> Box:
    """What this interpreter may still have to read: its libraries, patchkit and its recipes."""
    own = (Path(os.__file__).parent, Path(sys.base_prefix, "lib"), _PATCHKIT, RECIPES)
    packages = (each for each in map(Path, sys.path) if each.name in _PACKAGES)
    return Box(read=(*own, *packages))


def program_box(program: Path, *, children: bool = False) -> Box:
    """Return a box for one program, with what loads its shared libraries.

    With ``children`` it may start programs of the system, which get the same box and limits.
    """
    loaders = (each for place, pattern in _LOADERS for each in Path(place).glob(pattern))
    return Box(
        write=(Path(os.devnull),) if children else (),
        programs=(program, *loaders, *(_SYSTEM[:3] if children else ())),
        children=children,
    )


def run(
    command: Sequence[str],
    box: Box | None,
    *,
    folder: Path,
    environment: Mapping[str, str],
    limits: Limits = LIMITS,
) -> Ended:
    """Run a program in ``folder``, with nothing but ``environment``."""

    def become() -> NoReturn:
        os.execve(command[0], list(command), dict(environment))  # noqa: S606

    return forked(become, box, limits=limits, folder=folder)


def forked(
    action: Callable[[], object],
    box: Box | None,
    *,
    limits: Limits = LIMITS,
    folder: Path | None = None,
) -> Ended:
    """Call ``action`` in a child, whose outputs 1 and 2 are kept.

    Raises HostError if the sandbox cannot be set up; nothing of ``action`` has run then.
    """
    outputs = [os.memfd_create(name) for name in ("output", "errors")]
    ended, alive = os.pipe()
    try:
        parent = os.getpid()
        child = os.fork()
        if not child:
            _live(action, box, limits, folder, parent, (*outputs, alive))
        try:
            os.close(alive)
            in_time = _wait(ended, limits.clock)
        finally:
            _kill(child)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.set_blocking(ended, False)
        ready = _said(ended) == _READY
        output, errors = (os.pread(each, limits.output, 0) for each in outputs)
    finally:
        for each in (*outputs, ended):
            os.close(each)
    if not ready and in_time:
        raise _not_set_up(errors.decode(errors="replace"), box)
    trouble = _trouble(status, limits) if in_time else f"it ran longer than {limits.clock:g} s"
    if limits.output in (len(output), len(errors)):
        trouble = trouble or _TOO_MUCH.format(limits.output)
    return Ended(output=output, errors=errors, trouble=trouble)


def _wait(ended: int, seconds: float) -> bool:
    """Wait until the last process that holds the pipe's other end is gone."""
    poll = select.poll()
    poll.register(ended, 0)
    return bool(poll.poll(seconds * 1000))


def _said(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1)
    except BlockingIOError:  # somebody out of reach still holds the other end
        return b""


def _kill(child: int) -> None:
    """End the child and all that it has started."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _trouble(status: int, limits: Limits) -> str:
    if status >= 0:
        return f"it ended with status {status}" if status else ""
    if status == -signal.SIGXCPU:
        return f"it took more than {limits.processor} s of the processor"
    if status == -signal.SIGXFSZ:
        return _TOO_MUCH.format(limits.output)
    names = {each.value: each.name for each in signal.Signals}
    return f"it was ended by {names.get(-status, f'signal {-status}')}"


def _not_set_up(words: str, box: Box | None) -> PatchkitError:
    if box is None:
        return StorageError(f"a child process cannot be set up: {words.strip()}")
    return HostError(
        f"the sandbox cannot be set up: {words.strip()}",
        why="the kernel has one, and this machine's settings or files are in its way",
        hint="--trust-source runs the tree's own code as you, without a sandbox",
    )


def _live(
    action: Callable[[], object],
    box: Box | None,
    limits: Limits,
    folder: Path | None,
    parent: int,
    files: Sequence[int],
) -> NoReturn:
    """The child's whole life. Whatever happens, it must not return into the parent's code."""
    status = 1
    try:
        os.setpgid(0, 0)
        die_with(parent, signal.SIGKILL)
        _arrange(files)
        if folder is not None:
            os.chdir(folder)
        _limit(limits)
        if box is not None:
            _enter(box)
        os.write(_ALIVE, _READY)
        action()
        status = 0
    except BaseException as error:  # noqa: BLE001
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(status)


def die_with(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal as soon as its parent ends."""
    with contextlib.suppress(ImportError):
        from patchkit.proof.seccomp import libc

        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _arrange(files: Sequence[int]) -> None:
    """Have nothing open but the outputs, and the pipe that tells the parent when all is over."""
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in files]
    for number, each in enumerate([os.open(os.devnull, os.O_RDONLY), *kept]):
        os.dup2(each, number)
    for each in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if each > _ALIVE:
            with contextlib.suppress(OSError):
                os.close(each)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)


def _limit(limits: Limits) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    mapped = pages * resource.getpagesize()
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, limits.processor, limits.processor + 1),
        (resource.RLIMIT_FSIZE, limits.output, limits.output),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_AS, mapped + limits.memory, mapped + limits.memory),
    ):
        most = resource.getrlimit(kind)[1]
        if most == resource.RLIM_INFINITY:
            most = hard
        resource.setrlimit(kind, (min(soft, most), min(hard, most)))


def _enter(box: Box) -> None:
    """Give up everything that is not in the box. Raises OSError."""
    from patchkit.proof import landlock, seccomp

    os.environ.clear()
    if seccomp.libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError("no_new_privs is refused")
    seccomp.drop_capabilities()
    landlock.restrict(read=box.read, write=box.write, execute=box.programs)
    seccomp.install(programs=bool(box.programs), children=box.children)
