"""Decide what a head's file may bring to another machine: known names, values that fit them.

A head's file is a text that somebody copied. So nothing of it is taken over because it is there:
what a rule sets is known; what a user added on the head travels where vLLM, NCCL or another known
program reads it, where it runs no code, names no path and holds a value that the variable can have.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_network

from patchkit.errors import SourceError
from patchkit.runtime.node.env_file import EnvFile
from patchkit.runtime.rules.presets import find
from patchkit.runtime.rules.sensitive_names import is_secret, runs_code
from patchkit.runtime.rules.variable_rules import VariableRules
from patchkit.runtime.rules.variable_values import find_value_problems, is_placeholder

_MOST = 100  # refused variables that are listed
_SHOWN = 60  # characters of a name or a value


def check_transfer(
    head: EnvFile, rules: VariableRules, known: Collection[str], here: Collection[str] = ()
) -> None:
    """Raise SourceError that names every variable of the file which must not be taken over.

    ``known`` are the names that the software of this node reads; ``here`` those that the user sets
    on this node, for which the file does not count.
    """
    # What rules and the model's preset set is the same on every node.
    shared = [rule.set for rule in rules.rules if rule.scope == "shared"]
    if preset := find(head.facts.get("model", "")):
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
        raise SourceError(
            "variables that are not taken over from another machine\n"
            + "\n".join([*refused[:_MOST], *([f"  and {more} more"] if more > 0 else [])]),
            why="whoever can change the file would otherwise decide what runs here",
            hint="take them out of the head's file, or write it anew there; what is meant for this "
            "node as well goes into its own file: patchkit env --set NAME=VALUE",
        )


def _transfer_trouble(
    head: EnvFile, known: Collection[str], asked: Collection[str], name: str, value: str
) -> str:
    """Return why a variable must not travel; empty if it may."""
    # Only one reason is reported, so the gravest comes first.
    if reason := runs_code(name):
        return f"runs code: {reason}"
    if is_secret(name):
        return "is a secret, which belongs into no file that is copied"
    if name not in known:
        return "is read by neither vLLM, NCCL nor another program that patchkit knows"
    # An unedited file holds nothing else; what an edited one adds the user has accepted.
    if name not in asked and not head.edited:
        return "is set by no rule of this patchkit, nor was it added with --set"
    return _value_trouble(name, value)


def _value_trouble(name: str, value: str) -> str:
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
