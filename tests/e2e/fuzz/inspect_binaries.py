"""Coverage-guided fuzzing of what inspects binaries: an error or a result, never anything else.

    nox -s fuzz -- 180        (or this file: -max_total_time=180 CORPUS)

An input is a library, a wheel, or a bare section of device code, as its first bytes say. libFuzzer
stops at the first exception that patchkit does not explain, and at an input that takes more than
ten seconds or more than 2 GiB. Needs atheris, which has wheels for CPython on Linux.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import zipfile
from pathlib import Path

import atheris

with atheris.instrument_imports():
    from patchkit.elf import Section, exports, read_dynamic
    from patchkit.errors import PatchkitError
    from patchkit.target import targets
    from patchkit.wheel.device.fatbin import read_entries
    from patchkit.wheel.device.inspect import inspect_file, prove_exact

LIBRARIES = Path(__file__).parents[3] / "tests" / "data" / "libraries"
FOLDER = Path(tempfile.mkdtemp(prefix="patchkit-fuzz-"))
WHEEL = FOLDER / "nvidia_nccl_cu13-2.29.7-py3-none-any.whl"
LIBRARY = FOLDER / "lib.so"
GB10 = targets()["gb10"]
FATBIN = b"\x50\xed\x55\xba"


def one(data: bytes) -> None:
    """Read one input in the way its first bytes ask for."""
    try:
        if data.startswith(FATBIN):
            read_entries(io.BytesIO(data), [Section(".nv_fatbin", 0, len(data))], "section")
            return
        path = WHEEL if data.startswith(b"PK") else LIBRARY
        path.write_bytes(data)
        if path == LIBRARY:
            _load(path)
        for binary in inspect_file(path):
            binary.load(GB10)
            prove_exact(binary, GB10)
    except PatchkitError:
        pass


def _load(path: Path) -> None:
    """What the dynamic loader would read; damage that it sees does not end the inspection."""
    with contextlib.suppress(PatchkitError):
        read_dynamic(path)
        exports(path, "ncclGetVersion")


def seeds(corpus: Path) -> None:
    """The small libraries, wheels of them, and their sections of device code."""
    corpus.mkdir(parents=True, exist_ok=True)
    for path in sorted(LIBRARIES.glob("*.so")):
        data = path.read_bytes()
        (corpus / path.name).write_bytes(data)
        (corpus / f"{path.name}.fatbin").write_bytes(data[data.index(FATBIN) :])
        with zipfile.ZipFile(corpus / f"{path.name}.whl", "w", zipfile.ZIP_DEFLATED) as bundle:
            bundle.writestr("nvidia/nccl/lib/libnccl.so.2", data)


if __name__ == "__main__":
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    seeds(Path(folders[0]) if folders else FOLDER / "corpus")
    limits = ["-timeout=10", "-rss_limit_mb=2048", "-max_len=65536"]
    atheris.Setup([*sys.argv, *limits, *([] if folders else [str(FOLDER / "corpus")])], one)
    atheris.Fuzz()
