"""A worker's environment held against the file of its head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from patchkit.errors import HostError
from patchkit.runtime.env.cluster import ClusterEnv, Setting
from patchkit.runtime.env.head_file import HeadFile
from patchkit.runtime.host.host import plain
from patchkit.runtime.rules.code_names import runs_code
from patchkit.runtime.rules.secret_names import is_secret
from patchkit.runtime.rules.variable_rules import VariableRules


def agree(
    env: ClusterEnv, head: HeadFile, rules: VariableRules, here: AbstractSet[str] = frozenset()
) -> ClusterEnv:
    """Return the worker's environment with what its head shares.

    What the head shares and the worker's own rules do not set, such as what a user added, is taken
    over; ``carried.check_carried`` has said that it may be. ``here`` are the names that the user
    sets on this node. Raises HostError if both contradict each other.
    """
    _check_nccl(env, head)
    _check_overwritten(env, head)
    own = {name for rule in rules.rules if rule.scope == "host" for name in rule.set}
    shared = (each for each in env.settings if each.scope == "shared")
    mine = {each.name: each.value for each in shared if not is_secret(each.name)}
    theirs = {name: value for name, value in head.variables.items() if _shared(name, own, env)}
    if problems := list(_differences(mine, theirs)):
        raise HostError(
            f"this node and {head.where} contradict each other: {'; '.join(problems)}",
            why="shared variables must be the same on every node",
            hint="use the same vLLM, NCCL and patchkit on both, and the same options",
        )
    taken = [
        Setting(name=name, value=value, scope="shared", reason="as on the head", rule="--from")
        for name, value in theirs.items()
        if name not in mine
    ]
    notes = (*env.notes, *_edited(env, head, taken, here))
    return replace(env, settings=(*taken, *env.settings), notes=notes)


def _shared(name: str, own: set[str], env: ClusterEnv) -> bool:
    """A name that some rule sets per host is the host's, unless it is shared in this very case."""
    found = next((each for each in env.settings if each.name == name), None)
    return found.scope == "shared" if found else name not in own


def _differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    for name, value in mine.items():
        other = theirs.get(name)
        if other != value:
            yield f"{name} is {value} here and {'not set' if other is None else other} there"
    for name, other in theirs.items():
        if name not in mine and runs_code(name):  # a rule's value, where this node has no such rule
            yield f"{name} is not set here and {other} there"


def _edited(
    env: ClusterEnv, head: HeadFile, taken: list[Setting], here: AbstractSet[str]
) -> Iterator[str]:
    """What an edited file brings that this node's rules do not set; its digest tells no more."""
    if not head.edited:
        return
    theirs = [*taken, *(each for each in env.settings if each.rule == "--set")]
    added = [
        f"{each.name}={each.value} (line {head.line(each.name)})"
        for each in theirs
        if each.name not in here
    ]
    yield f"{head.where} was edited after patchkit wrote it, and --accept-edited was given; " + (
        f"not from this node's rules: {', '.join(added)}"
        if added
        else "every shared variable is as this node's rules set it"
    )


def _check_nccl(env: ClusterEnv, head: HeadFile) -> None:
    here, there = (plain(each.get("nccl", "")) for each in (env.situation, head.facts))
    if here and there and here != there:
        raise HostError(
            f"NCCL {here} is loaded here, and {there} on the head",
            why="NCCLs of different versions do not understand each other's bootstrap: "
            '"Message truncated", "connection refused", or a hang',
            hint="install one NCCL on every node: `patchkit build nccl`",
        )


def _check_overwritten(env: ClusterEnv, head: HeadFile) -> None:
    """A worker's own values that the head's would replace must be the same."""
    if env.executor.copies != "overwrites":
        return
    lost = [
        f"{each.name} is {each.value} here and {head.variables[each.name]} there"
        for each in env.settings
        if each.scope == "host" and each.name.startswith(env.executor.prefixes)
        if each.name != "VLLM_HOST_IP" and head.variables.get(each.name, each.value) != each.value
    ]
    if lost:
        raise HostError(
            f"this node's own values would be lost: {'; '.join(lost)}",
            why=env.executor.reason,
            hint="cable the same port on every node, or take --executor mp on the head",
        )
