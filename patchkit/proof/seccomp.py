"""Build and load a seccomp filter, which makes system calls of a sandboxed process fail.

Landlock says which files may be opened. The filter takes away what Landlock does not cover, on any
kernel: processes, signals, sockets, shared kernel objects, and changes to files that go by no
``open`` (modes, owners, times, attributes). A call that is newer than this table does not exist
for the process, so that a later kernel adds nothing.
"""

import ctypes
import errno
import platform
import re
import struct
from collections.abc import Mapping
from functools import cache

from patchkit.records import RECIPES, read_tsv


def _read_table(name: str) -> dict[str, list[str]]:
    """Return the rows of a table of recipes, by their first column."""
    return {name: cells for name, *cells in read_tsv(RECIPES / name)}


# Name: number on x86_64, number on aarch64 ("-": does not exist there).
_NUMBERS = _read_table("system_calls.tsv")
# Name: instructions that let a call through if its arguments are harmless.
_HARMLESS = _read_table("harmless_calls.tsv")
# These stay allowed: with no_new_privs they can only take further rights away.
_OWN = {"capget", "capset", "landlock_create_ruleset", "landlock_add_rule"}
_OWN |= {"landlock_restrict_self", "seccomp"}
# The first call that was not looked at, and the last kernel that was: Linux 6.18.
_UNKNOWN = 470

# Column of the table, AUDIT_ARCH.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# Without these a C library takes an older call, which the filter can look into.
_ABSENT = {"clone3", "openat2"}
# Classic BPF (linux/bpf_common.h), as its assembler names it: load a word, jumps, and, return.
_OPERATIONS = {
    "ld": 0x20,
    "jeq": 0x15,
    "jge": 0x35,
    "jset": 0x45,
    "and": 0x54,
    "ret": 0x06,
}
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

    Some calls fail only with harmful arguments. In ``seccomp_data``, the number of the call is at
    offset 0, the machine at 4.
    """
    _column, audit_arch = _MACHINES[machine]
    program = [
        "ld [4]",
        # Calls of another ABI (32 bits on x86_64) have other numbers, which would pass the checks.
        f"jeq #{audit_arch}, 1, 0",
        f"ret #{_KILL}",
        "ld [0]",
        # That covers x32 as well: its numbers on x86_64 begin at 0x40000000.
        f"jge #{_UNKNOWN}, 0, 1",
        f"ret #{_ERRNO | errno.ENOSYS}",
    ]
    for name, code in calls.items():
        call = number(name, machine)
        if call >= 0:
            body = [f"ret #{_ERRNO | code}"]
            for harmless in _HARMLESS.get(name, ()):
                body = [*harmless.split("; "), *body]
            program += [f"jeq #{call}, 0, {len(body)}", *body]

    program.append(f"ret #{_ALLOW}")
    return b"".join(map(_assembled, program))


def _assembled(instruction: str) -> bytes:
    """Return an instruction in the syntax of bpf_asm as the kernel takes it: ``jeq #3, 1, 0``."""
    operation, operand, *jumps = re.findall(r"\w+", instruction)
    if_true, if_false = map(int, jumps or (0, 0))
    code = _OPERATIONS[operation]
    return struct.pack("HBBI", code, if_true, if_false, int(operand, 0))


def load(instructions: bytes) -> None:
    """Install a filter in this process and its future children. Raises OSError."""
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    count = len(instructions) // 8
    # struct sock_fprog: the number of instructions, padding, a pointer to them.
    program = struct.pack("HxxxxxxP", count, ctypes.addressof(buffer))
    # Without SPEC_ALLOW older kernels slow the process down, against attacks on its own memory.
    syscall("seccomp", _SET_MODE_FILTER, _SPEC_ALLOW, program)
