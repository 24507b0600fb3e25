"""Choose the flags of `vllm serve` for a node: rules and a preset in, flags with reasons out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from patchkit.errors import DriftError, UsageError
from patchkit.finding import SINGLE_REPORT
from patchkit.quoting import quoted
from patchkit.records import read_json
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.broken import Broken
from patchkit.runtime.rules.flags import (
    FlagRule,
    FlagRules,
    LeaveOut,
    has_flag,
    load_choices,
    load_flag_rules,
)
from patchkit.runtime.rules.presets import (
    DRAFTING,
    Preset,
    find_recipe,
    load_presets,
    same_value,
)
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import Advice, select_entries
from patchkit.runtime.rules.secret_texts import find_code_risk
from patchkit.runtime.serve.context import context_notes
from patchkit.runtime.serve.facts import fill_rules
from patchkit.runtime.serve.listen import listening
from patchkit.runtime.serve.model import SPARK
from patchkit.runtime.serve.request import (
    ServeRequest,
    check_request,
    check_size,
    fit_of,
    release_faults,
)
from patchkit.runtime.serve.roofline import fastest_stream
from patchkit.target import DEFAULT_TARGET

SHARE = "--gpu-memory-utilization"


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
        return (
            *filter(None, [self.request.memory.note]),
            *fastest_stream(self.request, flags),
        )


def serve_args(
    request: ServeRequest, rules: FlagRules, home: Path | None = None
) -> ServeCommand:
    """Return the command that serves a model. Raises UsageError, HostError, DriftError."""
    check_request(request)
    faults = release_faults(request)

    situation = request.node.situation
    active = _active_rules(request, rules)
    on, off = request.choice.divide(active)
    left_out = select_entries(rules.leave_out, situation)

    refused: dict[str, str] = {}
    chosen = _choose_flags(on, request, rules, refused)
    refused |= _refused_flags(chosen, left_out, request.node, home)
    kept = [flag for flag in _in_order(chosen, rules) if flag.flag not in refused]
    values = {flag.flag: flag.value for flag in kept}

    # Not before the flags are chosen: a rule, the preset or the user may set the share.
    share = float(values.get(SHARE, rules.memory.share))
    fit = fit_of(request, share, drafts=DRAFTING in values)
    if fit:
        check_size(request, share, fit)

    unwanted = {
        it.flag: f"--without {it.id}" for it in off if it.id in request.choice.unwanted
    }
    unlike = tuple(_unlike_recipe(request.node.preset, values, {**unwanted, **refused}))
    one_holds = "yes" if fit and fit.fitting_nodes == 1 else "no"
    general_advice = select_entries(rules.advice, {**situation, "one_holds": one_holds})

    return ServeCommand(
        request=request,
        flags=tuple(kept),
        left_out=(*(_flag_of_rule(rule, rule.values) for rule in left_out), *unlike),
        off=off,
        advice=(*(_fault_advice(row, request) for row in faults), *general_advice),
        notes=(
            *listening(request),
            *_model_notes(request),
            *context_notes(request, values, fit),
            *fastest_stream(request, values),
            *_notes_on_flags(kept, refused, unlike),
        ),
    )


def _active_rules(request: ServeRequest, rules: FlagRules) -> tuple[FlagRule, ...]:
    """Return the rules that hold here. Raises UsageError for one that is wanted and does not."""
    request.choice.check(rules.rules, "`patchkit serve-args … --explain` lists them")
    active = tuple(
        fill_rules(select_entries(rules.rules, request.node.situation), request)
    )
    idle = sorted(request.choice.wanted - {rule.id for rule in active})
    if idle:
        raise UsageError(
            f"--with {idle[0]} would change nothing here",
            why="its condition does not hold for this release, model and place, or it is about "
            "what a checkpoint says that is not here",
            hint="`--explain` lists the rules that can be turned on",
        )
    return active


def _refused_flags(
    chosen: Mapping[str, ServeFlag],
    left_out: Sequence[LeaveOut],
    node: Node,
    home: Path | None,
) -> dict[str, str]:
    """Return flag → why it is not passed on: a rule against it, or the release lacks it."""
    refused = {}
    for name, flag in chosen.items():
        rules = (
            rule for rule in left_out if rule.flag == name and rule.matches(flag.value)
        )
        against = next(rules, None)
        why = against.reason if against else _check_known(flag, node, home)
        if why:
            refused[name] = why
    return refused


def _in_order(chosen: Mapping[str, ServeFlag], rules: FlagRules) -> Iterator[ServeFlag]:
    """Yield the flags in the order of the data, so that two releases' lines can be compared."""
    order = dict.fromkeys(
        [*(rule.flag for rule in rules.rules), *rules.preset, *chosen]
    )
    yield from (chosen[name] for name in order if name in chosen)


def _fault_advice(fault: Broken, request: ServeRequest) -> Advice:
    """Return what to beware of with this release and model."""
    release = f"on vLLM {request.node.vllm} " if fault.when else ""
    return Advice(
        id=fault.id,
        says=f"{request.model} {release}{fault.effect}. {fault.cause}",
        instead=fault.cure,
        source=fault.source,
        evidence=fault.evidence,
        confidence=fault.confidence,
    )


def _choose_flags(
    on: Sequence[FlagRule],
    request: ServeRequest,
    rules: FlagRules,
    refused: dict[str, str],
) -> dict[str, ServeFlag]:
    """Return first the rules, then the preset, then what the user asks for: the last one counts.

    ``refused`` gets what the preset asks for and a limit forbids.
    """
    preset, situation = request.node.preset, request.node.situation
    chosen = {rule.flag: _flag_of_rule(rule, rule.value) for rule in on if rule.default}
    if request.memory.whose == SPARK:
        situation = {**situation, "target": DEFAULT_TARGET}
    limits = {limit.flag: limit for limit in select_entries(rules.limits, situation)}
    if preset:
        for name, value in preset.flags.items():
            limit = limits.get(name)
            if value is False:
                # It takes a flag away from rules; --with, the user's own word, still sets it.
                chosen.pop(name, None)
            elif (
                limit and limit.unless not in preset.flags and float(value) > limit.most
            ):
                refused[f"{name} {value}"] = f"{limit.reason} Take {limit.instead}"
            elif name != DRAFTING:
                reason = f"{rules.preset.get(name, '')} As {preset.name} is served."
                chosen[name] = _flag(preset, name, value, reason.strip(), "preset")
    if not request.memory.shared:
        # That of a Spark leaves the CPU its part; a GPU's own memory is vLLM's to divide.
        chosen.pop(SHARE, None)
    wanted = request.choice.wanted
    chosen |= {
        rule.flag: _flag_of_rule(rule, rule.value) for rule in on if rule.id in wanted
    }
    # FLAG.KEY joins the JSON of FLAG, in whose place vLLM would take it.
    for name in [name for name in chosen if "." in name]:
        part, (whole, _, key) = chosen.pop(name), name.partition(".")
        if whole in chosen:
            reason = f"{chosen[whole].reason} {part.reason}"
            values = {**json.loads(chosen[whole].value), key: part.value}
            text = json.dumps(values, separators=(",", ":"))
            chosen[whole] = replace(chosen[whole], value=text, reason=reason)
    return chosen


def _flag_of_rule(rule: FlagRule | LeaveOut, value: str) -> ServeFlag:
    return _flag(rule, rule.flag, value, rule.reason, rule.id)


def _flag(
    by: Preset | FlagRule | LeaveOut,
    flag: str,
    value: str | bool,
    reason: str,
    origin: str,
) -> ServeFlag:
    word = "" if value is True else str(value)
    grounds = {"source": by.source, "evidence": by.evidence}
    return ServeFlag(flag=flag, value=word, reason=reason, origin=origin, **grounds)


def _check_known(flag: ServeFlag, node: Node, home: Path | None) -> str:
    """Return what the release lacks of a preset's flag, "" for nothing. Raises DriftError."""
    choices, values, trouble = load_choices(), [(flag.flag, flag.value)], ""
    if flag.flag == DRAFTING:
        for key, value in read_json(dict[str, Any], flag.value).items():
            # What drafts may have kernels of its own.
            values += [
                (f"{DRAFTING}.{key}", str(value)),
                (f"--{key.replace('_', '-')}", str(value)),
            ]
    if not has_flag(flag.flag, node.vllm, home):
        trouble = f"vLLM {node.vllm} has no {flag.flag}"
    for name, value in values:
        if name in choices and not choices[name].allowed_by(node.vllm).allows(value):
            trouble = trouble or f"vLLM {node.vllm} does not take {flag.flag} {value}"
    build = node.preset.build if node.preset else ""
    if not trouble or (flag.origin in ("preset", "drafter") and not build):
        return trouble
    raise DriftError(
        f"{trouble} ({flag.origin})",
        why=f"the preset is for {build}"
        if build
        else "the rules know another vLLM than this one",
        hint="name the Python that has that build with --python; "
        "or flags that fit any model: --preset none"
        if build
        else "leave the rule out with --without ID, or --preset none; and report it",
    )


def _unlike_recipe(
    preset: Preset | None, values: Mapping[str, str], refused: Mapping[str, str]
) -> Iterator[ServeFlag]:
    """Yield what upstream's recipe has for a GB10 and the command has not, each with the reason."""
    recipe = find_recipe(preset.id) if preset in load_presets() else None
    for name, value in recipe.settings.items() if preset and recipe else ():
        if preset and not same_value({**values, **preset.variables}.get(name), value):
            why = refused.get(name) or refused.get(f"{name} {value}", "")
            yield _flag(
                preset, name, value, preset.reason(name, value) or why, "recipe"
            )


def _notes_on_flags(
    kept: Sequence[ServeFlag], refused: Mapping[str, str], unlike: Sequence[ServeFlag]
) -> Iterator[str]:
    """Yield what is left out, what is not as in upstream's recipe, and what some flags mean."""
    yield from (f"{what} is left out: {why}" for what, why in refused.items())
    common = load_flag_rules().recipe.values()
    if told := [each.flag for each in unlike if each.reason not in common]:
        yield f"not as upstream's recipe for a GB10: {', '.join(told)}; --explain says why"
    values = {flag.flag: flag.value for flag in kept}
    yield from (f"{name}: {why}" for name in values if (why := find_code_risk(name)))
    drafting = read_json(dict[str, Any], values.get(DRAFTING, "{}"))
    if drafting:
        by = f" with the checkpoint {drafting['model']}" if "model" in drafting else ""
        yield f"it drafts{by}: faster, for code above all; --without drafter leaves it out"
    given = (values.get(f"--max-num-{what}", "") for what in ("seqs", "batched-tokens"))
    sequences, tokens = (int(text) if text.isdigit() else 0 for text in given)
    depth = drafting.get("num_speculative_tokens")
    depth = depth if isinstance(depth, int) else 0
    # As vLLM's config/vllm.py has it.
    if (
        drafting.get("method") in ("dflash", "dspark")
        and 0 < tokens < depth * sequences
    ):
        each = f"each drafts {depth} tokens, and --max-num-batched-tokens is {tokens}"
        yield f"{tokens // depth} of {sequences} sequences are computed at once: {each}"


def _model_notes(request: ServeRequest) -> Iterator[str]:
    """Yield notes on the memory and the model."""
    preset = request.node.preset
    yield from _weight_notes(request)
    if preset:
        yield from _preset_notes(preset, request.node.vllm)
        if request.weights and request.memory.gib:
            yield from _fewer_nodes_note(request.node.nodes, preset)
        return

    recipe = find_recipe(request.model)
    oldest = recipe.min_vllm if recipe else ""
    if recipe and oldest[:1].isdigit() and not within(request.node.vllm, f">={oldest}"):
        yield f"upstream's recipe of {recipe.id} takes vLLM {oldest} or newer"


def _weight_notes(request: ServeRequest) -> Iterator[str]:
    """Yield who says how large the model is, and what it was weighed against."""
    weights = request.weights
    if request.node.preset is None and request.folder_gib is None:
        more = "" if weights else ", and whether it fits was not checked"
        yield f"{request.model} has no preset: these flags fit any model{more}"
    elif weights is None:
        yield "whether it fits was not checked: nobody names the size of its weights"

    if weights and weights.from_name:
        yield f"at least {weights.gib:.0f} GiB of weights, by {weights.source}"
    if weights and request.memory.note:
        yield request.memory.note


def _fewer_nodes_note(nodes: int, preset: Preset) -> Iterator[str]:
    if nodes < preset.nodes:
        place = "one Spark" if nodes == 1 else f"{nodes} Sparks"
        yield f"it fits {place}, and is meant for {preset.nodes}"


def _preset_notes(preset: Preset, vllm: str) -> Iterator[str]:
    if preset.build:
        yield f"served with {preset.build}; no release is known to do"
    if preset.measured_with and not within(vllm, f">={preset.measured_with}"):
        yield f"measured with vLLM {preset.measured_with}; that {vllm} serves it is upstream's word"
    if preset.variables:
        pairs = [f"{name}={value}" for name, value in preset.variables.items()]
        options = [word for pair in pairs for word in ("--set", pair)]
        if preset in load_presets():
            options = ["--model", preset.id]
        command = quoted("patchkit", "env", *options)
        yield f"the environment must hold {' '.join(pairs)}: `{command}` writes it"
    if preset.needs_token:
        yield f"{preset.id} needs its licence accepted at Hugging Face, and HF_TOKEN"
    if preset.evidence == SINGLE_REPORT:
        yield f"the preset rests on one report ({preset.source})"
    if preset.note:
        yield preset.note
