"""Give a system Python's headers what they lack for another CPU: its ``pyconfig.h``.

That of Debian and Ubuntu includes ``<aarch64-linux-gnu/python3.11/pyconfig.h>``, by the CPU that is
compiled for, and on a machine there is only its own. Other builds of Python have one for all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from patchkit.errors import HostError, StorageError
from patchkit.paths import RECIPES
from patchkit.process import ask
from patchkit.quoting import quoted
from patchkit.records import read_toml

_ASK = """\
import sysconfig
answer = {
    "header": sysconfig.get_config_h_filename(),
    "own": sysconfig.get_config_var("MULTIARCH") or "",
    "package": "python%s-dev" % sysconfig.get_python_version(),
}
"""
_INCLUDE = r"^[ \t]*#[ \t]*include[ \t]*<({}/python[\w.]+/pyconfig\.h)>"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderMacro:
    """A macro that is another one by CPU; ``recipes/python_headers.toml`` describes the fields."""

    name: str
    value: Mapping[str, str]


@cache
def header_macros() -> tuple[HeaderMacro, ...]:
    """Return every macro of ``pyconfig.h`` that depends on the CPU."""
    path = RECIPES / "python_headers.toml"
    return read_toml(tuple[HeaderMacro, ...], path, key="macro")


def python_headers(python: Path, machine: str, dest: Path) -> Path | None:
    """Write below ``dest`` what an interpreter's headers lack to compile for ``machine``.

    Return ``dest``, for CPLUS_INCLUDE_PATH and C_INCLUDE_PATH, or None if they lack nothing. The
    interpreter's own ``pyconfig.h`` is taken, with the macros of the other CPU. Raises HostError
    if it has no headers, StorageError if they cannot be written.
    """
    said = ask(python, _ASK)
    header = Path(said["header"])
    try:
        text = header.read_text(encoding="utf-8")
        wanted = re.search(_INCLUDE.format(f"{machine}-linux-gnu"), text, re.MULTILINE)
        own = re.search(_INCLUDE.format(re.escape(said["own"])), text, re.MULTILINE)
        if not wanted or not own:
            return None
        text = (header.parents[1] / own[1]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(
            f"{python} has no headers: {error}", hint=quoted("apt", "install", said["package"])
        ) from error
    place = dest / wanted[1]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(header_for(machine, text), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"cannot write {place}: {error.strerror or error}", hint="free some space"
        ) from error
    return dest


def header_for(machine: str, text: str) -> str:
    """Return a ``pyconfig.h`` as it is on another CPU. What it does not speak of stays away."""
    for macro in header_macros():
        value = macro.value[machine]
        line = f"#define {macro.name} {value}" if value else f"/* #undef {macro.name} */"
        spelled = rf"^(#define {macro.name}\b.*|/\* #undef {macro.name} \*/)$"
        text = re.sub(spelled, line, text, flags=re.MULTILINE)
    return text
