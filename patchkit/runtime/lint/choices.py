"""Check values of vLLM's variables against what the release's own ``envs.py`` takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from patchkit.finding import Finding
from patchkit.runtime.files.content import Assignment, is_open, short
from patchkit.runtime.rules.variables import nearest, values_by_release
from patchkit.runtime.rules.vllm_values import Takes

_OF_VLLM = "VLLM_"  # envs.py lists names of others as well: LOCAL_RANK, MAX_JOBS, VERBOSE
_SWITCH = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}


def check_choice(
    assigned: Sequence[Assignment], vllm: str, values: Mapping[str, Takes]
) -> Iterator[Finding]:
    """Return the values that a vLLM does not take; ``vllm`` is its release, "" for any.

    ``values`` are those that it takes (``variables.vllm_values``).
    """
    for each in assigned:
        takes = values.get(each.name) if each.name.startswith(_OF_VLLM) else None
        if takes and each.literal and not is_open(each.value) and not takes.has(each.value):
            yield _refused(each, f"vLLM {vllm}".rstrip(), takes)


def _refused(assigned: Assignment, reader: str, takes: Takes) -> Finding:
    say = assigned.error if takes.enforced else assigned.warning
    why = "vLLM reads it when it starts, and stops with a ValueError."
    if not takes.enforced:
        why = "Its type in envs.py names these; what reads it may know no other."
    return say(
        f"{assigned.shown}: {reader} takes {takes.in_words}",
        why=why,
        hint=_hint(assigned, takes),
        source="vLLM envs.py",
    )


def _hint(assigned: Assignment, takes: Takes) -> str:
    name, value = assigned.name, assigned.value
    if not takes.words:
        switch = _SWITCH.get(value.lower())
        return f"write {name}={switch}" if switch else f"write a number, or leave {name} out"
    taking = [row for row in values_by_release(name) if row[2].has(value)]
    if taking:
        return f"leave it out: {taking[0][0]} to {taking[-1][1]} take {short(value)}"
    close = nearest(value, takes.words)
    return f"did you mean {close}?" if close else f"write one of these, or leave {name} out"
