"""Check a text as `patchkit check` does, for tables of tests."""

from patchkit.runtime.check.check import find_problems
from patchkit.runtime.check.content import CheckedText
from patchkit.runtime.check.formats import read_content
from patchkit.runtime.check.situation import add_situation


def check_text(text, where="x.env", *, host=None, mode=0, **asked):
    """Return the findings of a text; ``asked`` is what is known, target and versions first."""
    checked = CheckedText(
        where=where, content=read_content(text, where), text=text, mode=mode
    )
    return find_problems(add_situation(checked, host, {"target": "gb10", **asked}))


def variables(text, where):
    """Return ``LINE NAME=value`` of the environment; ``NAME?`` if the value is not literal."""
    return [
        f"{found.line} {found.name}" + (f"={found.value}" if found.is_literal else "?")
        for found in read_content(text, where).assignments
    ]


def servers(text, where):
    """Return ``LINE command`` of each server."""
    return [
        " ".join(
            [f"{found.line} {found.program}", *(word.text for word in found.words)]
        )
        for found in read_content(text, where).commands
    ]
