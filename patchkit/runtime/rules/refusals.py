"""Make the errors with which patchkit refuses a node, a file or a request; their texts are data."""

from __future__ import annotations

from patchkit import errors
from patchkit.runtime.rules.releases import read_env_data


def refusal(key: str, **fields: object) -> errors.PatchkitError:
    """Return the error of a key of recipes/env/refusals.toml, with its ``{fields}`` filled in."""
    row = read_env_data("refusals")[key]
    kind: type[errors.PatchkitError] = getattr(errors, row["kind"])
    return kind(
        row["what"].format_map(fields),
        why=row.get("why", "").format_map(fields),
        hint=row.get("hint", "").format_map(fields),
    )
