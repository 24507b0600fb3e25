"""Run a function in a child process, and decide over each system call by which it changes a disk.

The kernel stops the child at every such call and asks (seccomp's user notification, no rights
needed): whether it goes on, fails with an error, or the process gets a signal first. So the very
calls are disturbed that a full disk, a failing one, or an impatient user would disturb.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import platform
import select
import signal
import socket
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# name → (x86_64, aarch64, where its path is: a pointer after a folder or alone, or a descriptor)
_CALLS = {
    "openat": (257, 56, "at0"),
    "write": (1, 64, "fd0"),
    "pwrite64": (18, 68, "fd0"),
    "writev": (20, 66, "fd0"),
    "sendfile": (40, 71, "fd0"),
    "copy_file_range": (326, 285, "fd2"),
    "fsync": (74, 82, "fd0"),
    "fdatasync": (75, 83, "fd0"),
    "ftruncate": (77, 46, "fd0"),
    "fchmod": (91, 52, "fd0"),
    "fchown": (93, 55, "fd0"),
    "chmod": (90, None, "path0"),
    "fchmodat": (268, 53, "at0"),
    "fchownat": (260, 54, "at0"),
    "rename": (82, None, "path1"),
    "renameat": (264, 38, "at2"),
    "renameat2": (316, 276, "at2"),
    "link": (86, None, "path1"),
    "linkat": (265, 37, "at2"),
    "symlink": (88, None, "path1"),
    "unlink": (87, None, "path0"),
    "unlinkat": (263, 35, "at0"),
    "rmdir": (84, None, "path0"),
    "mkdir": (83, None, "path0"),
    "mkdirat": (258, 34, "at0"),
}
ALLOCATING = {
    "openat", "write", "pwrite64", "writev", "sendfile", "copy_file_range", "rename",
    "renameat", "renameat2", "link", "linkat", "symlink", "mkdir", "mkdirat", "ftruncate",
}  # fmt: skip
"""Names of calls that a full disk refuses. Opening counts only where it creates."""

_COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_RECV, _SEND = 0xC0502100, 0xC0182101
_NEW_LISTENER, _WAIT_KILLABLE = 8, 32
_CONTINUE = 1
_libc = ctypes.CDLL(None, use_errno=True)

NAMES = {
    call[_COLUMN]: (name, call[2])
    for name, call in _CALLS.items()
    if _COLUMN is not None and call[_COLUMN] is not None
}


@dataclass(frozen=True)
class Call:
    """One system call of the child's that would change a disk."""

    name: str
    path: str
    creates: bool

    @property
    def allocates(self) -> bool:
        return self.name in ALLOCATING and (self.creates or self.name != "openat")


Decide = Callable[[Call, int], int]
"""Gets the call and the child's id; returns 0 to go on, or an errno. May send signals."""


@dataclass(frozen=True)
class Ended:
    """How the child ended: its exit code or minus its signal, and what it reported."""

    code: int
    said: str


def unavailable() -> str:
    """Return why no child can be supervised here, "" if it can."""
    if _COLUMN is None:
        return f"system calls of {platform.machine()} are not listed"
    try:
        supervise(lambda: "", Path("/"))
    except OSError as error:
        return f"seccomp's user notification: {error.strerror}"
    return ""


def supervise(
    action: Callable[[], str], below: Path, decide: Decide = lambda *_: 0
) -> Ended:
    """Run ``action`` in a fork; ask ``decide`` at each call that changes something ``below``.

    What the action returns is what it reported; it must not raise.
    """
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # From 3.12 on: other threads of this process may hold locks. The child takes none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        gc.disable()  # it would copy the memory of the whole test run
        code = 70
        try:
            ours.close()
            os.close(reading)
            _hand_over(theirs)
            said = action()
            os.write(writing, said.encode(errors="replace")[:60000])
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    os.close(writing)
    try:
        _serve(ours, pid, decide, str(below))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with os.fdopen(reading, "rb", closefd=False) as pipe:
            return Ended(code, pipe.read().decode(errors="replace"))
    finally:
        ours.close()
        os.close(reading)


def _hand_over(channel: socket.socket) -> None:
    """Install the filter and send its listener, or the errno, to the parent."""
    _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    program = _filter()
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    flags = _NEW_LISTENER | _WAIT_KILLABLE
    listener = _libc.syscall(_SECCOMP[platform.machine()], 1, flags, head)
    trouble = ctypes.get_errno() if listener < 0 else 0
    rights = (
        []
        if trouble
        else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))]
    )
    channel.sendmsg([struct.pack("i", trouble)], rights)
    channel.close()
    if trouble:
        os._exit(71)
    os.close(listener)


def _filter() -> bytes:
    """Notify of the calls above, of openat only where it may write; let everything else be."""

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    load, equal, masked, give = 0x20, 0x15, 0x45, 0x06
    notify, allow = 0x7FC00000, 0x7FFF0000
    plain = [number for number, (name, _) in NAMES.items() if name != "openat"]
    (opens,) = NAMES.keys() - {*plain}
    program = [
        step(load, 0, 0, 4),
        step(equal, 1, 0, _ARCH[platform.machine()]),
        step(give, 0, 0, allow),
        step(load, 0, 0, 0),
    ]
    # Behind these come four steps for openat, and the one that ends it.
    program += [
        step(equal, left + 3, 0, number)
        for left, number in zip(range(len(plain), 0, -1), plain, strict=True)
    ]
    program += [
        step(equal, 0, 2, opens),
        step(load, 0, 0, 16 + 8 * 2),
        step(masked, 1, 0, _WRITES),
        step(give, 0, 0, allow),
        step(give, 0, 0, notify),
    ]
    return b"".join(program)


def _serve(channel: socket.socket, pid: int, decide: Decide, below: str) -> None:
    message, rights, _flags, _address = channel.recvmsg(4, socket.CMSG_SPACE(4))
    (trouble,) = struct.unpack("i", message)
    if trouble:
        raise OSError(trouble, os.strerror(trouble))
    (listener,) = array.array("i", rights[0][2])
    ended = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    poller.register(ended, select.POLLIN)
    try:
        while True:
            events = dict(poller.poll())
            if ended in events:
                return
            if not events[listener] & select.POLLIN:
                poller.unregister(listener)  # nobody is left who could ask
                continue
            buffer = bytearray(80)
            try:
                fcntl.ioctl(listener, _RECV, buffer)
            except OSError:
                continue  # the child was killed meanwhile
            identifier, asker, _flags, number, _arch, _ip, *arguments = struct.unpack(
                "QIIiIQ6Q", buffer
            )
            call = _call(asker, number, arguments)
            error = decide(call, asker) if call.path.startswith(below) else 0
            answer = struct.pack(
                "QqiI", identifier, 0, -error, 0 if error else _CONTINUE
            )
            with contextlib.suppress(OSError):
                fcntl.ioctl(listener, _SEND, answer)
    finally:
        os.close(ended)
        os.close(listener)


def _call(pid: int, number: int, arguments: list[int]) -> Call:
    name, where = NAMES[number]
    kind, index = where[:-1], int(where[-1])
    place, text = "cwd", ""
    if (
        kind != "path"
        and (given := ctypes.c_int(arguments[index] & 0xFFFFFFFF).value) >= 0
    ):
        place = f"fd/{given}"
    with contextlib.suppress(
        OSError
    ):  # the process is gone, or never had such a descriptor
        path = os.readlink(f"/proc/{pid}/{place}")  # noqa: PTH115
        if kind != "fd":
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
                memory.seek(arguments[index + (kind == "at")])
                text = memory.read(4096).split(b"\0")[0].decode(errors="replace")
        creates = name == "openat" and bool(arguments[2] & os.O_CREAT)
        return Call(name, os.path.join(path, text) if text else path, creates)  # noqa: PTH118
    return Call(name, "", creates=False)


ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS}
SIGNALS = {name: getattr(signal, name) for name in ("SIGKILL", "SIGINT", "SIGTERM")}
