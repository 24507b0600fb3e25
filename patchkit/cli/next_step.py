"""Name the next command so that it works when it is pasted: where it was printed, or where it says.

patchkit and pip may be in a virtual environment that no PATH leads to, and a wheel is made for
another CPU than the one that made it.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from patchkit.cli.out import LaidOut, Shown, style
from patchkit.cli.verbs import VERBS
from patchkit.errors import PatchkitError
from patchkit.quoting import quoted
from patchkit.runtime.rules.secret_texts import mask_secrets

_COMMAND = re.compile(rf"(?<![^\s(`])patchkit (?=(?:{'|'.join(VERBS)})\b)")


def next_step(*words: str | Path, where: str = "") -> LaidOut:
    """Return the line that names a command to paste; ``where``: on another machine, or in what."""
    return LaidOut(style(f"next{', ' if where else ''}{where}:", bold=True) + f" {quoted(*words)}")


def program() -> list[str]:
    """Return how patchkit was started, as words: its path where PATH leads to none, or another."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == "patchkit":
        return [_short(sys.executable), "-m", "patchkit"]
    named = started.name == "patchkit" and "/" in sys.argv[0]
    return [_short(sys.argv[0])] if named else ["patchkit"]


def error_text(error: PatchkitError) -> Shown:
    """Return what is said of an error."""
    said = PatchkitError(error.what, why=error.why, hint=spelled(error.hint))
    return style("error:", fg="red", bold=True) + f" {mask_secrets(str(said))}"


def spelled(text: str) -> str:
    """Return a text with the commands in it as patchkit was started."""
    return _COMMAND.sub(lambda _found: quoted(*program()) + " ", text)


def pip() -> list[str]:
    """Return the pip of the Python that runs this, as words.

    Debian and DGX OS refuse to install beside their own Python (PEP 668), so that the pip in PATH
    is of no use where patchkit has an environment.
    """
    beside = Path(sys.executable).with_name("pip")
    return [_short(str(beside))] if sys.prefix != sys.base_prefix and beside.exists() else ["pip"]


def install(
    wheel: Path, cpus: Collection[str], device: str, options: Sequence[str] = ()
) -> Sequence[Shown]:
    """Return what installs a wheel: here, or for other CPUs, how it gets there; none is for any.

    ``options`` are pip's, beside its own words.
    """
    if not cpus or platform.machine() in cpus:
        return [next_step(*pip(), "install", *options, wheel)]
    there = f"to take it to the {device}, {' or '.join(sorted(cpus))}"
    return [
        next_step("rsync", "-P", wheel, "USER@HOST:", where=there),
        next_step(
            "pip", "install", *options, Path(wheel.name), where="there, in vLLM's environment"
        ),
    ]


def _short(path: str) -> str:
    """Return the name of a program that PATH leads to, else its path."""
    found = shutil.which(Path(path).name)
    return Path(path).name if found and Path(found).absolute() == Path(path).absolute() else path
