"""Find the platform tag of a wheel from the symbol versions that its libraries need."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from patchkit.errors import ProofError
from patchkit.process import run


def platform_tag(wheel: Path, provided: Collection[str] = ()) -> str:
    """Return the oldest manylinux policy that a wheel keeps, as auditwheel finds it.

    ``provided`` are patterns of libraries that come with packages it requires, such as
    ``libtorch*.so``. Raises ProofError if it keeps none: a library that nothing brings, or another
    CPU's.
    """
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    why = "its library is not for the CPU of its file name, or is no ELF file"
    shown = json.loads(run(*command, kind=ProofError, why=why, timeout=None).output)
    foreign = [
        name
        for name in shown["external_libs"]
        if not any(fnmatchcase(name, pattern) for pattern in provided)
    ]
    # overall_tag also falls for libraries of other packages; sym_tag looks at symbols alone.
    tag: str = shown["overall_tag"] if foreign or not provided else shown["sym_tag"]
    if not tag.startswith("manylinux"):
        raise ProofError(
            f"{wheel.name} keeps no manylinux policy: it would get the tag {tag}",
            why=f"it needs {', '.join(foreign) or 'symbols of an unknown libc'}",
            hint="build on a released distribution, without libraries of your own on the link line",
        )
    return tag
