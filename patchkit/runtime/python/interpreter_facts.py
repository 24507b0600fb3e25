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


class _Object(ctypes.Structure):
    """The beginning of a ``dl_phdr_info``."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


class _SymbolInfo(ctypes.Structure):
    """A ``Dl_info``."""

    _fields_ = (
        ("filename", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def mapped() -> list[str]:
    """Return the mapped libraries, in the order in which the dynamic loader searches them."""
    names = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Object), ctypes.c_size_t, ctypes.c_void_p)
    def note(found, _size, _data):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        names.append(os.fsdecode(found.contents.name or b""))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(note, None)
    # The program itself has no name here, and the vDSO none with a slash.
    return [os.path.abspath(name) for name in names if "/" in name]  # noqa: PTH100


def provider(symbol: str, name: str | None = None) -> str | None:
    """Return the library that defines a symbol, for every other or the one of a name; or None."""
    try:
        function = getattr(ctypes.CDLL(name), symbol)
    except (AttributeError, OSError):
        return None
    place = _SymbolInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(place))
    return os.path.abspath(os.fsdecode(place.filename or b""))  # noqa: PTH100


def package(name: str) -> str | None:
    """Return the ``__init__.py`` that an import would run."""
    spec = importlib.util.find_spec(name)
    return spec.origin if spec else None


if __name__ == "__main__":
    answer = {
        "executable": os.path.realpath(sys.executable),
        "version": ".".join(map(str, sys.version_info[:3])),
        "path": sys.path,
        "torch": package("torch"),
        "vllm": package("vllm"),
        "mapped": mapped(),
        "provider": provider("ncclGetVersion"),
    }
    # As vLLM does; last, since it maps what it finds.
    name = os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2"
    answer["asked"] = provider("ncclGetVersion", name) if "/" not in name else None
