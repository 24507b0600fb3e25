"""Build and load a seccomp filter, which makes system calls of a sandboxed process fail.

Landlock says which files may be opened. The filter takes away what Landlock does not cover, on any
kernel: processes, signals, sockets, shared kernel objects, and changes to files that go by no
``open`` (modes, owners, times, attributes). A call that is newer than this table does not exist
for the process, so that a later kernel adds nothing.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from patchkit.records import RECIPES

_TABLE = (RECIPES / "system_calls.tsv").read_text(encoding="utf-8")
# Name: number on x86_64, number on aarch64 ("-": does not exist there).
_NUMBERS = {
    name: numbers
    for name, *numbers in map(str.split, _TABLE.splitlines())
    if not name.startswith("#")
}
# These stay allowed: with no_new_privs they can only take further rights away.
_OWN = {"capget", "capset", "landlock_create_ruleset", "landlock_add_rule"}
_OWN |= {"landlock_restrict_self", "seccomp"}
# The first call that was not looked at, and the last kernel that was: Linux 6.18.
_UNKNOWN = 470

# Column of the table, AUDIT_ARCH.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# Without these a C library takes an older call, which the filter can look into.
_ABSENT = {"clone3", "openat2"}
_CLONE_THREAD = 0x10000
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET; CLONE_PARENT: of no use to a
# compiler, and a child of somebody else's is waited for by nobody here.
_CLONE_APART = 0x7E020000 | 0x8000
_O_ACCMODE = 0o3
_O_TRUNC = 0o1000
# F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY
_SIGNALLING = (8, 10, 15, 1024, 1026)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: of the descriptor alone
_HARMLESS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)

# Classic BPF (linux/bpf_common.h): load a word at an offset, jumps, and, return; operands in k.
_LOAD = 0x20
_JEQ = 0x15
_JGE = 0x35
_JSET = 0x45
_AND = 0x54
_RET = 0x06
_CAPABILITIES = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_READ_ALL = 1 << 2  # CAP_DAC_READ_SEARCH: root reads trees of others
# SECCOMP_RET_* of linux/seccomp.h; ERRNO's low 16 bits are the error. KILL is of the process.
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL = 0x80000000
# linux/prctl.h, linux/seccomp.h
_PR_GET_SECCOMP = 21
_SET_MODE_FILTER = 1
_SPEC_ALLOW = 1 << 2

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand

libc = ctypes.CDLL(None, use_errno=True)


def number(name: str, machine: str = platform.machine()) -> int:
    """Return the number of a system call on a machine, -1 if it does not exist."""
    if machine not in _MACHINES:
        return -1

    column, _audit_arch = _MACHINES[machine]
    number = _NUMBERS[name][column]
    return int(number) if number.isdigit() else -1


def syscall(name: str, *arguments: object) -> int:
    """Make a system call. Raises OSError."""
    words = [
        ctypes.c_long(argument) if isinstance(argument, int) else argument
        for argument in (number(name), *arguments)
    ]
    result = int(libc.syscall(*words))
    if result < 0:
        code = ctypes.get_errno()
        symbol = errno.errorcode.get(code, code)
        raise OSError(code, f"{name}: {symbol}")
    return result


def missing() -> str:
    """Say why no filter can be installed here; "" if one can."""
    if platform.machine() not in _MACHINES:
        return f"system calls of {platform.machine()} are not known"
    if libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        return "the kernel has no seccomp"
    return ""


def drop_capabilities() -> None:
    """Drop all capabilities except CAP_DAC_READ_SEARCH. Raises OSError."""
    header = struct.pack("=Ii", _CAPABILITIES, 0)
    buffer = ctypes.create_string_buffer(24)
    syscall("capget", header, buffer)

    _effective, permitted, *_inheritable = struct.unpack("=6I", buffer.raw)
    rights = permitted & _READ_ALL
    words = struct.pack("=6I", rights, rights, 0, 0, 0, 0)
    syscall("capset", header, words)


@cache
def compiled(*, programs: bool, machine: str = platform.machine()) -> bytes:
    """Return the filter that takes the calls of this module away; it is made once for all children.

    ``programs`` leaves execve, which replaces the process.
    """
    denied = {name: errno.EPERM for name in _NUMBERS if name not in _OWN}
    denied |= dict.fromkeys(_ABSENT, errno.ENOSYS)
    if programs:
        del denied["execve"]
    return packed(denied, machine=machine)


def packed(
    calls: Mapping[str, int],
    *,
    machine: str = platform.machine(),
) -> bytes:
    """Return a filter that makes each of ``calls`` fail with its error number.

    Some calls fail only with harmful arguments (``_unless_harmless``). In ``seccomp_data``, the
    number of the call is at offset 0, the machine at 4, the arguments from 16.
    """
    _column, audit_arch = _MACHINES[machine]
    instructions: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        # Calls of another ABI (32 bits on x86_64) have other numbers, which would pass the checks.
        (_JEQ, 1, 0, audit_arch),
        (_RET, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        # That covers x32 as well: its numbers on x86_64 begin at 0x40000000.
        (_JGE, 0, 1, _UNKNOWN),
        (_RET, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for name, code in calls.items():
        call = number(name, machine)
        if call >= 0:
            body = _unless_harmless(name)
            body.append((_RET, 0, 0, _ERRNO | code))
            instructions.append((_JEQ, 0, len(body), call))
            instructions += body

    instructions.append((_RET, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def load(instructions: bytes) -> None:
    """Install a filter in this process and its future children. Raises OSError."""
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    count = len(instructions) // 8
    # struct sock_fprog: the number of instructions, padding, a pointer to them.
    program = struct.pack("HxxxxxxP", count, ctypes.addressof(buffer))
    # Without SPEC_ALLOW older kernels slow the process down, against attacks on its own memory.
    syscall("seccomp", _SET_MODE_FILTER, _SPEC_ALLOW, program)


def _unless_harmless(name: str) -> list[Instruction]:
    """Return instructions that let a call through if its arguments are harmless."""
    match name:
        case "clone":
            # Threads share the filter and end with the process.
            harmless = list(_let(_JSET, [_CLONE_THREAD]))
            return [_argument(0), (_JSET, len(harmless), 0, _CLONE_APART), *harmless]
        case "ioctl":
            return [_argument(1), *_let(_JEQ, _HARMLESS)]
        case "fcntl":
            signalling = [
                (_JEQ, len(_SIGNALLING) - index, 0, command)
                for index, command in enumerate(_SIGNALLING)
            ]
            return [_argument(1), *signalling, (_RET, 0, 0, _ALLOW)]
        case "open" | "openat":
            # Landlock before Linux 6.2 lets a file be emptied that is not opened for writing.
            return [
                _argument(1 if name == "open" else 2),
                (_AND, 0, 0, _O_ACCMODE | _O_TRUNC),
                (_JEQ, 2, 0, _O_TRUNC),
                (_JEQ, 1, 0, _O_ACCMODE | _O_TRUNC),
                (_RET, 0, 0, _ALLOW),
            ]
        case "prlimit64":
            # To read one's own limits. Process 0 is the caller; the new limit is a null pointer,
            # compared in two halves.
            return [
                _argument(0),
                (_JEQ, 0, 5, 0),
                _argument(2),
                (_JEQ, 0, 3, 0),
                (_LOAD, 0, 0, 16 + 8 * 2 + 4),
                (_JEQ, 0, 1, 0),
                (_RET, 0, 0, _ALLOW),
            ]
        case _:
            return []


def _argument(index: int) -> Instruction:
    # The low half: BPF loads 32 bits, an argument has 64, and both machines are little-endian.
    return _LOAD, 0, 0, 16 + 8 * index


def _let(test: int, values: Iterable[int]) -> Iterator[Instruction]:
    for value in values:
        yield test, 0, 1, value
        yield _RET, 0, 0, _ALLOW
