"""Name the next command so that it works when it is pasted: patchkit may be in no PATH."""

from __future__ import annotations

import re
import shutil
import sys
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
        return [_shortened(sys.executable), "-m", "patchkit"]
    has_path = started.name == "patchkit" and "/" in sys.argv[0]
    return [_shortened(sys.argv[0])] if has_path else ["patchkit"]


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
    is_own = sys.prefix != sys.base_prefix and beside.exists()
    return [_shortened(str(beside))] if is_own else ["pip"]


def _shortened(path: str) -> str:
    """Return the name of a program that PATH leads to, else its path."""
    found = shutil.which(Path(path).name)
    return Path(path).name if found and Path(found).absolute() == Path(path).absolute() else path
