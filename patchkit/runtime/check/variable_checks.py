"""Check names and values of variables, variables that contradict each other, or the host."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain

from patchkit.finding import Findings, Level
from patchkit.frozen import positional
from patchkit.runtime.check.content import (
    DOCKERFILE,
    SHELL,
    Assignment,
    CheckedText,
    build_finding,
    build_rule_finding,
    shorten,
)
from patchkit.runtime.host.host import Host, describe_addresses, twin_state
from patchkit.runtime.rules.presets import flags
from patchkit.runtime.rules.releases import (
    lifetime,
    nccl_variables,
    other_variables,
    read_env_data,
    vllm_variables,
)
from patchkit.runtime.rules.rule import load_variable_rules, select_entries
from patchkit.runtime.rules.secret_texts import is_secret
from patchkit.runtime.rules.spelling import Slips, nearest_hint
from patchkit.runtime.rules.variable_values import (
    AllowedValues,
    find_value_problems,
    form,
    is_placeholder,
    read_nccl_number,
    vllm_values,
)

_NAMES = read_env_data("said")["variables"]
_LAUNCH_NAMES = f"{_NAMES['read']}|{form('address_names').pattern}"
_NEEDED_NAMES = _NAMES["needed"]
_RDMA_NAMES = _NAMES["rdma_only"]
_COMPARED_NAMES = _NAMES["matters"]
(_TWINS,) = read_env_data("values")["twins"]
_USE = r"\$\{?([A-Za-z_]\w*)"
_HANDING_ON = r"""\b([A-Za-z_]\w*)(=|:[ \t]+)["']?\$\{?\1\b"""

# States of a cage's second half in which `patchkit env` also leaves it out.
_LEFT_OUT = ("down", "random", "bare-first")


@positional
class _Reader:
    """A program that reads variables, and their names; its version is "" for any version."""

    title: str
    version: str
    variables: Slips
    source: str


def check_names(checked: CheckedText) -> Findings:
    """Yield variables that rules advise against, and variables that no program reads."""
    avoids = select_entries(load_variable_rules().avoids, checked.situation)
    readers = _make_readers(checked)
    other_names = other_variables()

    # A=$A passes a variable on, and does not count as a use of it.
    used_names = frozenset(re.findall(_USE, re.sub(_HANDING_ON, "", checked.text)))

    for variable in checked.content.assignments:
        name = variable.name
        if not variable.value:
            continue  # programs treat an empty variable as one that is not set

        is_used = name in used_names
        reader = readers.get(name[:5])
        # If the file uses the variable itself and no project has one of that name, rules do not
        # apply: the file may use the name for anything.
        is_of_file = is_used and not reader and name not in other_names
        may_be_judged = variable.is_literal and not is_of_file
        named = [rule for rule in avoids if may_be_judged and name in rule.variables]
        advised = [rule for rule in named if rule.matches(variable.value)]

        for rule in advised:
            what = f"{variable.shown} is advised against"
            yield build_rule_finding(rule, variable.line, what, rule.reason, name)

        # Advice about a variable replaces the finding that no program reads it.
        if reader and not advised:
            yield from _check_reader(variable, reader, checked, is_used=is_used)


def _make_readers(checked: CheckedText) -> Mapping[str, _Reader]:
    """Return prefix → the program that reads variables with that prefix of five characters."""
    nccl = checked.situation.get("nccl", "")
    of_vllm = Slips(vllm_variables(checked.vllm, checked.home))
    of_nccl = Slips(nccl_variables(nccl))

    return {
        "VLLM_": _Reader("vLLM", checked.vllm, of_vllm, "vLLM envs.py"),
        "NCCL_": _Reader("NCCL", nccl, of_nccl, "NCCL's sources"),
    }


def _check_reader(
    variable: Assignment, reader: _Reader, checked: CheckedText, *, is_used: bool
) -> Findings:
    """Yield a finding if the reader does not have a variable, with what to write instead."""
    name = variable.name
    if reader.version and name in reader.variables.names:
        return

    if life := lifetime(name):
        if reader.version or not life.is_current:
            yield build_finding(
                "variable-of-other-release" if reader.version else "variable-gone",
                variable,
                reader=reader,
                life=life,
                hint=_replacement_of(name),
            )
        return

    hint = _hint_at_unknown(variable, reader, checked, is_used=is_used)
    if hint:
        yield build_finding(
            "unknown-variable",
            variable,
            reader=reader,
            name=shorten(name),
            hint=hint,
        )


def _replacement_of(name: str) -> str:
    """Return a hint: what to set instead of a variable that only other releases have."""
    for row in read_env_data("values")["gone"]:
        if name in row["names"]:
            return str(row["instead"])

    return "leave it out"


def _hint_at_unknown(
    variable: Assignment, reader: _Reader, checked: CheckedText, *, is_used: bool
) -> str:
    """Return a hint for an unknown variable, "" if another program may read it."""
    name = variable.name
    meant = reader.variables.find_meant(name)
    if meant and _can_have_value(meant, variable, checked.role):
        return f"did you mean {meant}?"

    owners = read_env_data("owners")["owner"]
    forms = chain.from_iterable(row["names"] for row in owners)
    if is_used or any(fnmatchcase(name, form) for form in forms):
        return ""

    is_upstream = checked.runs_upstream(variable.block)
    flag = f"--{name[5:].lower().replace('_', '-')}"
    if flag in flags(checked.vllm) and (is_upstream or checked.content.commands):
        return f"use the flag {flag}"
    return "leave it out" if is_upstream else ""


def _can_have_value(name: str, variable: Assignment, role: str) -> bool:
    """Return whether the variable ``name`` can have the value of ``variable``.

    Return True if the value is not literal.
    """
    if not variable.is_literal:
        return True

    life = lifetime(name)
    takes_number = life is not None and life.default.isdecimal()
    if takes_number and read_nccl_number(variable.value) is None:
        return False

    return not any(find_value_problems(name, variable.value, role))


def check_values(checked: CheckedText) -> Findings:
    """Yield a finding for each literal value that its variable cannot have."""
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
    """Yield a finding if vLLM does not start with the value of a variable."""
    value = variable.value
    is_open = bool(value) and not variable.is_given
    if is_open or allowed.allows(value):
        return

    kind = "one of these" if allowed.words else "a number"
    hint = f"write {kind}, or leave {variable.name} out"

    number = _NAMES["switch"].get(value.lower())
    if number and not allowed.words:
        hint = f"write {variable.name}={number}"

    # An image of another project may have a fork of vLLM that takes further values.
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
    """Yield variables and flags that a launch reads and whose values are placeholders."""
    for variable in checked.content.literals:
        is_open = is_placeholder(variable.name, variable.value)
        # `check_secrets` finds the placeholders of secrets.
        if not is_open or is_secret(variable.name):
            continue

        if re.fullmatch(_LAUNCH_NAMES, variable.name):
            is_needed = re.fullmatch(_NEEDED_NAMES, variable.name) is not None
            yield build_finding("placeholder", variable, is_error=is_needed)

    for flag in checked.content.flags:
        if flag.name in _NAMES["address_flags"]:
            address = flag.value.rpartition(":")[0] or flag.value
            if is_placeholder("_IP", address):
                yield build_finding("placeholder", flag, is_error=True)


def check_contradictions(checked: CheckedText) -> Findings:
    """Yield variables of one block that contradict each other.

    Variables of different blocks, as two services or commands, do not contradict each other.
    """
    blocks = defaultdict(list)
    for variable in checked.content.assignments:
        if variable.is_given:
            blocks[variable.block].append(variable)

    for block, together in blocks.items():
        # A script or a Dockerfile may change a variable for the commands that follow.
        may_change = block == 0 and checked.content.kind in (SHELL, DOCKERFILE)
        if not may_change:
            yield from _find_set_twice(together)

        last_by_name = {variable.name: variable for variable in together}
        yield from _check_rdma(last_by_name, checked)


def _find_set_twice(together: Sequence[Assignment]) -> Findings:
    first_by_name: dict[str, Assignment] = {}

    for variable in together:
        first = first_by_name.setdefault(variable.name, variable)
        if first.value != variable.value and re.match(_COMPARED_NAMES, variable.name):
            yield build_finding(
                "set-twice", variable, first=first.line, before=first.shown
            )


def _check_rdma(
    last_by_name: Mapping[str, Assignment], checked: CheckedText
) -> Findings:
    """Yield settings of RDMA without effect if RDMA is off, else a finding about half a cage."""
    switch = last_by_name.get("NCCL_IB_DISABLE")
    hca = last_by_name.get("NCCL_IB_HCA")

    if switch and switch.value != "0":
        for name, variable in last_by_name.items():
            if re.fullmatch(_RDMA_NAMES, name):
                yield build_finding(
                    "rdma-off", variable, first=switch.line, before=switch.shown
                )
    elif hca and not hca.value.startswith("^"):
        yield from find_half_cages(hca, checked.host)


def check_host(checked: CheckedText) -> Findings:
    """Yield addresses and devices in a text that its host lacks or that are down.

    If a file sets a variable several times, one value without a problem is enough.
    """
    if checked.host is None:
        return

    problems_by_name = defaultdict(list)
    for variable in checked.content.assignments:
        if variable.is_given and not variable.value.startswith("^"):
            problems = _check_on_host(variable, checked.host)
            problems_by_name[variable.name].append([*problems])

    for problems_by_value in problems_by_name.values():
        if all(problems_by_value):
            yield from chain.from_iterable(problems_by_value)


def _check_on_host(variable: Assignment, host: Host) -> Findings:
    """Yield the address, or the interfaces and RDMA devices in a list, that the host lacks."""
    name = variable.name
    if name in _NAMES["own_address"]:
        yield from _check_own_address(variable, host)
    elif name in (*_NAMES["netdevs"], *_NAMES["devices"]):
        for part in variable.value.lstrip("=").split(","):
            if part != "all":
                yield from _check_device(part, variable, host)


def _check_own_address(variable: Assignment, host: Host) -> Findings:
    addresses = [row.address for netdev in host.netdevs for row in netdev.addresses]
    if variable.value not in addresses and not variable.value.startswith("127."):
        yield build_finding(
            "host-lacks",
            variable,
            what=f"no address {variable.value}",
            has=describe_addresses(host),
        )


def _check_device(part: str, variable: Assignment, host: Host) -> Findings:
    """Yield a finding if the host lacks the devices that a part of a list means, or all are down.

    For some variables the part may be the beginning of names, unless their value begins with "=".
    """
    name, colon, _port = part.partition(":")
    kind = "interface"
    states = {netdev.name: netdev.up for netdev in host.netdevs}
    # A list for UCX may hold both kinds. Only RDMA devices have a port there: mlx5_0:1.
    if colon or variable.name not in _NAMES["netdevs"]:
        kind = "RDMA device"
        states = {rdma.name: rdma.active for rdma in host.rdma}

    meant = [name]
    if variable.name in _NAMES["prefixes"] and not variable.value.startswith("="):
        meant = [device for device in states if device.startswith(name)]
    ups = [states[device] for device in meant if device in states]

    if not ups:
        # NCCL starts without an RDMA device that is missing, but not without a missing interface.
        is_optional = variable.name in _NAMES["devices"]
        other_names = [device for device in states if device != "lo"]
        yield build_finding(
            "host-lacks",
            variable,
            level=Level.WARNING if is_optional else None,
            what=f"no {kind} {name}",
            has=", ".join(other_names) or "none at all",
        )
    elif not any(ups):
        yield build_finding("host-down", variable, what=f"{name} is down")


def find_half_cages(hca: Assignment, host: Host | None) -> Findings:
    """Yield a finding if NCCL_IB_HCA names only one of the two RDMA devices of a QSFP cage.

    The second one is looked up on the host. If the host is unknown or lacks the first one, the
    device names of a DGX Spark decide.
    """
    parts = hca.value.lstrip("=").split(",")
    names = [part.partition(":")[0] for part in parts]
    twins = [_find_twin(name, host) for name in names]
    missing = [twin for twin in twins if twin and twin not in names]

    if missing:
        yield build_finding(
            "half-cage",
            hca,
            twin=",".join(missing),
            complete=",".join((*names, *missing)),
            twins=_TWINS,
        )


def _find_twin(name: str, host: Host | None) -> str:
    """Return the name of the other RDMA device in a device's cage, "" if it is absent or not used.

    The device names of a DGX Spark decide if the host is unknown or lacks the device.
    """
    devices = {device.name: device for device in host.rdma} if host else {}
    if host and name in devices:
        netdev = host.netdev(devices[name].netdev)
        twin = devices.get(devices[name].twin)
        is_left_out = netdev and twin_state(host, netdev) in _LEFT_OUT
        return twin.name if twin and twin.active and not is_left_out else ""

    return str(_TWINS["of"].get(name, ""))
