"""Read on a node which device code an installed vLLM holds and how much the driver has compiled.

It runs on nodes, so it imports only the standard library and the readers of ELF and fat binaries.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from patchkit.elf import parse_library
from patchkit.fatbin import read_entries
from patchkit.frozen import Values, frozen
from patchkit.reading import read_environment, user_path

_FORCE = ("CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT")  # of both, the first one decides


@frozen
class DeviceCodeFound:
    """The device code of vLLM's libraries on a node, and the driver's cache of compiled code.

    ``codes`` is library → code (such as ``sm_80 compute_80``) → number of fat binaries that hold
    it. ``kept`` is the size in bytes of the driver's ``cache``. ``forced`` is the variable that
    makes the driver compile all PTX, "" if no such variable is set.
    """

    codes: Mapping[str, Mapping[str, int]]
    cache: str
    kept: int
    forced: str


def look_at_device_code(home: str, process: int, cache: str) -> DeviceCodeFound:
    """Return the device code of the vLLM in the folder ``home``, and the driver's cache.

    ``process`` is the id of a running vLLM, or 0 to judge for a new process with this environment.
    ``cache`` is the folder in which the driver keeps compiled code if CUDA_CACHE_PATH of the
    process names none.
    Raises SourceError for a damaged library, OSError.
    """
    codes = {}
    for path in sorted(Path(home).rglob("*.so")):
        # Upstream's originals of replaced files lie in .patchkit; nothing loads them.
        if ".patchkit" in path.parts:
            continue
        if counts := dict(Counter(_read_containers(path))):
            codes[path.name] = counts

    environment: Values = read_environment(process) if process else os.environ

    folder = user_path(environment.get("CUDA_CACHE_PATH") or cache)
    sizes = (file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return DeviceCodeFound(
        codes=codes,
        cache=str(folder),
        kept=sum(sizes),
        forced=_forcing_variable(environment),
    )


def _forcing_variable(environment: Values) -> str:
    """Return the variable that makes the driver compile PTX despite machine code, "" for none."""
    for name in _FORCE:
        if name in environment:
            return name if environment[name] not in ("", "0") else ""
    return ""


def _read_containers(path: Path) -> Iterator[str]:
    """Yield the names of the code in each live container: ``sm_90 sm_120``."""
    names = defaultdict(list)
    with path.open("rb") as stream:
        sections = parse_library(stream, str(path)).sections
        live = [section for section in sections if section.name == ".nv_fatbin"]
        for entry in read_entries(stream, live, str(path)):
            if entry.kind in ("sass", "ptx"):
                names[entry.container].append(entry.name)

    yield from map(" ".join, names.values())
