"""Answer with facts of the Python that runs this text, as ``process.ask`` has it.

Neither torch nor vLLM is imported. It starts as vLLM would start: under the same variables, after
.pth files and sitecustomize. So what is mapped now is what they, and LD_PRELOAD, have mapped. Any
Python that vLLM supports can run it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator


def mappings() -> Iterator[tuple[int, int, str]]:
    """Yield start, end and path of each file that is mapped."""
    with open("/proc/self/maps", errors="surrogateescape") as file:  # noqa: PTH123
        for line in file:
            fields = line.split(None, 5)
            if len(fields) > 5 and fields[5].startswith("/"):
                start, end = (int(part, 16) for part in fields[0].split("-"))
                yield start, end, fields[5].rstrip("\n")


def provider(symbol: str, name: str | None = None) -> str | None:
    """Return the library that defines a symbol, for every other or the one of a name; or None."""
    try:
        function = getattr(ctypes.CDLL(name), symbol)
    except (AttributeError, OSError):
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    return next(
        (path for start, end, path in mappings() if start <= address < end), None
    )


if __name__ == "__main__":
    specs = {name: importlib.util.find_spec(name) for name in ("torch", "vllm")}
    answer = {
        # The files that an import would run.
        **{name: spec.origin if spec else None for name, spec in specs.items()},
        "executable": os.path.realpath(sys.executable),
        "path": sys.path,
        "mapped": list(dict.fromkeys(path for _, _, path in mappings())),
        "provider": provider("ncclGetVersion"),
    }
    # As vLLM does; last, since it maps what it finds.
    name = os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2"
    answer["asked"] = provider("ncclGetVersion", name) if "/" not in name else None
