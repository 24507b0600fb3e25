"""Compare a worker's environment with the env file of its head."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from patchkit.errors import HostError, SourceError, UsageError
from patchkit.runtime.env.cluster_env import ClusterEnv, Setting
from patchkit.runtime.node.env_file import EnvFile, read_env_file
from patchkit.runtime.rules.sensitive_names import is_secret, runs_code

_HCAS = "NCCL_IB_HCA"
_BARE = ("bare", "bare-first")  # states of a twin that has no IPv4 address


def read_head(path: Path, role: str, *, accept_edited: bool = False) -> EnvFile:
    """Return the env file of a head for a worker.

    Raises UsageError for another role, SourceError for another file, and what ``read_env_file``
    raises.
    """
    if role != "worker":
        raise UsageError("--from is for a worker", hint="take --role worker, or leave --from out")
    file = read_env_file(path, accept_edited=accept_edited)
    if file.role != "head":
        raise SourceError(
            f"{path}: is not the env file of a head",
            why=f"its first line says role={file.role}",
            hint="write one on the head: patchkit env --role head -o head.env",
        )
    return file


def agree(
    env: ClusterEnv, head: EnvFile, of_host: Collection[str], here: Collection[str] = ()
) -> ClusterEnv:
    """Return the worker's environment with what its head shares.

    What the head shares and the worker's own rules do not set, such as what a user added, is taken
    over; ``transfer.check_transfer`` has said that it may be. ``of_host`` are the names that rules
    set for each node by itself, ``here`` those that the user sets on this node. Raises HostError if
    the two contradict each other.
    """
    _check_overwritten(env, head)
    scopes = {each.name: each.scope for each in env.settings}
    mine = {
        each.name: each.value
        for each in env.settings
        if each.scope == "shared" and not is_secret(each.name)
    }
    # A name that some rule sets per host is the host's, unless it is shared in this very case.
    theirs = {
        name: value
        for name, value in head.variables.items()
        if scopes.get(name, "host" if name in of_host else "shared") == "shared"
    }
    if problems := list(_contradictions(mine, theirs)):
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
    added = [*taken, *(each for each in env.settings if each.rule == "--set")]
    # None for a file that nobody edited: a list times False is empty.
    notes = [_edited_note(head, [each for each in added if each.name not in here])] * head.edited
    notes += _uneven_twins(env, head)
    return replace(env, settings=(*taken, *env.settings), notes=(*env.notes, *notes))


def _contradictions(mine: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    for name, value in mine.items():
        other = theirs.get(name)
        if other != value:
            yield f"{name} is {value} here and {'not set' if other is None else other} there"
    for name, other in theirs.items():
        if name not in mine and runs_code(name):  # a rule's value, where this node has no such rule
            yield f"{name} is not set here and {other} there"


def _uneven_twins(env: ClusterEnv, head: EnvFile) -> Iterator[str]:
    """Say that the other half of the cage has an address on one of the two nodes alone."""
    here, there = env.node.attachment.twin, head.facts.get("twin", "")
    lists = [each.value for each in env.settings if each.name == _HCAS]
    both = all("," in names for names in (*lists, head.variables.get(_HCAS, "")))
    if here and there and both and (here in _BARE) is not (there in _BARE):
        has, lacks = ("the head", "this node") if here in _BARE else ("this node", "the head")
        yield (
            f"the other half of the cable has an IPv4 address on {has} and none on {lacks}: "
            "`ibv_modify_qp` fails so; give it one on both nodes, or on none"
        )


def _edited_note(head: EnvFile, added: list[Setting]) -> str:
    """Say what an edited file brings that this node's rules do not set; its digest cannot."""
    names = ", ".join(
        f"{each.name}={each.value} (line {head.lines.get(each.name, 1)})" for each in added
    )
    return f"{head.where} was edited after patchkit wrote it, and --accept-edited was given; " + (
        f"not from this node's rules: {names}"
        if names
        else "every shared variable is as this node's rules set it"
    )


def _check_overwritten(env: ClusterEnv, head: EnvFile) -> None:
    """Raise HostError where the head's values would replace other ones that the worker owns."""
    executor = env.node.executor
    if executor.copies != "overwrites":
        return
    lost = [
        f"{each.name} is {each.value} here and {head.variables[each.name]} there"
        for each in env.settings
        if each.scope == "host" and each.name.startswith(executor.prefixes)
        # The one variable with such a prefix that Ray's executor does not copy.
        if each.name != "VLLM_HOST_IP" and head.variables.get(each.name, each.value) != each.value
    ]
    if lost:
        raise HostError(
            f"this node's own values would be lost: {'; '.join(lost)}",
            why=executor.reason,
            hint="cable the same port on every node, or take --executor mp on the head",
        )
