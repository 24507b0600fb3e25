"""Find the ptxas of an installed CUDA toolkit, 13 or later: it knows sm_121a and sm_110a."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

_OLDEST = 13


def find_ptxas(root: Path, environment: Mapping[str, str]) -> str:
    """Return its path as seen by processes whose / is ``root``; "" if there is none."""
    for home in _homes(root, environment):
        place = home / "bin" / "ptxas"
        if place.is_file() and _major(home) >= _OLDEST:
            return f"/{place.relative_to(root)}"
    return ""


def _homes(root: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    # Relative, since `root` / an absolute path would lead out of the root.
    if named := environment.get("CUDA_HOME", "").lstrip("/"):
        yield root / named
    yield root / "usr/local/cuda"
    yield from sorted((root / "usr/local").glob("cuda-*"), reverse=True)


def _major(home: Path) -> int:
    """Return the major version by version.json, which NVIDIA's toolkits have; 0 without it."""
    try:
        found = json.loads((home / "version.json").read_text(encoding="utf-8"))
        return int(found["cuda"]["version"].partition(".")[0])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
