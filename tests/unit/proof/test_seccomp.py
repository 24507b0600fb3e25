"""The filter, read as the kernel reads it, on both machines; see test_sandbox.py for its effect."""

import errno
import re
import struct
from pathlib import Path

import pytest

from patchkit.proof.seccomp import compiled, number

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003}
ALLOWED, KILLED = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = (0x50000 | each for each in (errno.EPERM, errno.ENOSYS))
THREAD, VFORK, FORK = 0x3D0F00, 0x4111, 0x1200011


def answer(program, architecture, call, *arguments):
    """What a classic BPF program returns for a system call."""
    words = [call, architecture, 0, 0]
    for value in (*arguments, *[0] * (6 - len(arguments))):
        words += [value & 0xFFFFFFFF, value >> 32]
    code = list(struct.iter_unpack("HBBI", program))
    at = register = 0
    while True:
        operation, yes, no, operand = code[at]
        at += 1
        if operation == 0x20:
            register = words[operand // 4]
        elif operation == 0x54:
            register &= operand
        elif operation == 0x06:
            return operand
        else:
            tests = {
                0x15: register == operand,
                0x35: register >= operand,
                0x45: register & operand,
            }
            at += yes if tests[operation] else no


@pytest.fixture(params=["x86_64", "aarch64"])
def says(request):
    """``says("clone", flags)``, with what may be started."""

    def ask(call, *arguments, programs=False, by=request.param):
        program = compiled(programs=programs, machine=request.param)
        wanted = number(call, request.param) if isinstance(call, str) else call
        return answer(program, ARCHITECTURES[by], wanted, *arguments)

    return ask


def test_what_the_filter_says(says):
    for call, arguments, expected in (
        ("socket", (), EPERM),
        ("kill", (), EPERM),
        ("execve", (), EPERM),
        ("clone3", (), ENOSYS),
        ("openat2", (), ENOSYS),
        ("clone", (THREAD,), ALLOWED),
        ("clone", (FORK,), EPERM),
        ("clone", (VFORK,), EPERM),
        ("openat", (0, 0, 0), ALLOWED),
        ("openat", (0, 0, 0o1101), ALLOWED),  # Landlock's to refuse
        ("openat", (0, 0, 0o1000), EPERM),
        ("openat", (0, 0, 0o1003), EPERM),
        ("ioctl", (0, 0x5401), ALLOWED),
        ("ioctl", (0, 0x5412), EPERM),  # TIOCSTI
        ("fcntl", (0, 3), ALLOWED),
        *(("fcntl", (0, command), EPERM) for command in (8, 10, 15, 1024, 1026)),
        ("prlimit64", (0, 7, 0, 1), ALLOWED),
        ("prlimit64", (1, 7, 0, 1), EPERM),
        ("prlimit64", (0, 7, 1, 1), EPERM),
        ("prlimit64", (0, 7, 1 << 32, 1), EPERM),
        (470, (), ENOSYS),
        (0x40000000 + 41, (), ENOSYS),
    ):
        assert says(call, *arguments) == expected
    assert says(41, by="i386") == KILLED  # by another convention


def test_a_program_starts_no_child(says):
    assert says("execve", programs=True) == ALLOWED
    assert says("clone", VFORK, programs=True) == EPERM
    assert says("clone", FORK, programs=True) == EPERM


@pytest.mark.parametrize(
    "apart", [1 << bit for bit in (15, 17, 25, 26, 27, 28, 29, 30)]
)
def test_no_thread_leaves_the_parent_or_its_namespaces(says, apart):
    assert says("clone", THREAD | apart, programs=True) == EPERM


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "asm-generic/unistd.h"),
    ],
)
def test_numbers_are_the_kernels(machine, header):
    from patchkit.proof.seccomp import _NUMBERS

    place = Path("/usr/include") / header
    if not place.exists():
        pytest.skip(f"{place} is not there: linux-libc-dev has it")
    found = re.findall(
        r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", place.read_text(), re.MULTILINE
    )
    known = {name: int(value) for name, value in found}
    ours = {name: number(name, machine) for name in _NUMBERS if name in known}
    assert len(ours) > 80
    assert ours == {name: known[name] for name in ours}
