"""Say what the Python that has vLLM holds, so that nodes can be compared: versions, digests."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from patchkit.errors import PatchkitError
from patchkit.reading import read_text
from patchkit.runtime.host.host import Nccl, Software
from patchkit.runtime.python.distributions import (
    LostFile,
    distributions,
    header,
    import_path,
    lost_files,
)
from patchkit.runtime.python.startup import STEM

_LARGEST = 32 << 20  # bytes of a RECORD
# Whose files a rank loads; of all others the version is enough.
_DIGESTED = ("vllm", "torch", "triton", "pytorch_triton", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedNccl:
    """The libnccl that is loaded for vLLM: its path and what it says of itself, "" for none."""

    path: str = ""
    version: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonContents:
    """An environment: versions by project, digests over the RECORD of those that ranks load.

    RECORD says what was installed, not what somebody changed since; of libnccl the bytes count.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    nccl: LoadedNccl = LoadedNccl()
    torch_nccl: LoadedNccl = LoadedNccl()
    lost: tuple[LostFile, ...] = ()


def python_contents(venv: str, software: Software | None) -> PythonContents:
    """Return what an environment holds; ``software`` says which libnccl is loaded there."""
    path = import_path(venv)
    homes = {name: found[0] for name, found in distributions(path).items()}
    torch = _describe_nccl(software.torch_nccl) if software else LoadedNccl()
    same = software and software.vllm_nccl == software.torch_nccl
    return PythonContents(
        versions={name: header(home, "Version") for name, home in sorted(homes.items())},
        digests={name: _digest_record(homes[name]) for name in _DIGESTED if name in homes},
        nccl=torch if same or software is None else _describe_nccl(software.vllm_nccl),
        torch_nccl=torch,
        lost=lost_files(path, STEM),
    )


def _describe_nccl(nccl: Nccl | None) -> LoadedNccl:
    if nccl is None or not nccl.path:
        return LoadedNccl()
    try:
        with Path(nccl.path).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        sha256 = ""
    return LoadedNccl(path=nccl.path, version=nccl.version, sha256=sha256)


def _digest_record(home: Path) -> str:
    """Return a digest over a RECORD, "" if there is none.

    Scripts depend on the folder, and the notes in .dist-info on where a wheel came from.
    """
    try:
        rows = list(csv.reader(read_text(home / "RECORD", limit=_LARGEST).splitlines()))
    except (PatchkitError, csv.Error):
        return ""
    own = ("../", f"{home.name}/")
    hashed = [row for row in rows if len(row) > 1 and row[1] and not row[0].startswith(own)]
    kept = [",".join(row[:2]) for row in hashed]
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest() if kept else ""
