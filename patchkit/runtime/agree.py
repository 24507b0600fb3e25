"""A worker's environment held against the file of its head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from patchkit.errors import HostError, SourceError, UsageError
from patchkit.runtime.cluster import ClusterEnv, Setting
from patchkit.runtime.envfile import Format, head_facts, parse
from patchkit.runtime.host import plain
from patchkit.runtime.rules import Rules

FACTS = ("topology", "executor", "vllm", "nodes", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFile:
    """``facts`` of its first line (``role``, ``topology`` …) and its variables."""

    where: str
    facts: Mapping[str, str]
    variables: Mapping[str, str]

    @property
    def extra(self) -> dict[str, str]:
        """What a user set on the head, against the rules or beside them."""
        asked = _ids(self.facts.get("set", ""))
        return {name: value for name, value in self.variables.items() if name in asked}

    @property
    def wanted(self) -> frozenset[str]:
        return _ids(self.facts.get("with", ""))

    @property
    def unwanted(self) -> frozenset[str]:
        return _ids(self.facts.get("without", ""))


def _ids(text: str) -> frozenset[str]:
    return frozenset(filter(None, text.split(",")))


def read_head(path: Path) -> HeadFile:
    """Raises UsageError if there is no such file, SourceError if it is not a head's."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", hint="copy it from the head") from None
    except UnicodeDecodeError:
        text = ""
    facts = head_facts(text)
    if facts.get("role") != "head" or any(not facts.get(key) for key in FACTS):
        raise SourceError(
            f"{path}: is not the env file of a head",
            why=f"its first line says role={facts.get('role') or '(nothing)'}",
            hint="write one on the head: patchkit env --role head -o head.env",
        )
    kind = Format(facts["format"]) if facts.get("format") in list(Format) else Format.ENV
    return HeadFile(where=str(path), facts=facts, variables=parse(kind, text, str(path)))


def agree(env: ClusterEnv, head: HeadFile, rules: Rules) -> ClusterEnv:
    """The worker's environment with what its head shares. Raises HostError if they contradict.

    What the head shares and the worker's own rules do not set, such as what a user added, is taken
    over.
    """
    _check_nccl(env, head)
    _check_overwritten(env, head)
    own = {name for rule in rules.rules if rule.scope == "host" for name in rule.set}
    mine = {each.name: each.value for each in env.settings if each.scope == "shared" and each.value}
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
    return replace(env, settings=(*taken, *env.settings))


def _shared(name: str, own: set[str], env: ClusterEnv) -> bool:
    """A name that some rule sets per host is the host's, unless it is shared in this very case."""
    found = next((each for each in env.settings if each.name == name), None)
    return found.scope == "shared" if found else name not in own


def _differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    for name, value in mine.items():
        other = theirs.get(name)
        if other != value:
            yield f"{name} is {value} here and {'not set' if other is None else other} there"


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
