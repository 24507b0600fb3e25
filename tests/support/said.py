"""What a file says, in one line for each thing, for tables of tests."""

from __future__ import annotations

from patchkit.runtime.formats.read import read_content


def variables(text: str, where: str) -> list[str]:
    """Return ``LINE NAME=value`` of the environment; ``NAME?`` if the value is not known."""
    content = read_content(text, where)
    return [
        f"{each.line} {each.name}" + (f"={each.value}" if each.literal else "?")
        for each in content.assignments
    ]


def servers(text: str, where: str) -> list[str]:
    """Return ``LINE command`` of vllm and ray; a word that is not known ends with ``?``."""
    content = read_content(text, where)
    return [
        " ".join([f"{each.line} {each.program}", *(_shown(word) for word in each.words)])
        for each in content.commands
        if each.program.startswith(("vllm", "ray"))
    ]


def _shown(word):
    return word.text if word.literal else f"{word.text}?"
