"""Confine upstream's code while a plan is proved: it may read the tree, and compute.

A process in a ``Box`` has given up, for good: every file that is not in it (Landlock), every system
call in ``seccomp``, all capabilities but that of reading, and its environment. ``child_process``
makes such processes, and limits what they use. Any user can, on any kernel since Linux 5.13.

The package index has two libraries: py-landlock has no seccomp, sandlock needs Linux 6.12.
Namespaces would add nothing: there is no right left that they could hide.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

from patchkit.errors import HostError
from patchkit.frozen import frozen
from patchkit.source.tree import Sandboxed, SourceTree

_SYSTEM = (
    Path("/usr"),
    Path("/lib"),
    Path("/lib64"),
    Path("/etc/ld.so.cache"),
    Path(os.devnull),
)
# The kernel executes the dynamic loader for a program, which takes the right to do so.
_LOADERS = (("/lib", "ld-*"), ("/lib64", "ld-*"), ("/lib", "*-linux-*/ld-*"))
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h


@frozen
class Box:
    """Files and folders that a child may open, with all that is in them.

    ``programs`` may be executed; unless ``children`` is set, once, in place of the child itself.
    """

    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    programs: tuple[Path, ...] = ()
    children: bool = False


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

    # Here, and not in each child.
    for programs in (False, True):
        seccomp.compiled(programs=programs, children=False)
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
        "hash, such as vllm==0.33.0, needs neither",
    )


def program_box(program: Path, *, children: bool = False) -> Box:
    """Return a box for one program, with what loads its shared libraries.

    With ``children`` it may start programs of the system, which get the same box and limits.
    """
    programs = [program]
    for place, pattern in _LOADERS:
        programs += Path(place).glob(pattern)
    if not children:
        return Box(programs=tuple(programs))

    programs += _SYSTEM[:3]
    return Box(write=(Path(os.devnull),), programs=tuple(programs), children=True)


def enter(box: Box) -> None:
    """Give up, in this process, everything that is not in the box. Raises OSError."""
    from patchkit.proof import landlock, seccomp

    # Variables may hold tokens and passwords.
    os.environ.clear()
    # Without it the kernel gives Landlock and seccomp to root alone.
    if seccomp.libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError("no_new_privs is refused")
    # What root may do beyond others goes, but for reading files.
    seccomp.drop_capabilities()
    landlock.restrict(read=box.read, write=box.write, execute=box.programs)
    # Last: the filter takes prctl away, which the steps above it need.
    instructions = seccomp.compiled(programs=bool(box.programs), children=box.children)
    seccomp.load(instructions)
