"""Read what an error says of itself: its cause, its advice, and the package whose code failed."""

import re
from itertools import chain
from typing import Any

from patchkit.doctor.symptoms.pins import FITS, NO_RELEASE, pinned_cause
from patchkit.doctor.symptoms.symptom import Cause, filled_cause, libraries
from patchkit.frozen import Values
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.presets import FLAGS
from patchkit.runtime.rules.releases import read_table
from patchkit.runtime.rules.rule import Situation
from patchkit.runtime.rules.spelling import nearest_hint

_SENTENCE_END = re.compile(r"(?<=[.;!?])\s+|\n")
_HYPHENS = 2  # a flag with more of them has several words


WORDS = read_toml(dict[str, Any], RECIPES / "doctor" / "messages.toml")
"""What errors say of themselves: the head of the file describes the entries."""


def states_cause(message: str) -> bool:
    """Return whether a message says what is wrong."""
    is_mute = re.search(WORDS["mute"], message)
    return not is_mute and bool(re.search(WORDS["states"], message))


def flag_lifetime(message: str) -> str:
    """Return which releases have the flag that a message calls unknown, "" for other messages."""
    flag = re.search(WORDS["unknown"], message)
    if flag is None:
        return ""

    table = read_table(FLAGS)
    name = f"--{flag[1]}"
    if life := table.lifetime(name):
        return f"{name}: in `vllm serve` from {life.first} to {life.last}"

    foreign = "no release of vLLM has it: it is of a fork or branch"
    return f"{name}: {nearest_hint(name, table.at(''), foreign)}"


def own_advice(message: str) -> str:
    """Return a hint of the sentences of a message that say what to do, "" if none does."""
    sentences = _SENTENCE_END.split(message)
    advice = " ".join(text for text in sentences if re.search(WORDS["advises"], text))
    return f"the message itself says: {advice}" if advice else ""


def stated_options(text: str) -> dict[str, str]:
    """Return option → value of an options line of vLLM's, or of a command; a secret is left out."""
    options = re.finditer(WORDS["option"], text)
    return {
        option["name"].replace("_", "-"): option["value"] or ""
        for option in options
        if not re.search(WORDS["private"], option["name"])
    }


def stated_variables(text: str) -> tuple[str, ...]:
    """Return variables with their values that may change how a server computes, each once."""
    unquoted = re.sub("[\"']", "", text)
    return (*dict.fromkeys(re.findall(WORDS["variable"], unquoted)),)


def option_advice(message: str, options: Values) -> str:
    """Return a hint at the options that a message names, "" if it names none.

    These are ``options`` of the start whose name or value it has, and others by their whole name.
    """
    words = _plain_words(message.partition(": ")[2])
    table = read_table(FLAGS)
    flags = (flag[2:] for flag in table.at("") if flag.count("-") > _HYPHENS)
    named = [
        f"--{name}={value}".rstrip("=")
        for name, value in {**dict.fromkeys(flags, ""), **options}.items()
        if table.lifetime(f"--{name}") and _is_named(words, name, value)
    ]
    return WORDS["named"].format(options=", ".join(named)) if named else ""


def names_lever(message: str, options: Values) -> bool:
    """Return whether a message names what to change: an option, a variable, a version, a file."""
    return bool(re.search(WORDS["lever"], message) or option_advice(message, options))


def _is_named(words: str, name: str, value: str) -> bool:
    """Return whether words have an option's name, or its value if that is no accident."""
    if re.fullmatch(WORDS["common"], name):
        return False

    is_trivial = re.fullmatch(WORDS["trivial"], f"{name} {value}")
    return _plain_words(name) in words or (
        not is_trivial and _plain_words(value) in words
    )


def void_advice(hint: str, options: Values, version: str) -> str:
    """Return what of a hint is in force by ``options`` or not in this release, "" if nothing is."""
    table = read_table(FLAGS)
    lines = []
    for flag, value in re.findall(WORDS["flag"], hint):
        if options.get(flag[2:]) == value:
            set_flag = f"{flag} {value}".rstrip()
            lines.append(f"In force in this log already: {set_flag}.")
        elif table.lifetime(flag) and flag not in table.at(version):
            lines.append(f"Not in vLLM {version}: {flag}.")

    return "\n".join(dict.fromkeys(lines))


def _plain_words(text: str) -> str:
    return f" {' '.join(re.findall('[a-z0-9]+', text.lower()))} "


def other_reasons(message: str) -> str:
    """Return which back ends of a message are for this GPU, and why each is refused; "" if none."""
    reasons = "; ".join(re.findall(WORDS["reason"], message))
    return f"refused for another reason than this GPU: {reasons}" if reasons else ""


def last_frame(lines: str) -> re.Match[str] | None:
    """Return the last frame in these lines, with ``file`` and ``function``; None if none is."""
    *_others, frame = chain([None], re.finditer(WORDS["frame"], lines))
    return frame


def frame_causes(
    lines: str,
    message: str,
    facts: Situation,
    part_causes: tuple[Cause, ...],
) -> tuple[Cause, ...]:
    """Return the causes of an error, by the last frame in the lines before it.

    ``part_causes`` are those of the library in whose frames the error is. If the message is mute,
    an import that failed is the only cause; else the code that failed comes behind them, or before
    them if it is a server's own, and a wrong version of the package last. If it is not mute, the
    package is the only cause, unless a library names it and has causes.
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

    if pinned is None or pinned.id in (NO_RELEASE, FITS):
        return causes

    return (*causes, pinned)


def _cause(kind: str, frame: re.Match[str]) -> Cause:
    """Return the cause that the frame's module has of its own, else that of ``kind``."""
    causes = WORDS["cause"]
    texts = causes.get(frame["module"], causes[kind])
    return filled_cause(texts, frame.groupdict(default="?"))
