"""Read versions as users write them."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from patchkit.errors import UsageError


def named_version(text: str, hint: str = "") -> Version:
    """Return the version that a text names. Raises UsageError for what PEP 440 does not allow."""
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(f"{text!r} is not a version", hint=hint) from None
