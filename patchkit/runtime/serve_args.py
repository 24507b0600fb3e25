"""The flags of `vllm serve` for one node: rules and a model's preset in, flags with reasons out.

Pure. What a release does not know is an error, never passed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from patchkit.errors import DriftError, HostError, UsageError
from patchkit.runtime.flag_rules import FlagRule, FlagRules, LeaveOut, Memory
from patchkit.runtime.presets import Preset
from patchkit.runtime.releases import within
from patchkit.runtime.rules import Advice, Situation, holds

_MOST_NODES = 8  # how far the advice goes to take more Sparks


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is served where. ``topology``, ``executor`` are decided; ``uni`` is a node alone.

    ``weights_gib`` is the size of a local checkpoint; ``memory_gib`` the host's memory, None where
    it is unknown. ``wanted`` and ``unwanted`` are ids of rules.
    """

    model: str
    vllm: str
    role: str = "single"
    topology: str = "single"
    executor: str = "uni"
    nodes: int = 1
    rank: int = 0
    head: str = ""
    host: str = ""
    port: int = 8000
    target: str = "gb10"
    quantization: str = ""
    preset: Preset | None = None
    weights_gib: float | None = None
    memory_gib: float | None = None
    wanted: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag; an empty ``value`` is a flag without one. ``origin`` is a rule's id, or preset."""

    flag: str
    value: str
    reason: str
    source: str
    origin: str
    evidence: str

    @property
    def words(self) -> tuple[str, ...]:
        return (self.flag, self.value) if self.value else (self.flag,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the release takes: whether it has a flag, and whether that takes a value."""

    has: Callable[[str], bool]
    takes: Callable[[str, str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """``left_out`` is what was not set on purpose, ``off`` the rules that --with turns on."""

    request: Request
    flags: tuple[Flag, ...]
    left_out: tuple[Flag, ...]
    off: tuple[FlagRule, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        words = (word for flag in self.flags for word in flag.words)
        return ("vllm", "serve", self.request.model, *words)


def serve_args(request: Request, rules: FlagRules, known: Known) -> Served:
    """Raises UsageError for a request that makes no sense, HostError if the model does not fit,
    DriftError if the release does not take what it should."""
    _check(request, rules)
    situation = _situation(request)
    active = [rule for rule in rules.rules if holds(rule.when, situation)]
    _check_wanted(request, active)
    chosen = _chosen(active, request, rules.preset)
    _check_size(request, float(chosen["--gpu-memory-utilization"].value), rules.memory)
    left_out = [each for each in rules.leave_out if holds(each.when, situation)]
    dropped = {name: rule for name, flag in chosen.items() if (rule := _dropping(flag, left_out))}
    flags = [chosen[name] for name in _in_order(chosen, rules) if name not in dropped]
    for flag in flags:
        _check_known(flag, request, known)
    return Served(
        request=request,
        flags=tuple(flags),
        left_out=tuple(map(_leave_out, left_out)),
        off=tuple(rule for rule in active if not _on(rule, request)),
        advice=tuple(each for each in rules.advice if holds(each.when, situation)),
        notes=(
            *_notes(request),
            *(f"{flag} is left out: {rule.reason}" for flag, rule in dropped.items()),
        ),
    )


# What is asked for


def _check(request: Request, rules: FlagRules) -> None:
    if not request.model or request.model.startswith("-") or not request.model.isprintable():
        raise UsageError(
            f"{request.model!r} is no model",
            hint="write OWNER/NAME as at Hugging Face, or a folder",
        )
    ids = {rule.id for rule in rules.rules}
    if unknown := sorted((request.wanted | request.unwanted) - ids):
        raise UsageError(
            f"no rule is called {unknown[0]!r}", hint="`patchkit serve-args … --explain` lists them"
        )
    _check_nodes(request)
    if request.preset:
        _check_preset(request, request.preset)


def _check_wanted(request: Request, active: Sequence[FlagRule]) -> None:
    if idle := sorted(request.wanted - {rule.id for rule in active}):
        raise UsageError(
            f"--with {idle[0]} would change nothing here",
            why="its condition does not hold for this release, model and place",
            hint="`--explain` lists the rules that can be turned on",
        )


def _check_nodes(request: Request) -> None:
    alone = request.role == "single"
    if alone != (request.nodes == 1):
        raise UsageError(
            f"--role {request.role} and {request.nodes} nodes contradict each other",
            hint="a node alone is --role single; else say how many with --nodes",
        )
    if request.role == "worker" and request.executor == "ray":
        raise UsageError(
            "a worker under Ray serves nothing",
            why="the head's `vllm serve` starts what runs on it",
            hint=f"on the worker: ray start --address={request.head or 'HEAD'}:6379, "
            "with its env file loaded",
        )
    if not alone and not request.head:
        raise UsageError(
            "which address has the head?", hint="--head-ip A, or the head's file: --from head.env"
        )
    if (request.rank == 0) == (request.role == "worker") or not 0 <= request.rank < request.nodes:
        raise UsageError(
            f"rank {request.rank} of {request.nodes} nodes cannot be a {request.role}'s",
            hint="the head is 0, each worker has a number of its own: --node-rank 1 …",
        )


def _check_preset(request: Request, preset: Preset) -> None:
    if request.quantization and request.quantization != preset.quantization:
        raise UsageError(
            f"{preset.id} is {preset.quantization}, not {request.quantization}",
            hint="leave --quantization out; another checkpoint of the model: --preset none",
        )
    if not within(request.vllm, f">={preset.min_vllm}"):
        raise UsageError(
            f"{preset.id} takes vLLM {preset.min_vllm} or newer, this is {request.vllm}",
            why=f"no older one is known to serve it ({preset.source})",
            hint="take a newer vLLM; or try with flags that fit any model: --preset none",
        )
    if "/" not in preset.id and request.model.lower() == preset.id.lower():
        raise UsageError(
            f"whose {preset.id}?",
            why="no owner's checkpoint is known to be meant",
            hint=f"write OWNER/{preset.id}, or the folder that it lies in",
        )


def _check_size(request: Request, share: float, memory: Memory) -> None:
    """Whether a node's part of the weights fits into ``share`` of its memory."""
    preset = request.preset
    weights = request.weights_gib or (preset.weights_gib if preset else None)
    if weights is None:
        return
    total = request.memory_gib or memory.total_gib
    room = total * share - memory.margin_gib
    if weights <= room * request.nodes:
        return
    per_node = weights / request.nodes
    raise HostError(
        f"{request.model} does not fit: {per_node:.0f} GiB of weights per node, and there is room "
        f"for {max(room, 0):.0f}",
        why=f"{share:.2f} of {total:.1f} GiB, less {memory.margin_gib:.0f} for activations and the "
        "least KV cache; the CPU needs the rest of the memory",
        hint=_smaller(weights, room, preset),
    )


def _smaller(weights: float, room: float, preset: Preset | None) -> str:
    nodes = math.ceil(weights / room) if room > 0 else _MOST_NODES + 1
    ways = [f"{nodes} nodes: --role head --nodes {nodes}"] if nodes <= _MOST_NODES else []
    ways.append((preset.instead if preset else "") or "a checkpoint in fewer bits")
    return "take " + "; or ".join(ways)


def _situation(request: Request) -> Situation:
    preset = request.preset
    moe = "unknown" if preset is None else "yes" if preset.moe else "no"
    return {
        "role": request.role,
        "topology": request.topology,
        "executor": request.executor,
        "target": request.target,
        "quantization": request.quantization or (preset.quantization if preset else ""),
        "moe": moe,
        "vllm": request.vllm,
        "nodes": str(request.nodes),
    }


# What is set


def _on(rule: FlagRule, request: Request) -> bool:
    return rule.id not in request.unwanted and (rule.default or rule.id in request.wanted)


def _chosen(
    active: Sequence[FlagRule], request: Request, reasons: Mapping[str, str]
) -> dict[str, Flag]:
    """First the rules, then the preset, then what the user asks for: the last one counts."""
    on = [rule for rule in active if _on(rule, request)]
    chosen = {rule.flag: _by_rule(rule, request) for rule in on if rule.default}
    if request.preset:
        chosen |= {flag.flag: flag for flag in _by_preset(request.preset, reasons)}
        chosen = {flag: each for flag, each in chosen.items() if _allowed(flag, request.preset)}
    asked = [rule for rule in on if rule.id in request.wanted]
    return chosen | {rule.flag: _by_rule(rule, request) for rule in asked}


def _by_rule(rule: FlagRule, request: Request) -> Flag:
    facts = {
        "{nodes}": str(request.nodes),
        "{rank}": str(request.rank),
        "{head}": request.head,
        "{host}": request.host or request.head or "127.0.0.1",
        "{port}": str(request.port),
    }
    return Flag(
        flag=rule.flag,
        value=facts.get(rule.value, rule.value),
        reason=rule.reason,
        source=rule.source,
        origin=rule.id,
        evidence=rule.evidence,
    )


def _allowed(flag: str, preset: Preset) -> bool:
    return preset.flags.get(flag) is not False


def _by_preset(preset: Preset, reasons: Mapping[str, str]) -> Iterator[Flag]:
    values: dict[str, str | bool] = {
        "--gpu-memory-utilization": f"{preset.gpu_memory_utilization:.2f}",
        "--max-model-len": str(preset.max_model_len),
        **preset.flags,
    }
    for name, value in values.items():
        if value is not False:
            why = reasons.get(name, "")
            yield Flag(
                flag=name,
                value="" if value is True else value,
                reason=f"{why} As {preset.name} is served.".strip(),
                source=preset.source,
                origin="preset",
                evidence=preset.evidence,
            )


def _leave_out(rule: LeaveOut) -> Flag:
    return Flag(
        flag=rule.flag,
        value=rule.values,
        reason=rule.reason,
        source=rule.source,
        origin=rule.id,
        evidence=rule.evidence,
    )


def _dropping(flag: Flag, left_out: Sequence[LeaveOut]) -> LeaveOut | None:
    return next((rule for rule in left_out if rule.matches(flag.flag, flag.value)), None)


def _in_order(chosen: Iterable[str], rules: FlagRules) -> list[str]:
    """As the data has them, so that two releases' lines can be compared."""
    order = list(dict.fromkeys((*(rule.flag for rule in rules.rules), *rules.preset)))
    return sorted(chosen, key=lambda name: order.index(name) if name in order else len(order))


# What the release takes


def _check_known(flag: Flag, request: Request, known: Known) -> None:
    if not known.has(flag.flag):
        raise DriftError(
            f"vLLM {request.vllm} has no {flag.flag} ({flag.origin})", **_way_out(request)
        )
    if not known.takes(flag.flag, flag.value):
        raise DriftError(
            f"vLLM {request.vllm} does not take {flag.flag} {flag.value} ({flag.origin})",
            **_way_out(request),
        )


def _way_out(request: Request) -> dict[str, str]:
    if request.preset and request.preset.build:
        return {
            "why": f"the preset is for {request.preset.build}",
            "hint": "name the Python that has that build with --python; "
            "or flags that fit any model: --preset none",
        }
    return {
        "why": "the rules know another vLLM than this one",
        "hint": "leave the rule out with --without ID, or --preset none; and report it",
    }


# What a user should know


def _notes(request: Request) -> Iterator[str]:
    preset = request.preset
    if preset:
        yield from _about(preset, request)
    elif request.weights_gib is None:
        yield (
            f"{request.model} is none of the presets: these flags fit any model, "
            "and whether it fits was not checked"
        )
    if _open(request.host):
        yield (
            f"everybody who reaches {request.host} can use the model: vLLM asks nobody for a key "
            "unless VLLM_API_KEY or --api-key is set"
        )


def _about(preset: Preset, request: Request) -> Iterator[str]:
    if preset.build:
        yield f"served with {preset.build}; no release is known to do"
    if preset.variables:
        pairs = " ".join(f"{name}={value}" for name, value in preset.variables.items())
        yield f"the environment must hold {pairs}: `patchkit env --model {preset.id}` writes it"
    if preset.needs_token:
        yield f"{preset.id} needs its licence accepted at Hugging Face, and HF_TOKEN"
    if request.nodes < preset.nodes:
        yield f"it fits one Spark, and is meant for {preset.nodes}"
    if preset.evidence == "single report":
        yield f"the preset rests on one report ({preset.source})"
    if preset.note:
        yield preset.note


def _open(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_unspecified or address.is_global
