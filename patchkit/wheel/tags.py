"""The platform tag of a wheel, from the symbol versions that its libraries need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from patchkit.errors import ProofError


def platform_tag(wheel: Path) -> str:
    """The oldest manylinux policy that the wheel keeps, as auditwheel finds it.

    Raises ProofError if it keeps none: a library that no policy allows, or another CPU's.
    """
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ProofError(
            f"auditwheel cannot read {wheel.name}: {done.stderr.strip()[-400:]}",
            why="its library is not for the CPU of its file name, or is no ELF file",
        )
    shown = json.loads(done.stdout)
    tag: str = shown["overall_tag"]
    if not tag.startswith("manylinux"):
        raise ProofError(
            f"{wheel.name} keeps no manylinux policy: it would get the tag {tag}",
            why=f"it needs {', '.join(shown['external_libs']) or 'symbols of an unknown libc'}",
            hint="build on a released distribution, without libraries of your own on the link line",
        )
    return tag
