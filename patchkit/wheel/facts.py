"""What a built wheel tells of itself, and the version that is a digest of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

FACTS = "patchkit.json"
"""The file in .dist-info that holds the facts."""


def as_text(value: object) -> str:
    """JSON as files here hold it: sorted, so that equal facts are equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def digest_label(facts: Mapping[str, Any], texts: Iterable[str] = ()) -> str:
    """Ten hex digits for a local version: of the facts, and of texts that decide as well."""
    joined = "\0".join([json.dumps(facts, sort_keys=True), *texts])
    digest = hashlib.sha256(joined.encode()).hexdigest()[:10]
    # A segment of digits alone is a number to PEP 440, and would lose its leading zeros.
    return digest if not digest.isdigit() else f"a{digest[1:]}"


def tree_digest(source: Path, aside: Collection[str] = ()) -> str:
    """A digest of the paths and contents below a folder, patchkit's ledger left out.

    ``aside`` are other entries of the folder that do not count.
    """
    left = {".patchkit", *aside}
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(source)}\n"
        for path in source.rglob("*")
        if path.is_file() and path.relative_to(source).parts[0] not in left
    ]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
