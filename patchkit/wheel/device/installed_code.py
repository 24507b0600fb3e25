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
    environment = _environment_of(process) if process else os.environ
    kept = Path(environment.get("CUDA_CACHE_PATH") or cache).expanduser()

    codes = {}
    for path in sorted(Path(home).rglob("*.so")):
        # Upstream's originals of replaced files lie in .patchkit; nothing loads them.
        if ".patchkit" in path.parts:
            continue
        if containers := Counter(_read_containers(path)):
            codes[path.name] = dict(containers)

    forced = next((name for name in _FORCE if name in environment), "")
    is_forced = environment.get(forced, "0") not in ("", "0")
    return {
        "codes": codes,
        "cache": str(kept),
        "kept": sum(file.stat().st_size for file in kept.rglob("*") if file.is_file()),
        "forced": forced if is_forced else "",
    }


def _environment_of(process: int) -> Mapping[str, str]:
    text = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace")
    pairs = (pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
    return dict(pairs)


def _read_containers(path: Path) -> Iterator[str]:
    """Yield the code that a device takes by itself, container by container: ``sm_90 sm_120``."""
    entries = defaultdict(list)
    with path.open("rb") as stream:
        sections = parse_library(stream, str(path)).sections
        live = [section for section in sections if section.name == ".nv_fatbin"]
        for entry in read_entries(stream, live, str(path)):
            if entry.kind in ("sass", "ptx"):
                entries[entry.container].append(entry.name)
    for names in entries.values():
        yield " ".join(names)
