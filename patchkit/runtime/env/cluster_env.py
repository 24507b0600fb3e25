"""Decide the environment variables of a node: rules, a model's preset and what the user adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from patchkit.errors import DriftError, HostError, UsageError
from patchkit.finding import Finding, Level
from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.host.advice import cage_name, remarks
from patchkit.runtime.host.host import Host
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.presets import Preset
from patchkit.runtime.rules.releases import release, within
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.spelling import nearest
from patchkit.runtime.rules.variable_rules import VariableRule, VariableRules
from patchkit.runtime.rules.variables import nccl_variables, newest_nccl
from patchkit.runtime.rules.vllm_values import Takes

_GATE = "HF_TOKEN"  # a secret: its value is in no file


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variable; ``rule`` is what set it, ``scope`` ``shared`` or ``host``."""

    name: str
    value: str
    scope: str
    reason: str
    rule: str
    source: str = ""

    @property
    def comment(self) -> str:
        nodes = "all nodes" if self.scope == "shared" else "this node"
        source = f"; {self.source}" if self.source else ""
        return f"[{nodes}] {self.reason} ({self.rule}{source})"


@dataclass(frozen=True, slots=True)
class Beware:
    """A problem that no variable solves, and what does."""

    says: str
    instead: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEnv:
    """The environment of a node: ``settings`` with the shared ones first.

    ``off`` are the rules that ``--with`` turns on.
    """

    node: Node
    settings: tuple[Setting, ...]
    advice: tuple[Beware, ...]
    off: tuple[VariableRule, ...]
    notes: tuple[str, ...]


def cluster_env(
    node: Node,
    host: Host,
    rules: VariableRules,
    known: Mapping[str, str],
    values: Mapping[str, Takes],
    *,
    nccl: str = "",
    ptxas: str = "",
) -> ClusterEnv:
    """Return the environment of a node.

    ``known`` are the variables that this vLLM reads (``variables.vllm_variables``), ``values`` what
    they take (``vllm_values.vllm_values``), ``nccl`` the release whose variables may be set, by
    default any. Raises UsageError for a rule or a variable of the user's that does not exist, or a
    value that it does not take, HostError for a fact that this host lacks, DriftError if a rule
    sets what this vLLM does not read or take.
    """
    node.choice.check(rules.rules, "`patchkit env explain` lists them")
    on, off = node.choice.divide(holding(rules.rules, node.situation))
    replaced = {rule.replaces for rule in on}
    settings = list(_choose_settings([rule for rule in on if rule.id not in replaced], node, ptxas))
    _check_twice(settings)
    for setting in settings:
        _check_read(setting, node.vllm, nccl, known)
        _check_taken(setting, node.vllm, values.get(setting.name))
    # A stable sort: the rules keep their order, which is that of the data.
    settings.sort(key=lambda each: each.scope != "shared")
    used = {"", *map(cage_name, node.attachment.cages)}
    found = remarks(host, "env") if node.role != "single" else ()
    remarked = [remark for remark in found if remark.where in used]
    return ClusterEnv(
        node=node,
        settings=tuple(settings),
        advice=(
            *(Beware(each.what, each.hint) for each in remarked if _is_grave(each)),
            *(
                Beware(each.says, each.instead)
                for each in holding(rules.advice, node.situation)
                if not each.solved({own.name: own.value for own in settings})
            ),
        ),
        off=off,
        notes=(
            *node.attachment.notes,
            *_left_out_half(node, settings),
            *(
                "; ".join(filter(None, (each.what, each.hint)))
                for each in remarked
                if not _is_grave(each)
            ),
            *_unknown_notes(node),
        ),
    )


def _left_out_half(node: Node, settings: Iterable[Setting]) -> Iterator[str]:
    """Return the half of the cable that could carry data, and is not in NCCL_IB_HCA."""
    attachment = node.attachment
    if attachment.half != attachment.hcas and any(
        (each.name, each.value) == ("NCCL_IB_HCA", attachment.half) for each in settings
    ):
        other = set(attachment.hcas.strip("=").split(",")) - {attachment.half.strip("=")}
        yield f"{', '.join(other)}, the other half of the cable, is left out of NCCL_IB_HCA"


def _is_grave(remark: Finding) -> bool:
    """Return whether a remark says what will fail, and what to do instead."""
    return remark.level in (Level.ERROR, Level.WARNING) and bool(remark.hint)


def _unknown_notes(node: Node) -> Iterator[str]:
    """Return the facts whose rules were left out because nobody knows them."""
    if node.target == "other":
        yield "no GB10 or Thor was found, so their rules are left out; --target gb10 puts them in"
    several = node.role != "single"
    # Rules about NCCL are for several nodes.
    missing = [key for key in ("triton", *["nccl"] * several) if not node.versions[key]]
    if missing:
        options = " and ".join(f"--{key}" for key in missing)
        if "nccl" in missing and (pinned := _pinned_nccl(node.vllm)):
            options += f"; the torch of vLLM {node.vllm} pins NCCL {pinned}"
        yield f"the version of {' and '.join(missing)} is unknown ({options}): no rule about it"


def _pinned_nccl(vllm: str) -> str:
    """Return the NCCL that the torch of a release of vLLM pins, "" where no table says."""
    needs = read_toml(tuple[dict[str, Any], ...], RECIPES / "vllm/build.toml", key="needs")
    torch = [
        each["torch"] for each in needs if "torch" in each and within(vllm, f">={each['from']}")
    ]
    pins = read_toml(dict[str, str], RECIPES / "nccl/recipe.toml", key="torch")
    return pins.get(torch[-1].rpartition(".")[0], "").partition("==")[2] if torch else ""


def _check_twice(settings: Iterable[Setting]) -> None:
    rules: dict[str, list[str]] = {}
    for each in settings:
        rules.setdefault(each.name, []).append(each.rule)
    for name, several in rules.items():
        if len(several) > 1:
            raise UsageError(
                f"{name} is set twice, by {' and '.join(several)}",
                hint=f"leave one out: --without {several[-1]}",
            )


def _choose_settings(rules: Sequence[VariableRule], node: Node, ptxas: str) -> Iterator[Setting]:
    """Return what sets a variable: the user before the preset, and both before the rules."""
    facts = {
        "address": node.attachment.address,
        "netdev": node.attachment.netdev,
        "data": node.attachment.data,
        "netdevs": ",".join(node.attachment.netdevs),
        "hcas": node.attachment.hcas,
        "half": node.attachment.half,
        "ptxas": ptxas,
    }
    yield from _preset_settings(node.preset, node.extra.keys())
    given = {*node.extra, *(node.preset.variables if node.preset else ())}
    for rule in rules:
        for name, value in rule.set.items():
            if name not in given:
                yield _setting_of_rule(rule, name, value, facts)
    for name, value in node.extra.items():
        yield Setting(name=name, value=value, scope="shared", reason="asked for", rule="--set")


def _preset_settings(preset: Preset | None, given: AbstractSet[str]) -> Iterator[Setting]:
    """Return what a model needs beside its flags; a token is only referred to."""
    if preset is None:
        return
    needed = {**preset.variables, **({_GATE: ""} if preset.needs_token else {})}
    for name, value in needed.items():
        if name not in given:
            yield Setting(
                name=name,
                value=value,
                scope="shared",
                reason=f"{preset.name} is served so" if value else f"{preset.name} is gated",
                rule="preset",
                source=preset.source,
            )


def _setting_of_rule(
    rule: VariableRule, name: str, value: str, facts: Mapping[str, str]
) -> Setting:
    try:
        # Empty facts are left out, so that a rule that needs one of them raises KeyError.
        filled = value.format_map({key: fact for key, fact in facts.items() if fact})
    except KeyError as error:
        raise HostError(
            f"{name} needs {error.args[0]}, which was not found on this host ({rule.id})",
            why=rule.reason,
            hint=f"see `patchkit probe`; or leave the rule out: --without {rule.id}",
        ) from None
    return Setting(
        name=name,
        value=filled,
        scope=rule.scope,
        reason=rule.reason,
        rule=rule.id,
        source=rule.source,
    )


def _check_read(setting: Setting, vllm: str, nccl: str, known: Mapping[str, str]) -> None:
    """Raise for a name that nobody reads: NCCL ignores one without a word, vLLM with one."""
    newer = nccl and release(nccl) > release(newest_nccl())  # its names are not known
    # Other programs have no full list of names: what they read is not checked.
    if setting.name.startswith("VLLM_"):
        reader, names = f"vLLM {vllm}", known
    elif setting.name.startswith("NCCL_") and not newer:
        reader, names = "NCCL", nccl_variables(nccl)
    else:
        return
    if setting.name not in names:
        close = nearest(setting.name, names)
        raise (UsageError if setting.rule == "--set" else DriftError)(
            f"{reader} does not read {setting.name} (set by {setting.rule})",
            hint=f"did you mean {close}?"
            if close
            else "`patchkit env explain` lists what it reads",
        )


def _check_taken(setting: Setting, vllm: str, takes: Takes | None) -> None:
    """Raise for a value at which vLLM stops; other programs read the names without VLLM_."""
    if not (takes and takes.enforced and setting.name.startswith("VLLM_")):
        return
    if not takes.has(setting.value):
        raise (UsageError if setting.rule == "--set" else DriftError)(
            f"vLLM {vllm} does not take {setting.name}={setting.value} (set by {setting.rule})",
            why="it reads this variable when it starts, and stops with a ValueError",
            hint=f"it takes {takes.in_words}",
        )
