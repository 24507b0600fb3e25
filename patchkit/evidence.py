"""Say how something is known, in one set of words: for fixes, for advice in guides, for rules.

The words say what was done to know it, and not how likely it is: claim nothing that nobody ran.
"""

from __future__ import annotations

from typing import Literal, get_args

Established = Literal[
    "measured",  # somebody ran it, and results or figures are there
    "compiled",  # a compiler took or refused it
    "read",  # it stands in the source code
    "documented",  # its maker says so
    "reported",  # several users say so
    "single report",  # one user says so
    "inferred",  # it follows from something else that is known
]
ESTABLISHED: tuple[str, ...] = get_args(Established)
SINGLE_REPORT: Established = "single report"

Confidence = Literal["high", "medium", "contested"]
"""How sure a rule is; contested where sources contradict each other."""
