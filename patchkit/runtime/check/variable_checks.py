"""Check names and values of variables, and what contradicts what."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain

from patchkit.finding import Level
from patchkit.frozen import frozen
from patchkit.runtime.check.content import (
    DOCKERFILE,
    SHELL,
    Assignment,
    CheckedText,
    shorten,
)
from patchkit.runtime.check.finding_texts import (
    Findings,
    build_finding,
    build_rule_finding,
)
from patchkit.runtime.rules import variables
from patchkit.runtime.rules.flags import flags
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.rule import select_entries
from patchkit.runtime.rules.secret_texts import is_secret
from patchkit.runtime.rules.spelling import Slips, nearest_hint
from patchkit.runtime.rules.variable_rules import Avoid, load_variable_rules
from patchkit.runtime.rules.variable_values import (
    ADDRESS_NAMES,
    AllowedValues,
    find_value_problems,
    is_placeholder,
    read_nccl_number,
    vllm_values,
)

_NAMES = read_env_data("said")["variables"]
_LAUNCH_NAMES = re.compile(f"{_NAMES['read']}|{ADDRESS_NAMES.pattern}")
_NEEDED_NAMES = re.compile(_NAMES["needed"])
_RDMA_NAMES = re.compile(_NAMES["rdma_only"])
_COMPARED_NAMES = re.compile(_NAMES["matters"])
_USE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_HANDING_ON = re.compile(r"""\b([A-Za-z_]\w*)(=|:[ \t]+)["']?\$\{?\1\b""")


@frozen
class _Reader:
    """A program that reads variables of a text; an empty ``version`` means any."""

    title: str
    source: str
    version: str
    slips: Slips
    checked: CheckedText

    def check(self, variable: Assignment, *, is_used: bool) -> Findings:
        """Yield that no program reads a name, and what to write instead."""
        name = variable.name
        if self.version and name in self.slips.names:
            return

        life = variables.lifetime(name)
        if life is None:
            hint = self._hint_at(variable, is_used=is_used)
            if hint:
                yield build_finding(
                    "unknown-variable",
                    variable,
                    reader=self,
                    name=shorten(name),
                    hint=hint,
                )
        elif self.version or not life.is_current:
            gone = read_env_data("values")["gone"]
            instead = [str(row["instead"]) for row in gone if name in row["names"]]
            yield build_finding(
                "variable-of-other-release" if self.version else "variable-gone",
                variable,
                reader=self,
                life=life,
                hint=instead[0] if instead else "leave it out",
            )

    def _hint_at(self, variable: Assignment, *, is_used: bool) -> str:
        """Return what to write instead of an unknown name, "" if others may read it."""
        name = variable.name
        meant = self.slips.find_meant(name)
        if meant and _can_have_value(meant, variable, self.checked.role):
            return f"did you mean {meant}?"

        # Another program, a script or an image may set or read it.
        owners = read_env_data("owners")["owner"]
        forms = chain.from_iterable(row["names"] for row in owners)
        if is_used or any(fnmatchcase(name, form) for form in forms):
            return ""

        is_upstream = self.checked.runs_upstream(variable.block)
        flag = f"--{name[5:].lower().replace('_', '-')}"
        is_served = is_upstream or self.checked.content.commands
        if is_served and flag in flags(self.checked.vllm):
            return f"use the flag {flag}"

        return "leave it out" if is_upstream else ""


def check_names(checked: CheckedText) -> Findings:
    """Yield what is wrong with names, and what the rules say against their values."""
    avoids_by_name: dict[str, list[Avoid]] = {}
    for avoid in select_entries(load_variable_rules().avoids, checked.situation):
        for name in avoid.variables:
            avoids_by_name.setdefault(name, []).append(avoid)

    readers = _make_readers(checked)
    other_names = variables.other_variables()
    # A name that is handed on under the same name is not used.
    used_names = frozenset(_USE.findall(_HANDING_ON.sub("", checked.text)))

    for variable in checked.content.assignments:
        name = variable.name
        if not variable.value:
            continue  # programs treat an empty variable as one that is not set

        is_used = name in used_names
        reader = readers.get(name[:5])
        # A name that the file itself uses, and that belongs to no project, is the file's own.
        is_of_file = is_used and not reader and name not in other_names

        advised = []
        if variable.is_literal and not is_of_file:
            rules = avoids_by_name.get(name, ())
            advised = [rule for rule in rules if rule.matches(variable.value)]
        for rule in advised:
            what = f"{variable.shown} is advised against"
            yield build_rule_finding(rule, variable.line, what, rule.reason, name)

        # One finding for each name: advice helps more than the news that nobody reads it.
        if reader and not advised:
            yield from reader.check(variable, is_used=is_used)


def _make_readers(checked: CheckedText) -> Mapping[str, _Reader]:
    """Return the readers by how the names of their variables begin, in five characters."""
    nccl = checked.situation.get("nccl", "")
    vllm_names = variables.vllm_variables(checked.vllm, checked.home)
    nccl_names = variables.nccl_variables(nccl)

    rows = (
        ("vLLM", "vLLM envs.py", checked.vllm, vllm_names),
        ("NCCL", "NCCL's sources", nccl, nccl_names),
    )
    return {
        f"{title.upper()}_": _Reader(
            title=title,
            source=source,
            version=version,
            slips=Slips(names),
            checked=checked,
        )
        for title, source, version, names in rows
    }


def _can_have_value(name: str, variable: Assignment, role: str) -> bool:
    """Return whether a variable of this name can have the value of another, as far as known."""
    if not variable.is_literal:
        return True

    life = variables.lifetime(name)
    takes_number = life is not None and life.default.isdecimal()
    if takes_number and read_nccl_number(variable.value) is None:
        return False

    return not any(find_value_problems(name, variable.value, role))


def check_values(checked: CheckedText) -> Findings:
    """Yield values that a variable cannot have."""
    taken_by_name = vllm_values(checked.vllm)

    for variable in checked.content.literals:
        name = variable.name
        for problem in find_value_problems(name, variable.value, checked.role):
            yield build_finding(
                "value",
                variable,
                is_error=problem.stops,
                problem=problem,
            )

        if name.startswith("VLLM_") and name in taken_by_name:
            yield from _check_taken(variable, taken_by_name[name], checked)


def _check_taken(
    variable: Assignment, allowed: AllowedValues, checked: CheckedText
) -> Findings:
    """Yield a value at which vLLM stops when it starts."""
    value = variable.value
    is_open = bool(value) and not variable.is_given
    if is_open or allowed.allows(value):
        return

    kind = "one of these" if allowed.words else "a number"
    hint = f"write {kind}, or leave {variable.name} out"

    number = _NAMES["switch"].get(value.lower())
    if number and not allowed.words:
        hint = f"write {variable.name}={number}"

    # A fork of a release may take more.
    level = Level.WARNING if checked.runs_upstream() is False else None

    yield build_finding(
        "value-refused",
        variable,
        level=level,
        reader=f"vLLM {checked.vllm}".rstrip(),
        takes=allowed.description,
        hint=nearest_hint(value, allowed.words, hint),
    )


def check_placeholders(checked: CheckedText) -> Findings:
    """Yield variables and flags of the launch whose values are still to be filled in."""
    for variable in checked.content.literals:
        name = variable.name
        # A secret that is missing is another finding.
        is_of_launch = _LAUNCH_NAMES.fullmatch(name) and not is_secret(name)
        if is_of_launch and is_placeholder(name, variable.value):
            is_needed = _NEEDED_NAMES.fullmatch(name) is not None
            yield build_finding("placeholder", variable, is_error=is_needed)

    for flag in checked.content.flags:
        if flag.name in _NAMES["address_flags"]:
            address = flag.value.rpartition(":")[0] or flag.value
            if is_placeholder("_IP", address):
                yield build_finding("placeholder", flag, is_error=True)


def check_contradictions(checked: CheckedText) -> Findings:
    """Check each block by itself: two services or commands do not contradict each other."""
    blocks: dict[int, list[Assignment]] = {}

    for variable in checked.content.assignments:
        if variable.is_given:
            blocks.setdefault(variable.block, []).append(variable)

    for block, together in blocks.items():
        # A shell may set a variable anew for what follows.
        may_change = block == 0 and checked.content.kind in (SHELL, DOCKERFILE)
        if not may_change:
            yield from _find_set_twice(together)

        yield from _find_unused_rdma(together)


def _find_set_twice(together: Sequence[Assignment]) -> Findings:
    first_by_name: dict[str, Assignment] = {}

    for variable in together:
        first = first_by_name.setdefault(variable.name, variable)
        if first.value != variable.value and _COMPARED_NAMES.match(variable.name):
            yield build_finding("set-twice", variable, earlier=first)


def _find_unused_rdma(together: Sequence[Assignment]) -> Findings:
    """Yield settings of RDMA where it is off."""
    last_by_name = {variable.name: variable for variable in together}
    switch = last_by_name.get("NCCL_IB_DISABLE")
    if switch is None or switch.value == "0":
        return

    for name, variable in last_by_name.items():
        if _RDMA_NAMES.fullmatch(name):
            yield build_finding("rdma-off", variable, earlier=switch)
