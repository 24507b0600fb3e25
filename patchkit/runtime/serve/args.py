"""Choose the flags of `vllm serve` for a node: rules and a preset in, flags with reasons out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from patchkit.errors import DriftError, UsageError
from patchkit.finding import SINGLE_REPORT
from patchkit.quoting import quoted
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.flags import FlagRule, FlagRules, LeaveOut, has_flag, load_choices
from patchkit.runtime.rules.presets import Preset, model_recipes
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import Advice, holding
from patchkit.runtime.serve.facts import fill_rules
from patchkit.runtime.serve.listen import listening
from patchkit.runtime.serve.request import ServeRequest, check_request, check_size
from patchkit.runtime.serve.roofline import fastest_stream

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
    def limits(self) -> tuple[str, ...]:
        """Return the notes on memory and speed alone."""
        flags = {flag.flag: flag.value for flag in self.flags}
        return (*filter(None, [self.request.memory.note]), *fastest_stream(self.request, flags))


def serve_args(request: ServeRequest, rules: FlagRules, home: Path | None = None) -> ServeCommand:
    """Return the command that serves a model. Raises UsageError, HostError, DriftError."""
    check_request(request)
    request.choice.check(rules.rules, "`patchkit serve-args … --explain` lists them")
    situation = request.node.situation
    active = tuple(fill_rules(holding(rules.rules, situation), request))
    if idle := sorted(request.choice.wanted - {rule.id for rule in active}):
        raise UsageError(
            f"--with {idle[0]} would change nothing here",
            why="its condition does not hold for this release, model and place, or it is about "
            "what a checkpoint says that is not here",
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
        _check_known(flag, request.node, home)
    return ServeCommand(
        request=request,
        flags=tuple(kept),
        left_out=tuple(_flag_of_rule(rule, rule.values) for rule in left_out),
        off=off,
        advice=holding(rules.advice, situation),
        notes=(
            *listening(request),
            *_model_notes(request, rules),
            *fastest_stream(request, {flag.flag: flag.value for flag in kept}),
            *(f"{flag} is left out: {rule.reason}" for flag, rule in dropped.items()),
        ),
    )


def _choose_flags(
    on: Sequence[FlagRule], request: ServeRequest, reasons: Mapping[str, str]
) -> dict[str, ServeFlag]:
    """Return first the rules, then the preset, then what the user asks for: the last one counts."""
    preset = request.node.preset
    flags = [(rule, _flag_of_rule(rule, rule.value)) for rule in on]
    chosen = {flag.flag: flag for rule, flag in flags if rule.default}
    values: dict[str, str | bool] = {}
    if preset:
        share, length = f"{preset.gpu_memory_utilization:.2f}", str(preset.max_model_len)
        values = {_SHARE: share, "--max-model-len": length, **preset.flags}
    for name, value in values.items():
        if preset and value is not False:
            chosen[name] = ServeFlag(
                flag=name,
                value="" if value is True else value,
                reason=f"{reasons.get(name, '')} As {preset.name} is served.".strip(),
                source=preset.source,
                origin="preset",
                evidence=preset.evidence,
            )
        else:
            # False takes a flag away from rules; --with, the user's own word, still sets it.
            chosen.pop(name, None)
    if not request.memory.shared:
        # That of a Spark leaves the CPU its part; a GPU's own memory is vLLM's to divide.
        chosen.pop(_SHARE, None)
    wanted = request.choice.wanted
    chosen |= {flag.flag: flag for rule, flag in flags if rule.id in wanted}
    # FLAG.KEY joins the JSON of FLAG, in whose place vLLM would take it.
    for name in [name for name in chosen if "." in name and name.partition(".")[0] in chosen]:
        part, (whole, _, key) = chosen.pop(name), name.partition(".")
        value = json.dumps(
            {**json.loads(chosen[whole].value), key: part.value}, separators=(",", ":")
        )
        reason = f"{chosen[whole].reason} {part.reason}"
        chosen[whole] = replace(chosen[whole], value=value, reason=reason)
    return chosen


def _flag_of_rule(rule: FlagRule | LeaveOut, value: str) -> ServeFlag:
    return ServeFlag(
        flag=rule.flag,
        value=value,
        reason=rule.reason,
        source=rule.source,
        origin=rule.id,
        evidence=rule.evidence,
    )


def _check_known(flag: ServeFlag, node: Node, home: Path | None) -> None:
    choices = load_choices().get(flag.flag)
    if not has_flag(flag.flag, node.vllm, home):
        trouble = f"has no {flag.flag}"
    elif choices and not choices.has(flag.value, choices.known(node.vllm)):
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


def _model_notes(request: ServeRequest, rules: FlagRules) -> Iterator[str]:
    """Yield notes on the memory and the model."""
    node, unknown = request.node, request.weights_gib is None
    if node.preset is None and request.folder_gib is None:
        more = ", and whether it fits was not checked" if unknown else ""
        yield f"{request.model} has no preset: these flags fit any model{more}"
    elif unknown:
        yield "whether it fits was not checked: nobody names the size of its weights"
    if request.memory.note and not unknown:
        yield request.memory.note
    if node.preset:
        yield from _preset_notes(node.preset, node.nodes, node.vllm)
    elif recipe := model_recipes().get(request.model.lower()):
        if recipe.min_vllm[:1].isdigit() and not within(node.vllm, f">={recipe.min_vllm}"):
            yield f"upstream's recipe of {recipe.id} takes vLLM {recipe.min_vllm} or newer"
        # As a shell takes them.
        settings = recipe.settings.items()
        variables = [f"{name}={value}" for name, value in settings if name[0] != "-"]
        words = [word for pair in settings if pair[0][0] == "-" for word in pair if word]
        if settings:
            both = quoted(*variables, *words)
            yield f"upstream's recipe of {recipe.id} for a GB10 sets: {both}"
        for limit in holding(rules.limits, node.situation):
            value = recipe.settings.get(limit.flag, "")
            if value and float(value) > limit.most:
                much = f"its {limit.flag} {value} is too much here."
                yield f"{much} {limit.reason} Take {limit.instead}"


def _preset_notes(preset: Preset, nodes: int, vllm: str) -> Iterator[str]:
    if preset.build:
        yield f"served with {preset.build}; no release is known to do"
    if preset.measured_with and not within(vllm, f">={preset.measured_with}"):
        yield f"measured with vLLM {preset.measured_with}; that {vllm} serves it is upstream's word"
    if preset.variables:
        pairs = " ".join(f"{name}={value}" for name, value in preset.variables.items())
        yield (
            f"the environment must hold {pairs}: "
            f"`{quoted('patchkit', 'env', '--model', preset.id)}` writes it"
        )
    if preset.needs_token:
        yield f"{preset.id} needs its licence accepted at Hugging Face, and HF_TOKEN"
    if nodes < preset.nodes:
        yield f"it fits one Spark, and is meant for {preset.nodes}"
    if preset.evidence == SINGLE_REPORT:
        yield f"the preset rests on one report ({preset.source})"
    if preset.note:
        yield preset.note
