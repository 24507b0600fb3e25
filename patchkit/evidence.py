"""How something is known, in one set of words: for fixes, for advice in guides, for rules.

Claim nothing that nobody ran: the words are about what was done, not about how likely it is.
"""

from __future__ import annotations

from typing import Literal, get_args

Basis = Literal[
    "measured",  # somebody ran it, and figures or results are there
    "compiled",  # the compiler took or refused it
    "read",  # it stands in the source code
    "documented",  # its maker says so
    "reported",  # several users say so
    "single report",  # one user says so: what rests on that is off unless asked for
    "inferred",  # it follows from something else that is known
]
BASES: tuple[str, ...] = get_args(Basis)
SINGLE_REPORT: Basis = "single report"

Confidence = Literal["high", "medium", "contested"]
"""How sure a rule is; contested where sources contradict each other."""
