"""The environment of one node: its seat and the rules in, variables with their reasons out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from patchkit.errors import DriftError, HostError, UsageError
from patchkit.runtime.env.topology import Seat, take_seat
from patchkit.runtime.host.advice import remarks
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.executors import choose_executor
from patchkit.runtime.rules.presets import Preset
from patchkit.runtime.rules.releases import release
from patchkit.runtime.rules.variable_rules import (
    Advice,
    Executor,
    Rule,
    Situation,
    VariableRules,
    holds,
)
from patchkit.runtime.rules.variables import nccl_variables, nearest, newest_nccl
from patchkit.target import targets

_RENAMED = {"10.1": "11.0"}  # Thor's capability, as CUDA 12.9 had it
_SLOW = ("same-subnet", "twin-mtu", "lanes")
ASKED = "asked for"
GATE = "HF_TOKEN"  # a secret: its value is in no file


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRequest:
    """What a user asks for. ``nccl`` and ``triton`` may be empty: then what is installed counts.

    ``wanted`` and ``unwanted`` are ids of rules; ``extra`` variables that the user adds.
    """

    role: str
    vllm: str
    topology: str = "auto"
    executor: str = "auto"
    nodes: int = 1
    head: str = ""
    target: str = ""
    quantization: str = ""
    preset: Preset | None = None
    nccl: str = ""
    triton: str = ""
    ptxas: str = ""
    wanted: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()
    extra: Mapping[str, str] = field(default_factory=dict)


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
        whose = "all nodes" if self.scope == "shared" else "this node"
        source = f"; {self.source}" if self.source else ""
        return f"[{whose}] {self.reason} ({self.rule}{source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEnv:
    """``settings`` shared ones first; ``situation`` what the rules went by."""

    request: EnvRequest
    seat: Seat
    situation: Situation
    executor: Executor
    settings: tuple[Setting, ...]
    advice: tuple[Advice, ...]
    off: tuple[Rule, ...]
    notes: tuple[str, ...]

    @property
    def head(self) -> str:
        return self.request.head or (self.seat.address if self.request.role == "head" else "")


def target_of(host: Host) -> str:
    """The target by the GPU's capability; ``other`` for one that is unknown, or none."""
    known = {
        f"{major}.{minor}": each.name
        for each in targets().values()
        for major, minor in [each.capability]
    }
    found = [known.get(_RENAMED.get(gpu.capability, gpu.capability), "other") for gpu in host.gpus]
    return found[0] if found else "other"


def decide(
    request: EnvRequest, host: Host, rules: VariableRules, known: Mapping[str, str]
) -> ClusterEnv:
    """``known`` are the variables that this vLLM reads (``variables.vllm_variables``).

    Raises UsageError for a request that makes no sense, HostError if the hardware is not what it
    needs, DriftError if a rule sets what this vLLM does not read.
    """
    _check(request, rules)
    target = request.target or target_of(host)
    seat = take_seat(
        host,
        role=request.role,
        topology=request.topology,
        nodes=request.nodes,
        head=request.head,
        target=target,
    )
    executor = choose_executor(
        rules, request.vllm, role=request.role, asked=request.executor, wanted=request.wanted
    )
    situation = _situation(request, host, seat, target, executor)
    active = [rule for rule in rules.rules if holds(rule.when, situation)]
    settings = list(_settings(active, request, seat))
    _registered(settings, request, known)
    settings.sort(key=lambda each: each.scope != "shared")
    return ClusterEnv(
        request=request,
        seat=seat,
        situation=situation,
        executor=executor,
        settings=tuple(settings),
        advice=tuple(each for each in rules.advice if holds(each.when, situation)),
        off=tuple(rule for rule in active if not _on(rule, request)),
        notes=(*seat.notes, *_links(host, request), *_unknown(situation)),
    )


def _check(request: EnvRequest, rules: VariableRules) -> None:
    ids = {rule.id for rule in rules.rules}
    for name in sorted(request.wanted | request.unwanted):
        if name not in ids:
            close = nearest(name, ids)
            raise UsageError(
                f"no rule is called {name!r}",
                hint=f"did you mean {close}?" if close else "`patchkit env explain` lists them",
            )
    if request.role == "single" and (request.nodes > 1 or request.head):
        raise UsageError(
            "--role single is one node without a head", hint="take --role head or --role worker"
        )
    if request.role != "single" and request.nodes < 2:
        raise UsageError(
            f"--role {request.role} needs two nodes or more", hint="say how many with --nodes"
        )


# What the rules go by


def _situation(
    request: EnvRequest, host: Host, seat: Seat, target: str, executor: Executor
) -> dict[str, str]:
    installed = host.versions
    return {
        "role": request.role,
        "topology": seat.topology,
        "executor": executor.name,
        "copies": executor.copies,
        "target": target,
        "quantization": request.quantization
        or (request.preset.quantization if request.preset else ""),
        "vllm": request.vllm,
        "torch": installed["torch"],
        "triton": request.triton or installed["triton"],
        "nccl": request.nccl or installed["nccl"],
        "nodes": str(request.nodes),
    }


def _links(host: Host, request: EnvRequest) -> Iterator[str]:
    """What slows a cable that works; what stops it, the seat knows."""
    told = remarks(host) if request.role != "single" else ()
    return (each.what for each in told if each.about in _SLOW)


def _unknown(situation: Situation) -> Iterator[str]:
    """Facts whose rules were left out because nobody knows them."""
    if situation["target"] == "other":
        yield "no GB10 or Thor was found, so their rules are left out; --target gb10 puts them in"
    several = situation["role"] != "single"
    missing = [key for key in ("triton", *["nccl"] * several) if not situation[key]]
    if missing:
        options = " and ".join(f"--{key}" for key in missing)
        yield f"the version of {' and '.join(missing)} is unknown ({options}): no rule about it"


# What they set


def _on(rule: Rule, request: EnvRequest) -> bool:
    return rule.id not in request.unwanted and (rule.default or rule.id in request.wanted)


def _settings(active: list[Rule], request: EnvRequest, seat: Seat) -> Iterator[Setting]:
    facts = {
        "address": seat.address,
        "netdev": seat.netdev,
        "netdevs": ",".join(seat.netdevs),
        "hcas": seat.hcas,
        "ptxas": request.ptxas,
    }
    given = set(request.extra)
    yield from _of_preset(request.preset, given)
    given |= set(request.preset.variables) if request.preset else set()
    for rule in active:
        for name, value in rule.set.items() if _on(rule, request) else ():
            if name not in given:
                yield _setting(rule, name, value, facts)
    for name, value in request.extra.items():
        yield Setting(name=name, value=value, scope="shared", reason=ASKED, rule="--set")


def _of_preset(preset: Preset | None, given: AbstractSet[str]) -> Iterator[Setting]:
    """What a model needs beside its flags; a token is only referred to."""
    if preset is None:
        return
    needed = {**preset.variables, **({GATE: ""} if preset.needs_token else {})}
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


def _setting(rule: Rule, name: str, value: str, facts: Mapping[str, str]) -> Setting:
    try:
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


def _registered(settings: list[Setting], request: EnvRequest, known: Mapping[str, str]) -> None:
    """A misspelt name would be ignored without a word, by NCCL, or with one, by vLLM."""
    for setting in settings:
        names = _names(setting.name, request, known)
        if names is None or setting.name in names:
            continue
        close = nearest(setting.name, names)
        reader = "NCCL" if setting.name.startswith("NCCL_") else f"vLLM {request.vllm}"
        kind = UsageError if setting.rule == "--set" else DriftError
        raise kind(
            f"{reader} does not read {setting.name} (set by {setting.rule})",
            hint=f"did you mean {close}?"
            if close
            else "`patchkit env explain` lists what it reads",
        )


def _names(name: str, request: EnvRequest, known: Mapping[str, str]) -> Mapping[str, str] | None:
    """The names among which ``name`` must be, None where nobody can know."""
    if name.startswith("VLLM_"):
        return known
    newer = request.nccl and release(request.nccl) > release(newest_nccl())
    if name.startswith("NCCL_") and not newer:
        return nccl_variables(request.nccl)
    return None
