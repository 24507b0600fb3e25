"""Look which device code an installed vLLM holds, and what the driver has compiled. Runs on nodes.

Nothing is imported but the standard library and what reads ELF files and fat binaries.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchkit.elf import parse_library
from patchkit.wheel.device.fatbin import read_entries

_FORCE = ("CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT")  # the first goes before the other


def look_at_device_code(home: str, process: int, cache: str) -> dict[str, Any]:
    """Return what the vLLM in ``home`` holds, and a process of it finds, or with 0 a new one.

    The answer has the fields of ``DeviceCodeFound`` in doctor/first_use.py.

    ``cache`` is where the driver keeps what it compiled, unless a variable of the process says so.
    Raises SourceError for a damaged library, OSError.
    """
    environment: Mapping[str, str] = os.environ
    if process:
        pairs = (
            Path(f"/proc/{process}/environ")
            .read_bytes()
            .decode(errors="replace")
            .split("\0")
        )
        environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    place = Path(environment.get("CUDA_CACHE_PATH") or cache).expanduser()
    codes = {}
    # Upstream's own of what patchkit replaced lie in .patchkit; nothing loads them.
    libraries = (
        path for path in Path(home).rglob("*.so") if ".patchkit" not in path.parts
    )
    for path in sorted(libraries):
        with path.open("rb") as stream:
            sections = parse_library(stream, str(path)).sections
            live = [section for section in sections if section.name == ".nv_fatbin"]
            held: dict[int, list[str]] = {}
            for entry in read_entries(stream, live, str(path)):
                if entry.kind in ("sass", "ptx"):  # what a device takes by itself
                    held.setdefault(entry.container, []).append(entry.name)
        if held:
            codes[path.name] = dict(Counter(" ".join(names) for names in held.values()))
    forced = next((name for name in _FORCE if name in environment), "")
    return {
        "codes": codes,
        "cache": str(place),
        "kept": sum(file.stat().st_size for file in place.rglob("*") if file.is_file()),
        "forced": forced if environment.get(forced, "0") not in ("", "0") else "",
    }
