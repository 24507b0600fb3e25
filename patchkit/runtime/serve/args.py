"""The flags of `vllm serve` for one node: rules and a model's preset in, flags with reasons out.

Pure. What a release does not know is an error, never passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from patchkit.errors import DriftError
from patchkit.runtime.rules.flag_rules import FlagRule, FlagRules, LeaveOut
from patchkit.runtime.rules.presets import Preset
from patchkit.runtime.rules.variable_rules import Advice, Situation, holds
from patchkit.runtime.serve.notes import notes
from patchkit.runtime.serve.request import ServeRequest, check, check_size, check_wanted

_SHARE = "--gpu-memory-utilization"


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
class ReleaseFlags:
    """What the release takes: whether it has a flag, and whether that takes a value."""

    has: Callable[[str], bool]
    takes: Callable[[str, str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """``left_out`` is what was not set on purpose, ``off`` the rules that --with turns on."""

    request: ServeRequest
    flags: tuple[Flag, ...]
    left_out: tuple[Flag, ...]
    off: tuple[FlagRule, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        words = (word for flag in self.flags for word in flag.words)
        return ("vllm", "serve", self.request.model, *words)


def serve_args(request: ServeRequest, rules: FlagRules, known: ReleaseFlags) -> Served:
    """Raises UsageError for a request that makes no sense, HostError if the model does not fit,
    DriftError if the release does not take what it should."""
    check(request, rules)
    situation = _situation(request)
    active = [rule for rule in rules.rules if holds(rule.when, situation)]
    check_wanted(request, active)
    chosen = _chosen(active, request, rules.preset)
    share = chosen.get(_SHARE)
    check_size(request, float(share.value) if share else rules.memory.share, rules.memory)
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
            *notes(request),
            *(f"{flag} is left out: {rule.reason}" for flag, rule in dropped.items()),
        ),
    )


def _situation(request: ServeRequest) -> Situation:
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


def _on(rule: FlagRule, request: ServeRequest) -> bool:
    return rule.id not in request.unwanted and (rule.default or rule.id in request.wanted)


def _chosen(
    active: Sequence[FlagRule], request: ServeRequest, reasons: Mapping[str, str]
) -> dict[str, Flag]:
    """First the rules, then the preset, then what the user asks for: the last one counts."""
    on = [rule for rule in active if _on(rule, request)]
    chosen = {rule.flag: _by_rule(rule, request) for rule in on if rule.default}
    if request.preset:
        chosen |= {flag.flag: flag for flag in _by_preset(request.preset, reasons)}
        chosen = {flag: each for flag, each in chosen.items() if _allowed(flag, request.preset)}
    asked = [rule for rule in on if rule.id in request.wanted]
    return chosen | {rule.flag: _by_rule(rule, request) for rule in asked}


def _by_rule(rule: FlagRule, request: ServeRequest) -> Flag:
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
        _SHARE: f"{preset.gpu_memory_utilization:.2f}",
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


def _check_known(flag: Flag, request: ServeRequest, known: ReleaseFlags) -> None:
    if not known.has(flag.flag):
        raise DriftError(
            f"vLLM {request.vllm} has no {flag.flag} ({flag.origin})", **_way_out(request)
        )
    if not known.takes(flag.flag, flag.value):
        raise DriftError(
            f"vLLM {request.vllm} does not take {flag.flag} {flag.value} ({flag.origin})",
            **_way_out(request),
        )


def _way_out(request: ServeRequest) -> dict[str, str]:
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
