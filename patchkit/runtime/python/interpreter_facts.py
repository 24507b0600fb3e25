"""Collect facts of the Python that runs this script in ``answer``, which ``process.ask`` returns.

The script imports neither torch nor vLLM. It starts as vLLM would start: under the same variables,
after .pth files and sitecustomize. So the files mapped now are those that .pth files, sitecustomize
and LD_PRELOAD have mapped. The script must run on every Python that vLLM supports.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator


def find_mappings() -> Iterator[tuple[int, int, str]]:
    """Yield the start address, end address and path of each mapped file of this process."""
    with open("/proc/self/maps", errors="surrogateescape") as file:  # noqa: PTH123
        for line in file:
            fields = line.split(None, 5)
            if len(fields) > 5 and fields[5].startswith("/"):
                start, _dash, end = fields[0].partition("-")
                path = fields[5].rstrip("\n")
                yield int(start, 16), int(end, 16), path


def find_provider(name: str | None = None) -> str | None:
    """Return the path of the library that defines ncclGetVersion, None if none does.

    Without ``name``, look among the global symbols; with it, load that library and look there.
    """
    try:
        function = ctypes.CDLL(name).ncclGetVersion
    except (AttributeError, OSError):
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    for start, end, path in find_mappings():
        if start <= address < end:
            return path
    return None


if __name__ == "__main__":
    # The __init__.py files that an import would run.
    specs = {
        package: importlib.util.find_spec(package) for package in ("torch", "vllm")
    }
    origins = {package: spec and spec.origin for package, spec in specs.items()}
    mapped = dict.fromkeys(path for _start, _end, path in find_mappings())
    answer = {
        **origins,
        "executable": os.path.realpath(sys.executable),
        "path": sys.path,
        "mapped": list(mapped),
        "provider": find_provider(),
        "asked": None,
    }

    # Look the library up as vLLM does. This must be last, since it maps the library.
    name = os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2"
    if "/" not in name:
        answer["asked"] = find_provider(name)
