"""Read what an error says of itself: its cause, its advice, and the package whose code failed."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

from patchkit.doctor.symptoms.pins import NO_RELEASE, pinned_cause
from patchkit.doctor.symptoms.symptom import Cause, filled_cause, libraries
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.rule import Situation

_SENTENCE_END = re.compile(r"(?<=[.;!?])\s+|\n")


WORDS = read_toml(dict[str, Any], RECIPES / "doctor" / "messages.toml")
"""What errors say of themselves: the head of the file describes the entries."""


def states_cause(message: str) -> bool:
    """Return whether a message says what is wrong, by messages.toml."""
    is_mute = re.search(WORDS["mute"], message)
    return not is_mute and bool(re.search(WORDS["states"], message))


def own_advice(message: str) -> str:
    """Return a hint of the sentences of a message that say what to do, "" if none does."""
    sentences = _SENTENCE_END.split(message)
    advice = " ".join(text for text in sentences if re.search(WORDS["advises"], text))
    return f"the message itself says: {advice}" if advice else ""


def setting_causes(message: str) -> tuple[Cause, ...]:
    """Return the cause of a message that compares a value with an option of vLLM, () for others."""
    options = re.findall(WORDS["setting"], message)
    return tuple(
        filled_cause(WORDS["cause"]["setting"], {"option": option.replace("_", "-")})
        for option in options[:1]
    )


def other_reasons(message: str) -> str:
    """Return which back ends of a message are for this GPU, and why each is refused; "" if none."""
    reasons = "; ".join(re.findall(WORDS["reason"], message))
    return f"refused for another reason than this GPU: {reasons}" if reasons else ""


def last_frame(lines: str) -> re.Match[str] | None:
    """Return the last frame in these lines, with ``file`` and ``function``; None if none is."""
    *_others, frame = chain([None], re.finditer(WORDS["frame"], lines))
    return frame


def runs_engine(lines: str, message: str) -> bool:
    """Return whether an error of Python itself is of vLLM's engine, which all options change."""
    is_mute = re.search(WORDS["mute"], message)
    return bool(is_mute and re.search(WORDS["engine"], lines))


def frame_causes(
    lines: str,
    message: str,
    facts: Situation,
    part_causes: tuple[Cause, ...],
) -> tuple[Cause, ...]:
    """Return the causes of an error, by the last frame in the lines before it.

    ``part_causes`` are those of the library in whose frames the error is. If the message is mute,
    the code that failed comes behind them, or before them if it is a server's own; an import that
    failed takes their place; so does a package that no library names, if the message is not mute.
    """
    frame = last_frame(lines)
    if frame is None:
        return part_causes

    module = frame["module"]
    if not re.search(WORDS["mute"], message):
        is_named = any(
            f"/{module}/" in text for part in libraries() for text in part.frames
        )
        return part_causes if part_causes and is_named else (_cause("package", frame),)

    if frame["function"] == "<module>":
        return (_cause("import", frame),)

    pinned = pinned_cause(f"module '{module}'", "", facts)
    causes = (*part_causes, _cause("code", frame))
    if module in WORDS["cause"]:
        causes = causes[::-1]

    if pinned is None or pinned.id == NO_RELEASE:
        return causes

    return (*causes, pinned)


def _cause(kind: str, frame: re.Match[str]) -> Cause:
    """Return the cause that the frame's module has of its own, else that of ``kind``."""
    causes = WORDS["cause"]
    texts = causes.get(frame["module"], causes[kind])
    return filled_cause(texts, frame.groupdict(default="?"))
