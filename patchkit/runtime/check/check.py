"""Check what a file says: names, values and what contradicts what; edits, advice, this host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from patchkit.finding import Finding, Level
from patchkit.runtime.check import servers
from patchkit.runtime.check.content import (
    DOCKERFILE,
    ENV,
    SHELL,
    Assignment,
    CheckedText,
    build_finding,
    is_literal,
    rule_finding,
    shorten,
)
from patchkit.runtime.check.formats import is_env_file
from patchkit.runtime.envfile.header import (
    MARK,
    fact_problems,
    head_facts,
    is_untouched,
)
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.networks import twin_state
from patchkit.runtime.rules import variables
from patchkit.runtime.rules.flags import flags
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.secret_texts import is_secret, runs_code
from patchkit.runtime.rules.spelling import Slips, nearest_hint
from patchkit.runtime.rules.variable_rules import Avoid, load_variable_rules
from patchkit.runtime.rules.variable_values import (
    ADDRESS_NAMES,
    find_value_problems,
    is_placeholder,
    read_number,
    vllm_values,
)

_READERS = {"NCCL_": "NCCL", "VLLM_": "vLLM"}  # both have five characters
_SOURCES = {"NCCL": "NCCL's sources", "vLLM": "vLLM envs.py"}
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_HANDED_ON = re.compile(r"""\b([A-Za-z_]\w*)(=|:[ \t]+)["']?\$\{?\1\b""")
_NAMES = read_env_data("said")["variables"]
_READ, _NEEDED, _RDMA_ONLY, _MATTERS = (
    re.compile(_NAMES[name]) for name in ("read", "needed", "rdma_only", "matters")
)
_DEVICES, _NETDEVS = _NAMES["devices"], _NAMES["netdevs"]
_LONGEST = 200  # lines of a command, from a finding up to the comment above it
_IGNORE = re.compile(r"(?:#|;|//)\s*patchkit:\s*ignore\b[:\s\[(]*(?P<ids>[a-z0-9, -]*)")


def find_problems(checked: CheckedText) -> tuple[Finding, ...]:
    """Return what is wrong, in the order of the lines, without what a comment silences."""
    checks = (
        *(_check_header, check_names, check_values, check_host, check_placeholders),
        *(servers.check_secrets, servers.check_defaults, check_contradictions),
        *(
            servers.check_servers,
            _check_line_syntax,
            servers.check_server_flags,
            _check_advice,
        ),
    )
    findings = [*checked.content.problems]
    for check in checks:
        findings += check(checked)
    lines = ["", *checked.text.split("\n"), ""] if "patchkit:" in checked.text else []
    kept = {}
    for finding in findings:
        # A continued line has no room for a comment: that above the command counts.
        above = max(finding.line - 1, 0)
        while (
            lines
            and above > finding.line - _LONGEST
            and lines[above].rstrip().endswith("\\")
        ):
            above -= 1
        marks = map(
            _IGNORE.search, (lines[above], lines[finding.line]) if lines else ()
        )
        silenced = [mark["ids"].replace(",", " ").split() for mark in marks if mark]
        if not any(not ids or finding.id in ids for ids in silenced):
            kept[finding] = finding.line  # two checks may come to the same finding
    return tuple(sorted(kept, key=lambda finding: finding.line))


def _check_header(checked: CheckedText) -> Iterator[Finding]:
    """Yield what is wrong in a file with patchkit's first line; nothing of a file of others."""
    text = checked.text
    if not text.startswith(f"# {MARK}"):
        return
    facts = head_facts(text)
    if not is_untouched(text):
        yield build_finding("edited", 1)
    for name, problem in fact_problems(facts).items():
        shown = f"{name}={facts[name][:60]}"
        yield build_finding("header-fact", 1, shown=shown, name=name, problem=problem)
    for assignment in checked.content.assignments:
        if reason := runs_code(assignment.name):
            rules = [
                rule.set
                for rule in load_variable_rules().rules
                if assignment.name in rule.set
            ]
            # A rule's own value may stand there, with a path of ptxas in the place of its fact.
            forms = (
                re.escape(by_name[assignment.name]).replace(
                    r"\{ptxas\}", "/[^\n]*/ptxas"
                )
                for by_name in rules
            )
            if not any(re.fullmatch(form, assignment.value) for form in forms):
                yield build_finding("runs-code", assignment, reason=reason)


def _check_line_syntax(checked: CheckedText) -> Iterator[Finding]:
    """Yield what sh, systemd and docker read differently, each kind of difference once."""
    text = checked.text
    # YAML, Dockerfiles and units end a line with either, and CR is part of nothing.
    if "\r\n" in text and checked.content.kind in (ENV, SHELL):
        yield build_finding("crlf", 1)
    # A file of patchkit's own says what reads it.
    if (
        "format" in head_facts(text)
        or checked.content.kind != ENV
        or not is_env_file(text)
    ):
        return
    lines = text.replace("\r\n", "\n").split("\n")
    rows = read_env_data("findings").items()
    differences = {key: re.compile(row["form"]) for key, row in rows if "form" in row}
    for key, form in differences.items():
        matches = [(number, form.match(line)) for number, line in enumerate(lines, 1)]
        found = [(number, match["name"]) for number, match in matches if match]
        if found:
            number, name = found[0]
            more = f" and {len(found) - 1} more" if found[1:] else ""
            yield build_finding(key, Assignment(number, name, ""), names=name + more)


def _check_advice(checked: CheckedText) -> Iterator[Finding]:
    """Yield what the rules know of these versions in a cluster, which no rule mends."""
    values = {found.name: found.value for found in checked.content.assignments}
    situation = checked.situation
    if not situation.get("role") and not values.keys().isdisjoint(
        _NAMES["between_nodes"]
    ):
        situation = {**situation, "role": "head"}
    for advice in holding(load_variable_rules().advice, situation):
        if not advice.solved(values):
            stated = (
                found.line for found in checked.versions if found.project in advice.when
            )
            facts = " and ".join(f"{name} {situation[name]}" for name in advice.when)
            yield rule_finding(
                advice, next(stated, 1), advice.says, f"Known of {facts}."
            )


def check_names(checked: CheckedText) -> Iterator[Finding]:
    """Yield what is wrong with names, and what the rules say against their values."""
    situation = checked.situation
    avoids: dict[str, list[Avoid]] = {}
    for avoid, name in (
        (row, name) for row in load_variable_rules().avoids for name in row.variables
    ):
        avoids.setdefault(name, []).append(avoid)
    known = {
        "vLLM": variables.vllm_variables(situation.get("vllm", ""), checked.home),
        "NCCL": variables.nccl_variables(situation.get("nccl", "")),
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
        own = name in used and not reader and name not in variables.other_variables()
        rules = () if own or not is_literal(assignment.value) else avoids.get(name, ())
        advised = [rule for rule in holding(rules, situation) if rule.matches(value)]
        for rule in advised:
            what = f"{assignment.shown} is advised against"
            yield rule_finding(rule, assignment.line, what, rule.reason, name)
        # One finding for each name: advice says more than that nobody reads it.
        is_read = situation.get(reader.lower()) and name in known.get(reader, ())
        if reader and not advised and not is_read:
            yield from _find_unread(assignment, checked, slips[reader], name in used)


def _find_unread(
    assignment: Assignment, checked: CheckedText, slips: Slips, is_used: bool
) -> Iterator[Finding]:
    """Yield that nobody reads a name, if it is clear what was meant, or upstream's vLLM gets it."""
    name, value, situation = assignment.name, assignment.value, checked.situation
    reader = _READERS[name[:5]]
    version = situation.get(reader.lower(), "")
    words = {"reader": reader, "version": version, "source": _SOURCES[reader]}
    if life := variables.lifetime(name):
        if version or not life.is_current:
            key = "variable-of-other-release" if version else "variable-gone"
            rows = read_env_data("values")["gone"]
            gone = (row["instead"] for row in rows if name in row["names"])
            words |= {
                "hint": next(gone, "leave it out"),
                "first": life.first,
                "last": life.last,
            }
            yield build_finding(key, assignment, None, **words)
        return
    upstream = checked.runs_upstream(assignment.block)
    flag, close = f"--{name[5:].lower().replace('_', '-')}", slips(name)
    other = variables.lifetime(close)
    is_word = (
        other is not None and other.default.isdecimal() and read_number(value) is None
    )
    problems = find_value_problems(close, value, situation.get("role", ""))
    owned = (form for row in read_env_data("owners")["owner"] for form in row["names"])
    # The value has to fit the name that was meant, as far as it is known.
    if close and not (is_literal(assignment.value) and (is_word or any(problems))):
        hint = f"did you mean {close}?"
    elif is_used or any(fnmatchcase(name, form) for form in owned):
        return  # known to be read or set by others
    elif flag in flags(situation.get("vllm", "")) and (
        upstream or checked.content.commands
    ):
        hint = f"use the flag {flag}"
    elif upstream:
        hint = "leave it out"
    else:
        return
    words |= {"name": shorten(name), "hint": hint}
    yield build_finding("unknown-variable", assignment, None, **words)


def check_values(checked: CheckedText) -> Iterator[Finding]:
    """Yield values that a variable cannot have."""
    content, situation = checked.content, checked.situation
    vllm = situation.get("vllm", "")
    takes_by_name = vllm_values(vllm)
    # A fork of a release may take more.
    level = Level.WARNING if checked.runs_upstream() is False else None
    for assignment in filter(lambda row: is_literal(row.value), content.assignments):
        name, value = assignment.name, assignment.value
        for problem in find_value_problems(name, value, situation.get("role", "")):
            grave = Level.ERROR if problem.stops else None
            words = {"why": problem.why, "hint": problem.hint, "source": problem.source}
            yield build_finding(
                "value", assignment, grave, problem=problem.what, **words
            )
        takes = takes_by_name.get(name) if name.startswith("VLLM_") else None
        if takes and not takes.has(value) and (assignment.is_given or not value):
            hint = f"write {'one of these' if takes.words else 'a number'}, or leave {name} out"
            if not takes.words and value.lower() in _NAMES["switch"]:
                hint = f"write {name}={_NAMES['switch'][value.lower()]}"
            hint = nearest_hint(value, takes.words, hint)
            words = {
                "reader": f"vLLM {vllm}".rstrip(),
                "takes": takes.in_words,
                "hint": hint,
            }
            yield build_finding("value-refused", assignment, level, **words)


def check_placeholders(checked: CheckedText) -> Iterator[Finding]:
    """Yield variables and flags of the launch whose values are still to be filled in."""
    for assignment in checked.content.assignments:
        name = assignment.name
        read = _READ.fullmatch(name) or ADDRESS_NAMES.fullmatch(name)
        # A secret that is not there yet is told of by itself.
        is_open = is_literal(assignment.value) and is_placeholder(
            name, assignment.value
        )
        if read and is_open and not is_secret(name):
            level = Level.ERROR if _NEEDED.fullmatch(name) else None
            yield build_finding("placeholder", assignment, level)
    for flag in (
        flag for command in checked.content.commands for flag in command.flags
    ):
        address = flag.value.rpartition(":")[0] or flag.value
        if flag.name in _NAMES["address_flags"] and is_placeholder("_IP", address):
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
                yield build_finding(
                    "set-twice", assignment, first=before.line, before=before.shown
                )
        switch, hca = last.get("NCCL_IB_DISABLE"), last.get("NCCL_IB_HCA")
        if switch and switch.value != "0":
            for name in filter(_RDMA_ONLY.fullmatch, last):
                words = {"first": switch.line, "before": switch.shown}
                yield build_finding("rdma-off", last[name], None, **words)
        elif hca and not hca.value.startswith("^"):
            yield from find_half_cages(hca, checked.host)


def check_host(checked: CheckedText) -> Iterator[Finding]:
    """Yield what this host lacks or has down; of several values of a name one has to be its own."""
    host = checked.host
    if host is None:
        return
    own = [address.address for netdev in host.netdevs for address in netdev.addresses]
    by_name: dict[str, list[list[Finding]]] = {}
    given = (row for row in checked.content.assignments if row.is_given)
    for assignment in (row for row in given if not row.value.startswith("^")):
        name, value = assignment.name, assignment.value
        found: list[Finding] = []
        by_name.setdefault(name, []).append(found)
        if (
            name in _NAMES["own_address"]
            and value not in own
            and not value.startswith("127.")
        ):
            has = ", ".join(
                address for address in own if not address.startswith(("127.", "::1"))
            )
            words = {"what": f"no address {value}", "has": has or "none at all"}
            found.append(build_finding("host-lacks", assignment, None, **words))
        by_prefix = name in _NAMES["prefixes"] and not value.startswith("=")
        names = value.lstrip("=").split(",") if name in (*_NETDEVS, *_DEVICES) else []
        for plain, colon, _port in (
            part.partition(":") for part in names if part != "all"
        ):
            # UCX names an RDMA device with its port (mlx5_0:1), and an interface as it is.
            is_device = name not in _NETDEVS or bool(colon)
            netdevs = {netdev.name: netdev.up for netdev in host.netdevs}
            known = {it.name: it.active for it in host.rdma} if is_device else netdevs
            fits = [
                it
                for it in known
                if it == plain or (by_prefix and it.startswith(plain))
            ]
            if not fits:
                has = (
                    ", ".join(device for device in known if device != "lo")
                    or "none at all"
                )
                words = {
                    "what": f"no {'RDMA device' if is_device else 'interface'} {plain}"
                }
                # NCCL passes over a device that is not there; without an interface nothing starts.
                level = Level.WARNING if name in _DEVICES else None
                found.append(
                    build_finding("host-lacks", assignment, level, **words, has=has)
                )
            elif not any(known[device] for device in fits):
                found.append(
                    build_finding("host-down", assignment, what=f"{plain} is down")
                )
    for found_by_value in by_name.values():
        if all(found_by_value):
            yield from (finding for found in found_by_value for finding in found)


def find_half_cages(assignment: Assignment, host: Host | None) -> Iterator[Finding]:
    """Yield that NCCL_IB_HCA names one half of a cage: by this host, else by a Spark's names."""
    names = [part.partition(":")[0] for part in assignment.value.lstrip("=").split(",")]
    (row,) = read_env_data("values")["twins"]
    one, other = map(str, row["half"])
    missing = []
    for name in names:
        twin = ""
        device = (
            next((found for found in host.rdma if found.name == name), None)
            if host
            else None
        )
        if device and host:
            netdev = host.netdev(device.netdev)
            half = next(
                (found for found in host.rdma if found.name == device.twin), None
            )
            # `patchkit env` leaves these out as well.
            left_out = netdev and twin_state(host, netdev) in (
                "down",
                "random",
                "bare-first",
            )
            twin = half.name if half and half.active and not left_out else ""
        elif re.fullmatch(row["pattern"], name):
            twin = (
                other + name[len(one) :]
                if name.startswith(one)
                else one + name[len(other) :]
            )
        if twin and twin not in names:
            missing.append(twin)
    if missing:
        words = {"twin": ",".join(missing), "complete": ",".join((*names, *missing))}
        words |= {"why": row["why"], "source": row["source"]}
        yield build_finding("half-cage", assignment, None, **words)
