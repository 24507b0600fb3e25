"""Look which device code an installed vLLM holds, and what the driver has compiled. Runs on nodes.

Nothing is imported but the standard library and what reads ELF files and fat binaries.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patchkit.elf import parse_library
from patchkit.wheel.device.fatbin import read_entries

_FORCE = ("CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT")  # the first goes before the other


def look_at_device_code(home: str, process: int, cache: str) -> dict[str, Any]:
    """Return the device code of the vLLM in ``home``, and the cache of a process of it.

    With 0 it is the cache of a new process. The answer has the fields of ``DeviceCodeFound`` in
    doctor/first_use.py. ``cache`` is where the driver keeps compiled code, unless a variable of
    the process names another folder. Raises SourceError for a damaged library, OSError.
    """
    codes = {}
    for path in sorted(Path(home).rglob("*.so")):
        # Upstream's originals of replaced files lie in .patchkit; nothing loads them.
        if ".patchkit" not in path.parts:
            codes[path.name] = dict(Counter(_read_containers(path)))

    environment: Mapping[str, str] = os.environ
    if process:
        environment = _environment_of(process)
    folder = Path(environment.get("CUDA_CACHE_PATH") or cache).expanduser()
    return {
        "codes": {name: counts for name, counts in codes.items() if counts},
        "cache": str(folder),
        "kept": _folder_size(folder),
        "forced": _forcing_variable(environment),
    }


def _environment_of(process: int) -> dict[str, str]:
    text = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace")
    environment = {}
    for entry in text.split("\0"):
        name, sign, value = entry.partition("=")
        if sign:
            environment[name] = value
    return environment


def _folder_size(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    files = filter(Path.is_file, folder.rglob("*"))
    return sum(file.stat().st_size for file in files)


def _forcing_variable(environment: Mapping[str, str]) -> str:
    """Return the variable that makes the driver compile PTX, "" if none does."""
    for name in _FORCE:
        if name in environment:
            return name if environment[name] not in ("", "0") else ""
    return ""


def _read_containers(path: Path) -> Iterator[str]:
    """Yield the names of the code in each container that a device can load: ``sm_90 sm_120``."""
    names = defaultdict(list)
    with path.open("rb") as stream:
        sections = parse_library(stream, str(path)).sections
        live = [section for section in sections if section.name == ".nv_fatbin"]
        for entry in read_entries(stream, live, str(path)):
            if entry.kind in ("sass", "ptx"):
                names[entry.container].append(entry.name)

    yield from map(" ".join, names.values())
