"""Compare a worker's environment with the env file of its head."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from patchkit.errors import HostError, SourceError, UsageError
from patchkit.runtime.node.cluster_env import ClusterEnv, Setting
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
    scopes = {setting.name: setting.scope for setting in env.settings}
    mine = {
        setting.name: setting.value
        for setting in env.settings
        if setting.scope == "shared" and not is_secret(setting.name)
    }
    # A name that some rule sets per host is the host's, unless it is shared in this very case.
    theirs = {
        name: value
        for name, value in head.variables.items()
        if scopes.get(name, "host" if name in of_host else "shared") == "shared"
    }
    # Of names that this node does not set, one that runs code is a rule's that it does not have.
    compared = [*mine, *(name for name in theirs if name not in mine and runs_code(name))]
    problems = [
        f"{name} is {mine.get(name, 'not set')} here and {theirs.get(name, 'not set')} there"
        for name in compared
        if mine.get(name) != theirs.get(name)
    ]
    if problems:
        raise HostError(
            f"this node and {head.where} contradict each other: {'; '.join(problems)}",
            why="shared variables must be the same on every node",
            hint="use the same vLLM, NCCL and patchkit on both, and the same options",
        )
    taken = [
        Setting(name=name, value=value, reason="as on the head", rule="--from")
        for name, value in theirs.items()
        if name not in mine
    ]
    notes = [*env.notes]
    if head.edited:
        added = [*taken, *(setting for setting in env.settings if setting.rule == "--set")]
        names = ", ".join(
            f"{setting.name}={setting.value} (line {head.lines.get(setting.name, 1)})"
            for setting in added
            if setting.name not in here
        )
        # A digest cannot say what was edited.
        what = "every shared variable is as this node's rules set it"
        what = f"not from this node's rules: {names}" if names else what
        edited = f"{head.where} was edited after patchkit wrote it, and --accept-edited was given"
        notes.append(f"{edited}; {what}")
    notes += _uneven_twins(env, head)
    return replace(env, settings=(*taken, *env.settings), notes=tuple(notes))


def _uneven_twins(env: ClusterEnv, head: EnvFile) -> Iterator[str]:
    """Say that the other half of the cage has an address on one of the two nodes alone."""
    here, there = env.node.attachment.twin, head.facts.get("twin", "")
    lists = [row.value for row in env.settings if row.name == _HCAS]
    both = all("," in names for names in (*lists, head.variables.get(_HCAS, "")))
    if here and there and both and (here in _BARE) is not (there in _BARE):
        has, lacks = ("the head", "this node") if here in _BARE else ("this node", "the head")
        yield (
            f"the other half of the cable has an IPv4 address on {has} and none on {lacks}: "
            "`ibv_modify_qp` fails so; give it one on both nodes, or on none"
        )


def _check_overwritten(env: ClusterEnv, head: EnvFile) -> None:
    """Raise HostError where the head's values would replace other ones that the worker owns."""
    executor = env.node.executor
    if executor.copies != "overwrites":
        return
    lost = [
        f"{row.name} is {row.value} here and {head.variables[row.name]} there"
        for row in env.settings
        if row.scope == "host" and row.name.startswith(executor.prefixes)
        # The one variable with such a prefix that Ray's executor does not copy.
        if row.name != "VLLM_HOST_IP" and head.variables.get(row.name, row.value) != row.value
    ]
    if lost:
        raise HostError(
            f"this node's own values would be lost: {'; '.join(lost)}",
            why=executor.reason,
            hint="cable the same port on every node, or take --executor mp on the head",
        )
