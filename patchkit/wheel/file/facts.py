"""Write the facts that patchkit puts into a wheel, and the version that is a digest of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

FACTS = "patchkit.json"
"""The file in .dist-info that holds the facts."""


def as_text(value: object) -> str:
    """Return JSON as wheels hold it: sorted, so that equal facts are equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def digest_label(facts: Mapping[str, Any], texts: Iterable[str] = ()) -> str:
    """Return ten hex digits for a local version: of facts, and of texts that also decide."""
    joined = "\0".join([json.dumps(facts, sort_keys=True), *texts])
    return label_of(hashlib.sha256(joined.encode()).hexdigest())


def label_of(digest: str) -> str:
    """Return the first ten digits of a digest, as a segment of a local version."""
    short = digest[:10]
    # A segment of digits alone is a number to PEP 440, and would lose its leading zeros.
    return short if not short.isdigit() else f"a{short[1:]}"
