"""Show what a person has to decide about a release, and the file to edit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``file`` is the one to edit, from the root of the checkout; ``line`` what it could say.

    Until one that is ``needed`` is made, the release is not entered.
    """

    file: str
    says: str
    line: str = ""
    needed: bool = False


def show(decisions: Sequence[Decision]) -> int:
    """Print them, and return 1 if the release cannot be entered without one, else 0."""
    for each in decisions:
        word = "to decide first" if each.needed else "to look at"
        print(f"{word}: {each.file}: {each.says}")
        if each.line:
            print(f"    {each.line}")
    # Steps of a release are processes of their own: their lines must keep their order.
    sys.stdout.flush()
    return int(any(each.needed for each in decisions))
