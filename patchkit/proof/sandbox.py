"""Confine upstream's code while a plan is proved: it may read the tree, and compute.

A process in a ``Box`` has given up for good: every file that is not in the box (Landlock), the
system calls that ``seccomp`` denies, all capabilities but the one to read every file, and its
environment. ``child_process`` starts such processes and limits what they use. This needs no root,
and works on every kernel since Linux 5.13.

No library of the package index fits: py-landlock has no seccomp, sandlock needs Linux 6.12.
Namespaces would add nothing: these processes have no right left that a namespace could hide.
"""

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
# Starting a program executes the dynamic loader too, so the loader must be allowed.
_LOADERS = (("/lib", "ld-*"), ("/lib64", "ld-*"), ("/lib", "*-linux-*/ld-*"))
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h


@frozen
class Box:
    """The files and folders that a child may read, write or execute; a folder includes its content.

    ``programs`` may be executed. The child can start no process: it can only replace itself by a
    program.
    """

    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    programs: tuple[Path, ...] = ()


@cache
def missing() -> str:
    """Return the reason why this machine can have no sandbox, "" if it can have one."""
    try:
        from patchkit.proof import landlock, seccomp
    except ImportError as error:
        return f"this Python has no ctypes: {error}"
    if reason := seccomp.missing():
        return reason
    if landlock.version() < 1:
        return "the kernel has no Landlock, or has it switched off"

    # Compile the filters here, once, and not in each child.
    for programs in (False, True):
        seccomp.compiled(programs=programs)
    return ""


def box_for(tree: SourceTree, box: Box) -> Box | None:
    """Return ``box`` with the tree and system libraries readable, None to run without a sandbox.

    ``tree.sandboxed`` decides: NEVER gives None, IF_POSSIBLE gives None if this machine has no
    sandbox. Otherwise a machine without a sandbox raises HostError.
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


def program_box(program: Path) -> Box:
    """Return a box in which one program and the dynamic loader may be executed."""
    programs = [program]
    for place, pattern in _LOADERS:
        programs += Path(place).glob(pattern)
    return Box(programs=tuple(programs))


def enter(box: Box) -> None:
    """Give up in this process, for good, everything that the box does not allow.

    Raises OSError if the kernel refuses a step.
    """
    from patchkit.proof import landlock, seccomp

    # Variables may hold tokens and passwords.
    os.environ.clear()
    # Without no_new_privs, the kernel lets only root use Landlock and seccomp.
    if seccomp.libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError("no_new_privs is refused")
    # Root keeps one capability: to read every file.
    seccomp.drop_capabilities()
    landlock.restrict(read=box.read, write=box.write, execute=box.programs)
    # The filter must be last: it denies calls that the steps above need.
    instructions = seccomp.compiled(programs=bool(box.programs))
    seccomp.load(instructions)
