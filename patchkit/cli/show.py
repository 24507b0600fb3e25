"""Former names of what is in `render` and `patch.verdict_view` now."""

from __future__ import annotations

from patchkit.cli.patch.verdict_view import proof_lines as proof_lines
from patchkit.cli.patch.verdict_view import verdict_fields as verdict_fields
from patchkit.cli.patch.verdict_view import verdict_lines as verdict_lines
from patchkit.cli.render import BAD as BAD
from patchkit.cli.render import GOOD as GOOD
from patchkit.cli.render import gigabytes as gigabytes
from patchkit.cli.render import label as word
from patchkit.cli.render import verbose_option as verbose

__all__ = [
    "BAD",
    "GOOD",
    "gigabytes",
    "proof_lines",
    "verbose",
    "verdict_fields",
    "verdict_lines",
    "word",
]
