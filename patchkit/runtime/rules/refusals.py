"""Make the errors with which patchkit refuses a node, a file or a request.

Their texts are data: recipes/env/refusals.toml.
"""

from __future__ import annotations

from patchkit import errors
from patchkit.runtime.rules.releases import read_env_data


def refusal(key: str, **fields: object) -> errors.PatchkitError:
    """Return the error that refusals.toml has for a key, with ``fields`` filled into its texts."""
    row = read_env_data("refusals")[key]
    kind: type[errors.PatchkitError] = getattr(errors, row["kind"])
    return kind(
        row["what"].format_map(fields),
        why=row.get("why", "").format_map(fields),
        hint=row.get("hint", "").format_map(fields),
    )
