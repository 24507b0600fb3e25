"""Check variables: their names, values, placeholders, and what contradicts what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import (
    DOCKERFILE,
    SHELL,
    Assignment,
    build_finding,
    rule_finding,
    shorten,
)
from patchkit.runtime.check.hosts import find_half_cages
from patchkit.runtime.check.situation import CheckedText, runs_upstream
from patchkit.runtime.rules.condition import holds
from patchkit.runtime.rules.flags import flags
from patchkit.runtime.rules.sensitive_names import is_secret
from patchkit.runtime.rules.spelling import Slips, nearest
from patchkit.runtime.rules.variable_rules import load_variable_rules
from patchkit.runtime.rules.variable_values import (
    ADDRESS_NAMES,
    find_value_problems,
    is_placeholder,
    read_number,
    value_tables,
)
from patchkit.runtime.rules.variables import (
    has_other_owner,
    is_current,
    lifetime,
    nccl_variables,
    other_variables,
    vllm_variables,
)
from patchkit.runtime.rules.vllm_values import vllm_values

_READERS = {"NCCL_": "NCCL", "VLLM_": "vLLM"}  # both have five characters
_SOURCES = {"NCCL": "NCCL's sources", "vLLM": "vLLM envs.py"}
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_HANDED_ON = re.compile(r"""\b([A-Za-z_]\w*)(=|:[ \t]+)["']?\$\{?\1\b""")
_SWITCH = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}
_READ = re.compile(r"(NCCL|VLLM|GLOO|TP|UCX|RAY|MASTER)_\w+")
# No process group is set up without these; without the others it only goes another way.
_NEEDED = re.compile(r"VLLM_HOST_IP|MASTER_ADDR|RAY_\w*ADDRESS|(NCCL|GLOO|TP)_SOCKET_IFNAME")
_ADDRESS_FLAGS = ("--master-addr", "--node-ip-address", "--address")
_RDMA_ONLY = re.compile(r"NCCL_IB_(?!DISABLE$)\w+|NCCL_NET_GDR_\w+")
_MATTERS = re.compile(r"(NCCL|VLLM|RAY|GLOO|TP|UCX|HF|TRITON|CUDA|OMP|TORCH|PYTORCH)_")


@cache
def _names_in_capitals() -> Mapping[str, str]:
    """Return the names that have small letters as well, by their capitals."""
    return {name.upper(): name for name in other_variables() if name != name.upper()}


def check_names(checked: CheckedText) -> Iterator[Finding]:
    """Yield what is wrong with names, and what the rules say against their values."""
    situation, avoids = checked.situation, load_variable_rules().avoids_by_name
    known = {
        "vLLM": vllm_variables(situation.get("vllm", ""), checked.home),
        "NCCL": nccl_variables(situation.get("nccl", "")),
    }
    slips = {reader: Slips(names) for reader, names in known.items()}
    # The names that a file uses, other than to hand them on under the same name.
    used = frozenset(_USED.findall(_HANDED_ON.sub("", checked.text)))
    for assignment in checked.content.assignments:
        name, value = assignment.name, assignment.value
        if not value:
            continue  # to all who read these, an empty variable is one that is not set
        reader = _READERS.get(name[:5], "")
        # A name of no project that the file itself uses is its own, whoever else had one like it.
        own = name in used and not reader and name not in other_variables()
        rules = () if own or not assignment.is_known else avoids.get(name, ())
        advised = [rule for rule in rules if rule.matches(value) and holds(rule.when, situation)]
        # One finding for each name: advice says more than that nobody reads it.
        for rule in advised:
            what = f"{assignment.shown} is advised against"
            yield rule_finding(rule, assignment.line, what, rule.reason, name)
        if advised:
            continue
        # A name in small letters alone is a script's own, whatever variable it was named after.
        alike = "" if name.islower() else _names_in_capitals().get(name.upper(), name)
        if alike not in ("", name):
            yield build_finding("variable-capitals", assignment, alike=alike)
        if reader and not (situation.get(reader.lower()) and name in known[reader]):
            yield from _find_unread(assignment, checked, slips[reader], name in used)


def _find_unread(
    assignment: Assignment, checked: CheckedText, slips: Slips, is_used: bool
) -> Iterator[Finding]:
    """Yield that nobody reads a name here, if it is clear which name or release was meant.

    An unknown name may be of a fork, or of an image's start script: it is reported where upstream's
    own vLLM gets it.
    """
    name, situation, content = assignment.name, checked.situation, checked.content
    reader = _READERS[name[:5]]
    version = situation.get(reader.lower(), "")
    words = {"reader": reader, "version": version, "source": _SOURCES[reader]}
    if life := lifetime(name):
        if version or not is_current(life):
            key = "variable-of-other-release" if version else "variable-gone"
            gone = (row["instead"] for row in value_tables()["gone"] if name in row["names"])
            words |= {"hint": next(gone, "leave it out"), "first": life.first, "last": life.last}
            yield build_finding(key, assignment, None, **words)
        return
    upstream = runs_upstream(content, assignment.block)
    hint, flag = "leave it out", f"--{name[5:].lower().replace('_', '-')}"
    close = slips(name)
    if close and _value_fits(assignment, close, situation.get("role", "")):
        hint = f"did you mean {close}?"
    elif has_other_owner(name) or is_used:
        return
    elif flag in flags(situation.get("vllm", "")) and (upstream or content.commands):
        hint = f"use the flag {flag}"
    elif not upstream:
        return
    words |= {"name": shorten(name), "hint": hint}
    yield build_finding("unknown-variable", assignment, None, **words)


def _value_fits(assignment: Assignment, name: str, role: str) -> bool:
    """Return whether a value could be that of another variable, as far as that is known."""
    life, value = lifetime(name), assignment.value
    if not assignment.is_known:
        return True
    is_word = life is not None and life.default.isdecimal() and read_number(value) is None
    return not is_word and not any(find_value_problems(name, value, role))


def check_values(checked: CheckedText) -> Iterator[Finding]:
    """Yield values that a variable cannot have."""
    content, situation = checked.content, checked.situation
    vllm = situation.get("vllm", "")
    takes_by_name = vllm_values(vllm)
    # A fork of a release may take more.
    level = Level.WARNING if runs_upstream(content) is False else None
    for assignment in filter(lambda row: row.is_known, content.assignments):
        name, value = assignment.name, assignment.value
        for problem in find_value_problems(name, value, situation.get("role", "")):
            grave = Level.ERROR if problem.stops else None
            words = {"why": problem.why, "hint": problem.hint, "source": problem.source}
            yield build_finding("value", assignment, grave, problem=problem.what, **words)
        takes = takes_by_name.get(name) if name.startswith("VLLM_") else None
        if takes and not takes.has(value) and (assignment.is_given or not value):
            hint = f"write {'one of these' if takes.words else 'a number'}, or leave {name} out"
            if close := nearest(value, takes.words):
                hint = f"did you mean {close}?"
            elif not takes.words and value.lower() in _SWITCH:
                hint = f"write {name}={_SWITCH[value.lower()]}"
            words = {"reader": f"vLLM {vllm}".rstrip(), "takes": takes.in_words, "hint": hint}
            yield build_finding("value-refused", assignment, level, **words)


def check_placeholders(checked: CheckedText) -> Iterator[Finding]:
    """Yield variables and flags of the launch whose values are still to be filled in."""
    for assignment in checked.content.assignments:
        name = assignment.name
        read = _READ.fullmatch(name) or ADDRESS_NAMES.fullmatch(name)
        # A secret that is not there yet is told of by itself.
        is_open = assignment.is_known and is_placeholder(name, assignment.value)
        if read and is_open and not is_secret(name):
            level = Level.ERROR if _NEEDED.fullmatch(name) else None
            yield build_finding("placeholder", assignment, level)
    for flag in (flag for command in checked.content.commands for flag in command.flags):
        address = flag.value.rpartition(":")[0] or flag.value
        if flag.name in _ADDRESS_FLAGS and is_placeholder("_IP", address):
            yield build_finding("placeholder", flag, Level.ERROR)


def check_contradictions(checked: CheckedText) -> Iterator[Finding]:
    """Check each block by itself: two services or commands do not contradict each other."""
    blocks: dict[int, list[Assignment]] = {}
    for assignment in checked.content.assignments:
        if assignment.is_given:
            blocks.setdefault(assignment.block, []).append(assignment)
    for block, together in blocks.items():
        # Of several the last one counts, as in a shell, which may set one anew for what follows.
        last = {assignment.name: assignment for assignment in together}
        first: dict[str, Assignment] = {}
        may_change = not block and checked.content.kind in (SHELL, DOCKERFILE)
        for assignment in () if may_change else together:
            before = first.setdefault(assignment.name, assignment)
            if before.value != assignment.value and _MATTERS.match(assignment.name):
                yield build_finding("set-twice", assignment, first=before.line, before=before.shown)
        switch, hca = last.get("NCCL_IB_DISABLE"), last.get("NCCL_IB_HCA")
        if switch and switch.value != "0":
            for name in filter(_RDMA_ONLY.fullmatch, last):
                words = {"first": switch.line, "before": switch.shown}
                yield build_finding("rdma-off", last[name], None, **words)
        elif hca and not hca.value.startswith("^"):
            yield from find_half_cages(hca, checked.host)
