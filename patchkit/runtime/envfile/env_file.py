"""Read an env file of patchkit for another verb or node: checked, unedited unless accepted.

A head's file is a text that somebody copied. So nothing of it is taken over because it is there:
what a rule sets is known; what a user added on the head travels where vLLM, NCCL or another known
program reads it, where it runs no code, names no path and holds a value that the variable can have.
The lock of a wheelhouse says what a node will have installed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.runtime.envfile.header import fact_problems, head_facts, is_untouched
from patchkit.runtime.envfile.syntax import Format, parse
from patchkit.runtime.rules.presets import find_preset
from patchkit.runtime.rules.refusals import refusal
from patchkit.runtime.rules.secret_texts import find_code_risk, is_secret
from patchkit.runtime.rules.variable_rules import load_variable_rules
from patchkit.runtime.rules.variable_values import find_value_problems, is_placeholder

# What the first line of every such file says; those of several nodes have `head` as well.
_FACTS = ("role", "topology", "executor", "vllm", "nodes")
_SETS = re.compile(r"(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)=")
_MOST = 100  # refused variables that are listed
_SHOWN = 60  # characters of a name or a value
_LOCK = "requirements.txt"
# A line of a lock: nvidia-nccl-cu13==2.30.7+gb10.0a1b2c ; platform_machine == "aarch64" --hash=…
_LINE = re.compile(r"(?P<project>[\w.-]+)==(?P<public>[\w.!]+)(?:\+[\w.]+)?(?=[\s;]|$)")
_ASKED = {"vllm": "vllm", "triton": "triton", "nccl": r"nvidia-nccl-cu\d+"}

_FROM_HEAD = "`patchkit env --role head -o head.env` on the head, and copy that file"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFile:
    """An env file: facts, variables and their lines; ``edited``: against its digest, accepted.

    ``extra`` are the variables that a user set there, against the rules or beside them.
    """

    where: str
    role: str
    facts: Mapping[str, str]
    variables: Mapping[str, str]
    lines: Mapping[str, int]
    edited: bool
    extra: Mapping[str, str]


def read_env_file(
    path: Path, *, accept_edited: bool = False, hint: str = ""
) -> EnvFile:
    """Return an env file of patchkit. Raises UsageError, SourceError, HashMismatchError.

    ``hint`` says how one gets the file that is not there, by default by writing it.
    """
    text = read_text(path, hint=hint or quoted("patchkit", "env", "-o", path))
    return env_file(text, str(path), accept_edited=accept_edited)


def env_file(text: str, where: str, *, accept_edited: bool = False) -> EnvFile:
    """Return what a text in an env file says; raises as ``read_env_file`` does."""
    facts = head_facts(text)
    needed = _FACTS if facts.get("role") == "single" else (*_FACTS, "head")
    if missing := [name for name in needed if not facts.get(name)]:
        raise refusal("no-env-file", file=where, missing=", ".join(missing))
    edited = not is_untouched(text)
    if edited and not accept_edited:
        raise refusal(
            "edited", file=where, command=quoted("patchkit", "check", Path(where))
        )
    if problems := fact_problems(facts).items():
        shown = "; ".join(
            f"{name}={facts[name][:60]}: {name} {what}" for name, what in problems
        )
        raise refusal("wrong-facts", file=where, facts=shown)
    lines = enumerate(text.split("\n"), 1)
    variables = parse(Format(facts.get("format", Format.ENV)), text, where)
    asked = facts.get("set", "").split(",")
    return EnvFile(
        where=where,
        role=facts["role"],
        facts=facts,
        variables=variables,
        lines={match["name"]: at for at, line in lines if (match := _SETS.match(line))},
        edited=edited,
        extra={name: value for name, value in variables.items() if name in asked},
    )


def read_head(path: Path, role: str, *, accept_edited: bool = False) -> EnvFile:
    """Return a head's env file for a worker. Raises UsageError, SourceError, HashMismatchError."""
    if role != "worker":
        raise refusal("from-without-worker")
    file = read_env_file(path, accept_edited=accept_edited, hint=_FROM_HEAD)
    if file.role != "head":
        raise refusal("no-head-file", file=path, role=file.role)
    return file


def check_transfer(
    head: EnvFile, known: Collection[str], here: Collection[str] = ()
) -> None:
    """Raise SourceError for variables that must not travel; ``here`` are those of this node."""
    rules = load_variable_rules()
    # What rules and the model's preset set is the same on every node.
    shared = [rule.set for rule in rules.rules if rule.scope == "shared"]
    if preset := find_preset(head.facts.get("model", "")):
        shared.append(preset.variables)
    by_rule = {pair for variables in shared for pair in variables.items()}
    asked = head.extra.keys()
    refused = [
        f"  {head.where}:{head.lines.get(name, 1)}: {name[:_SHOWN]} {trouble}"
        for name, value in head.variables.items()
        if name not in here and (name, value) not in by_rule
        if name in asked or name not in rules.of_host  # what a node owns is not taken
        if (trouble := _transfer_trouble(head, known, asked, name, value))
    ]
    if refused:
        more = len(refused) - _MOST
        lines = [*refused[:_MOST], *([f"  and {more} more"] if more > 0 else [])]
        raise refusal("not-taken-over", lines="\n".join(lines))


def _transfer_trouble(
    head: EnvFile, known: Collection[str], asked: Collection[str], name: str, value: str
) -> str:
    """Return why a variable must not travel; empty if it may."""
    # Only one reason is reported, so the gravest comes first.
    if reason := find_code_risk(name):
        return f"runs code: {reason}"
    if is_secret(name):
        return "is a secret, which belongs into no file that is copied"
    if name not in known:
        return "is read by neither vLLM, NCCL nor another program that patchkit knows"
    # An unedited file holds nothing else; what an edited one adds the user has accepted.
    if name not in asked and not head.edited:
        return "is set by no rule of this patchkit, nor was it added with --set"
    if not value.isprintable() or is_placeholder(name, value):
        return "has a value that is none"
    try:
        ip_network(value, strict=False)
    except ValueError:
        if "/" in value:
            return f"is {value[:_SHOWN]}: a path, and nobody here knows what lies there"
    # As a worker: there a loopback address is wrong, which a node alone may have.
    problems = find_value_problems(name, value, role="worker")
    return "; ".join(f"is {value[:_SHOWN]}: {problem.what}" for problem in problems)


def locked_versions(place: Path) -> Mapping[str, str]:
    """Return public versions of vllm, triton, nccl that a lock names. Raises UsageError."""
    path = place / _LOCK if place.is_dir() else place
    lines = read_text(
        path, hint="name a wheelhouse, or its requirements.txt"
    ).splitlines()
    matches = [match for line in lines if (match := _LINE.match(line))]
    found = {}
    for name, pattern in _ASKED.items():
        versions = {
            each["public"] for each in matches if re.fullmatch(pattern, each["project"])
        }
        if len(versions) > 1:
            several = " and ".join(sorted(versions))
            raise refusal("locks-several", file=path, project=name, versions=several)
        if versions:
            found[name] = versions.pop()
    if not found:
        raise refusal("locks-nothing", file=path, projects=", ".join(_ASKED))
    return found
