"""Choose the flags of `vllm serve` for a node: rules and a preset in, flags with reasons out.

Pure. What a release does not know is an error, never passed on.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import DriftError, UsageError
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.flags import FlagRule, FlagRules, LeaveOut, flags, takes
from patchkit.runtime.rules.presets import Preset
from patchkit.runtime.rules.rule import Advice, holding
from patchkit.runtime.serve.notes import notes
from patchkit.runtime.serve.request import ServeRequest, check, check_size

_SHARE = "--gpu-memory-utilization"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlag:
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
    """The flags of a release: whether it has one, and whether that takes a value."""

    has: Callable[[str], bool]
    takes: Callable[[str, str], bool]


def release_flags(vllm: str, home: Path | None) -> ReleaseFlags:
    """Return what a release takes: the flags by its code where it is installed in ``home``."""
    names = flags(vllm, home)
    return ReleaseFlags(
        has=lambda flag: flag in names,
        takes=lambda flag, value: takes(flag, value, vllm),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """``left_out`` is what was not set on purpose, ``off`` the rules that --with turns on."""

    request: ServeRequest
    flags: tuple[ServeFlag, ...]
    left_out: tuple[ServeFlag, ...]
    off: tuple[FlagRule, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        flags = (word for flag in self.flags for word in flag.words)
        return ("vllm", "serve", self.request.model, *flags)

    @property
    def shell_line(self) -> str:
        """Return the whole command as one line that sh reads back word by word."""
        return shlex.join(self.words)


def serve_args(request: ServeRequest, rules: FlagRules, known: ReleaseFlags) -> ServeCommand:
    """Return the command that serves a model.

    Raises UsageError for a request that makes no sense, HostError if the model does not fit,
    DriftError if the release does not take what it should.
    """
    check(request)
    request.choice.check(rules.rules, "`patchkit serve-args … --explain` lists them")
    situation = request.node.situation
    active = holding(rules.rules, situation)
    if idle := sorted(request.choice.wanted - {rule.id for rule in active}):
        raise UsageError(
            f"--with {idle[0]} would change nothing here",
            why="its condition does not hold for this release, model and place",
            hint="`--explain` lists the rules that can be turned on",
        )
    on, off = request.choice.divide(active)
    chosen = _choose_flags(on, request, rules.preset)
    share = chosen.get(_SHARE)
    # Not before the flags are chosen: a rule, the preset or the user may set the share.
    check_size(request, float(share.value) if share else rules.memory.share, rules.memory)
    left_out = holding(rules.leave_out, situation)
    dropped = {
        name: rule
        for name, flag in chosen.items()
        for rule in left_out
        if rule.flag == name and rule.matches(flag.value)
    }
    # In the order of the data, so that two releases' lines can be compared.
    order = [*dict.fromkeys((*(rule.flag for rule in rules.rules), *rules.preset, *chosen))]
    kept = [chosen[name] for name in order if name in chosen and name not in dropped]
    for flag in kept:
        _check_known(flag, request.node, known)
    return ServeCommand(
        request=request,
        flags=tuple(kept),
        left_out=tuple(_flag_of_rule(rule, rule.values) for rule in left_out),
        off=off,
        advice=holding(rules.advice, situation),
        notes=(
            *notes(request),
            *(f"{flag} is left out: {rule.reason}" for flag, rule in dropped.items()),
        ),
    )


def _choose_flags(
    on: Sequence[FlagRule], request: ServeRequest, reasons: Mapping[str, str]
) -> dict[str, ServeFlag]:
    """Return first the rules, then the preset, then what the user asks for: the last one counts."""
    node = request.node
    facts = {
        "{nodes}": str(node.nodes),
        "{rank}": str(request.number),
        "{head}": node.head,
        "{host}": request.host,
        "{port}": str(request.port),
    }
    flags = [(rule, _flag_of_rule(rule, facts.get(rule.value, rule.value))) for rule in on]
    chosen = {flag.flag: flag for rule, flag in flags if rule.default}
    if node.preset:
        chosen |= {flag.flag: flag for flag in _flags_of_preset(node.preset, reasons)}
        # False takes a flag away from rules; --with, the user's own word, still sets it.
        never = {name for name, value in node.preset.flags.items() if value is False}
        chosen = {name: flag for name, flag in chosen.items() if name not in never}
    if not request.memory.shared:
        # That of a Spark leaves the CPU its part; a GPU's own memory is vLLM's to divide.
        chosen.pop(_SHARE, None)
    wanted = request.choice.wanted
    return chosen | {flag.flag: flag for rule, flag in flags if rule.id in wanted}


def _flag_of_rule(rule: FlagRule | LeaveOut, value: str) -> ServeFlag:
    return ServeFlag(
        flag=rule.flag,
        value=value,
        reason=rule.reason,
        source=rule.source,
        origin=rule.id,
        evidence=rule.evidence,
    )


def _flags_of_preset(preset: Preset, reasons: Mapping[str, str]) -> Iterator[ServeFlag]:
    values: dict[str, str | bool] = {
        _SHARE: f"{preset.gpu_memory_utilization:.2f}",
        "--max-model-len": str(preset.max_model_len),
        **preset.flags,
    }
    for name, value in values.items():
        if value is not False:
            yield ServeFlag(
                flag=name,
                value="" if value is True else value,
                reason=f"{reasons.get(name, '')} As {preset.name} is served.".strip(),
                source=preset.source,
                origin="preset",
                evidence=preset.evidence,
            )


def _check_known(flag: ServeFlag, node: Node, known: ReleaseFlags) -> None:
    if not known.has(flag.flag):
        trouble = f"has no {flag.flag}"
    elif not known.takes(flag.flag, flag.value):
        trouble = f"does not take {flag.flag} {flag.value}"
    else:
        return
    build = node.preset.build if node.preset else ""
    raise DriftError(
        f"vLLM {node.vllm} {trouble} ({flag.origin})",
        why=f"the preset is for {build}" if build else "the rules know another vLLM than this one",
        hint="name the Python that has that build with --python; "
        "or flags that fit any model: --preset none"
        if build
        else "leave the rule out with --without ID, or --preset none; and report it",
    )
