"""Choose the flags of `vllm serve` for a node from rules and a preset, each with its reason."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from patchkit.errors import DriftError, HostError, UsageError
from patchkit.frozen import Fields, Values, frozen, positional
from patchkit.records import read_json
from patchkit.runtime.memory.budget import load_budget
from patchkit.runtime.memory.checkpoint import read_count
from patchkit.runtime.memory.plan import (
    CACHE_BYTES,
    LENGTH,
    SHARE,
    MemoryPlan,
    plan_memory,
)
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.presets import (
    DRAFTING,
    Broken,
    FlagRule,
    FlagRules,
    LeaveOut,
    Preset,
    find_recipe,
    has_flag,
    load_choices,
    load_flag_rules,
    same_value,
)
from patchkit.runtime.rules.rule import Advice, Names, select_entries
from patchkit.runtime.serve.command_notes import (
    RECURRENT,
    Module,
    asked_modules,
    context_notes,
    first_start_notes,
    flag_notes,
    model_notes,
    speed_notes,
)
from patchkit.runtime.serve.dense_layers import find_dense_layers
from patchkit.runtime.serve.request import (
    ServeRequest,
    check_model,
    check_rank,
    check_size,
    count_nodes,
    listen_notes,
    memory_request,
    release_faults,
)
from patchkit.units import BYTES_PER_MIB, MIB_PER_GIB

# Origins of flags that a release may lack: such a flag is left out, with a note.
_FROM_PRESET = ("preset", "drafter")

_FACT = re.compile(r"\{(\w+)\}")


@frozen
class ServeFlag:
    """A flag; ``value`` is "" for a bare flag.

    ``origin`` is the id of a rule, "preset", or "recipe" for a flag of upstream's recipe that the
    command lacks.
    """

    flag: str
    value: str
    reason: str
    source: str
    origin: str
    evidence: str

    @property
    def words(self) -> Names:
        return (self.flag, self.value) if self.value else (self.flag,)


@frozen
class ServeCommand:
    """A `vllm serve` command with what a user should know about it.

    ``left_out`` are flags that are not set on purpose, each with its reason. ``off`` are the rules
    that apply but are off. ``modules`` are those that vLLM asks FlashInfer for. ``plan`` is what
    the node's memory will hold, None if its size or the model's is unknown.
    """

    request: ServeRequest
    flags: tuple[ServeFlag, ...]
    left_out: tuple[ServeFlag, ...]
    off: tuple[FlagRule, ...]
    advice: tuple[Advice, ...]
    modules: tuple[Module, ...]
    plan: MemoryPlan | None
    notes: Names

    @property
    def words(self) -> Names:
        flags = (word for flag in self.flags for word in flag.words)
        return ("vllm", "serve", self.request.model, *flags)

    @property
    def limits(self) -> Names:
        """Return only the notes on memory and speed."""
        flags = {flag.flag: flag.value for flag in self.flags}

        return (
            *filter(None, [self.request.memory.note]),
            *speed_notes(self.request, flags),
        )


def serve_args(
    request: ServeRequest, rules: FlagRules, home: Path | None = None
) -> ServeCommand:
    """Return the command that serves a model on a node.

    ``home`` is the folder of the node's vLLM: if it is given, its flags count instead of those of
    the release. Raises UsageError for a wrong request, HostError if the model does not fit or the
    release cannot serve it, DriftError if the release lacks a flag that a rule sets.
    """
    check_model(request.model, request.node)
    check_rank(request)
    faults = release_faults(request)

    situation = request.node.situation
    selection = _select_flags(request, rules, home, {})
    memory = memory_request(request, selection.values)
    plan = plan_memory(memory) if memory else None
    one_holds = "no"
    if memory and plan:
        least = count_nodes(request, memory)
        check_size(request, plan, least)
        one_holds = "yes" if least.nodes == 1 else "no"

    planned_facts = _planned_facts(request, plan) if plan else {}
    if planned_facts:
        selection = _select_flags(request, rules, home, planned_facts)
    fitting, idle = request.choice.divide(_fitting_rules(request, rules, planned_facts))
    _check_choice(request, rules, fitting, idle)
    values = selection.values
    refused = selection.refused

    unwanted = [rule for rule in idle if rule.id in request.choice.unwanted]
    reasons = {rule.flag: f"--without {rule.id}" for rule in unwanted}
    reasons.update(refused)
    unlike = list(_unlike_recipe(request.node.preset, values, reasons))

    advice = [_fault_advice(fault, request) for fault in faults]
    advice += select_entries(rules.advice, {**situation, "one_holds": one_holds})

    modules = asked_modules(request.node, values)
    left_out = select_entries(rules.leave_out, situation)
    discouraged = [_flag_of_rule(rule, rule.values) for rule in left_out]
    return ServeCommand(
        request=request,
        flags=selection.flags,
        left_out=(*discouraged, *unlike),
        off=idle,
        advice=tuple(advice),
        modules=modules,
        plan=plan,
        notes=(
            *listen_notes(request),
            *model_notes(request),
            *context_notes(plan, {**values, **request.given}),
            *speed_notes(request, values),
            *first_start_notes(request.node, modules),
            *_refusal_notes(refused, unlike),
            *flag_notes(values),
        ),
    )


@frozen
class FlagSelection:
    """The flags of a command in the order of the data, and name → reason for those left out."""

    flags: tuple[ServeFlag, ...]
    refused: Values

    @property
    def values(self) -> Values:
        return {flag.flag: flag.value for flag in self.flags}


def _select_flags(
    request: ServeRequest,
    rules: FlagRules,
    home: Path | None,
    planned_facts: Values,
) -> FlagSelection:
    """Return the flags for a request; ``planned_facts`` are those of a plan of its memory."""
    fitting = _fitting_rules(request, rules, planned_facts)
    active, _idle = request.choice.divide(fitting)
    left_out = select_entries(rules.leave_out, request.node.situation)

    refused = {}
    chosen = _choose_flags(active, request, rules)
    for name, flag in chosen.items():
        against = [
            rule.reason for rule in left_out if rule.is_against(name, flag.value)
        ]
        reason = against[0] if against else _check_known(flag, request.node, home)
        if reason:
            refused[name] = reason

    # Sort by the order of the data, so that the commands of two releases can be compared.
    order = [*(rule.flag for rule in rules.rules), *rules.preset, *chosen]
    kept = [flag for flag in chosen.values() if flag.flag not in refused]
    kept.sort(key=lambda flag: order.index(flag.flag))
    return FlagSelection(flags=tuple(kept), refused=refused)


def _planned_facts(request: ServeRequest, plan: MemoryPlan) -> Values:
    """Return the facts of a plan that rules fill in, {} if it does not have all parts.

    ``cache_bytes`` is what is left for the cache where CPU and GPU share the memory. A longest
    context and a number of sequences are facts only where those of the command do not fit. Raises
    HostError if a context that the user asks for does not fit.
    """
    if not plan.is_whole:
        return {}

    longest = plan.longest_context
    limit = _context_limit(request)
    if LENGTH in request.given and plan.context > limit:
        raise HostError(
            f"a context of {plan.context:,} tokens does not fit the model: its own limit is "
            f"{limit:,}",
            why="vLLM takes no longer one (max_position_embeddings in its config)",
            hint=f"take --ctx {min(longest, limit)}",
        )

    is_too_long = longest < plan.context
    if LENGTH in request.given and is_too_long:
        raise HostError(
            f"a context of {plan.context:,} tokens does not fit: its cache takes "
            f"{plan.request_gib(plan.context):.1f} GiB per node, and {plan.cache_gib:.1f} are "
            "left for it",
            why="the memory also holds what `patchkit serve-args` shows",
            hint=f"take --ctx {longest}, or more nodes",
        )

    sequences = plan.fitting_sequences(1)
    cache_bytes = int(plan.cache_gib * MIB_PER_GIB) * BYTES_PER_MIB
    is_planned = request.memory.shared and CACHE_BYTES not in request.given
    return {
        "cache_bytes": str(cache_bytes) if is_planned else "",
        "longest": str(longest) if is_too_long else "",
        "fitting": str(sequences) if sequences < plan.sequences else "",
    }


def _context_limit(request: ServeRequest) -> float:
    """Return the most tokens that vLLM lets a context have, infinity if something may add to it."""
    config = request.checkpoint.config if request.checkpoint else {}
    names = {key for key, value in config.items() if value}
    names.update(request.given, request.node.extra)
    # Newer configs always have it, and scale with a factor.
    is_scaled = "factor" in str(config.get("rope_parameters"))
    if is_scaled or names.intersection(load_budget().longer):
        return math.inf
    return read_count(config, "max_position_embeddings") or math.inf


def _fitting_rules(
    request: ServeRequest, rules: FlagRules, planned_facts: Values
) -> tuple[FlagRule, ...]:
    """Return the rules that apply, with their facts filled in."""
    candidates = select_entries(rules.rules, request.node.situation)
    return tuple(fill_rules(candidates, request, planned_facts))


def _check_choice(
    request: ServeRequest,
    rules: FlagRules,
    *fitting: Iterable[FlagRule],
) -> None:
    """Raise UsageError if --with or --without names no rule, or --with one that does not apply."""
    request.choice.check(rules.rules, "`patchkit serve-args … --explain` lists them")
    fitting_ids = {rule.id for group in fitting for rule in group}
    without_effect = sorted(request.choice.wanted - fitting_ids)

    if without_effect:
        raise UsageError(
            f"--with {without_effect[0]} would change nothing here",
            why="its condition does not hold for this release, model and place, or it is about "
            "what a checkpoint says that is not here",
            hint="`--explain` lists the rules that can be turned on",
        )


def _fault_advice(fault: Broken, request: ServeRequest) -> Advice:
    """Return a fault of the release with the model as advice."""
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
    active: Sequence[FlagRule],
    request: ServeRequest,
    rules: FlagRules,
) -> dict[str, ServeFlag]:
    """Return name → flag for the flags of default rules, the preset and --with.

    A later one of these three replaces an earlier one.
    """
    defaults = [rule for rule in active if rule.default]
    chosen = {rule.flag: _flag_of_rule(rule, rule.value) for rule in defaults}

    preset = request.node.preset
    for name, value in preset.flags.items() if preset else ():
        if value is False:
            # False removes the flag that a rule sets; --with can still set it.
            chosen.pop(name, None)
        elif preset and name != DRAFTING:
            reason = f"{rules.preset.get(name, '')} As {preset.name} is served.".strip()
            chosen[name] = _flag(preset, name, value, reason, "preset")

    if not request.memory.shared:
        # The share leaves memory for the CPU, and is only needed if CPU and GPU share it.
        chosen.pop(SHARE, None)

    for rule in active:
        is_planned = rule.planned and rule.default
        if is_planned or rule.id in request.choice.wanted:
            chosen[rule.flag] = _flag_of_rule(rule, rule.value)

    return _join_parts(chosen)


def _join_parts(chosen: Mapping[str, ServeFlag]) -> dict[str, ServeFlag]:
    """Merge each FLAG.KEY into the JSON value of FLAG, since vLLM would let it replace FLAG."""
    joined = {name: flag for name, flag in chosen.items() if "." not in name}

    for name, part in chosen.items():
        whole_name, dot, key = name.partition(".")
        if dot and whole_name in joined:
            whole = joined[whole_name]
            values = {**json.loads(whole.value), key: part.value}
            joined[whole_name] = replace(
                whole,
                value=json.dumps(values, separators=(",", ":")),
                reason=f"{whole.reason} {part.reason}",
            )

    return joined


def _flag_of_rule(rule: FlagRule | LeaveOut, value: str) -> ServeFlag:
    return _flag(rule, rule.flag, value, rule.reason, rule.id)


def _flag(
    by: Preset | FlagRule | LeaveOut,
    flag: str,
    value: str | bool,
    reason: str,
    origin: str,
) -> ServeFlag:
    return ServeFlag(
        flag=flag,
        value="" if value is True else str(value),
        reason=reason,
        origin=origin,
        source=by.source,
        evidence=by.evidence,
    )


def _check_known(flag: ServeFlag, node: Node, home: Path | None) -> str:
    """Return why the release does not take a flag, "" if it does.

    Raises DriftError instead if the flag is a rule's, or if the preset is for a special build.
    """
    trouble = _find_lack(flag, node.vllm, home)
    if not trouble:
        return ""

    build = node.preset.build if node.preset else ""
    if build:
        why = f"the preset is for {build}"
        hint = (
            "name the Python that has that build with --python; "
            "or flags that fit any model: --preset none"
        )
    elif flag.origin in _FROM_PRESET:
        return trouble
    else:
        why = "the rules know another vLLM than this one"
        hint = "leave the rule out with --without ID, or --preset none; and report it"

    raise DriftError(f"{trouble} ({flag.origin})", why=why, hint=hint)


def _find_lack(flag: ServeFlag, vllm: str, home: Path | None) -> str:
    """Return why a release does not know a flag or its value, "" if it does."""
    if not has_flag(flag.flag, vllm, home):
        return f"vLLM {vllm} has no {flag.flag}"

    values = {flag.flag: flag.value}
    if flag.flag == DRAFTING:
        for key, setting in read_json(Fields, flag.value).items():
            # A key may have a flag's name, for example to choose kernels for the drafting model. So
            # its value is also checked as that flag's.
            values[f"{DRAFTING}.{key}"] = str(setting)
            values[f"--{key.replace('_', '-')}"] = str(setting)

    for name, value in values.items():
        choices = load_choices().get(name)
        if choices and not choices.allowed_by(vllm).allows(value):
            return f"vLLM {vllm} does not take {flag.flag} {value}"

    return ""


def _unlike_recipe(
    preset: Preset | None,
    values: Values,
    refused: Values,
) -> Iterator[ServeFlag]:
    """Yield each setting of upstream's recipe for a GB10 that the command lacks, with the reason.

    ``values`` are the flags of the command, and ``refused`` has reasons for flags left out.
    """
    recipe = preset and find_recipe(preset.id)
    if not preset or not recipe:
        return

    settings = {**values, **preset.variables}
    for name, value in recipe.settings.items():
        if same_value(settings.get(name), value):
            continue

        reason = preset.reason(name, value) or refused.get(name, "")
        yield _flag(preset, name, value, reason, "recipe")


def _refusal_notes(refused: Values, unlike: Iterable[ServeFlag]) -> Iterator[str]:
    """Yield notes on flags that are left out, and on those that differ from upstream's recipe."""
    for setting, reason in refused.items():
        yield f"{setting} is left out: {reason}"

    common_reasons = load_flag_rules().recipe.values()
    names = [flag.flag for flag in unlike if flag.reason not in common_reasons]
    if names:
        yield f"not as upstream's recipe for a GB10: {', '.join(names)}; --explain says why"


def fill_rules(
    rules: Iterable[FlagRule], request: ServeRequest, planned_facts: Values
) -> Iterator[FlagRule]:
    """Yield the rules with their ``{facts}`` filled in; skip a rule with an unknown fact."""
    drafter = find_drafter(request)
    facts = {
        "nodes": str(request.node.nodes),
        "rank": str(request.number),
        "head": request.node.head,
        "host": request.host,
        "port": str(request.port),
        "master_port": str(request.master_port),
        "stacks": request.stacks,
        # Half of the time, so that the stacks are written before the server is killed. If it is
        # never killed, vLLM's own default of 300 s.
        "hung": str(request.frozen // 2 or 300),
        "watched": "/metrics" if request.frozen else "",
        "drafter": drafter.setting,
        # The blocks of the attention cache are multiples of 16 tokens.
        "match_unit": "16" if _is_recurrent(request) else "",
        "draft_head": "fp8" if _shares_plain_head(request, drafter) else "",
        "context": request.given.get(LENGTH, ""),
        **_dense_facts(request),
        **planned_facts,
    }

    for rule in rules:
        names = _FACT.findall(rule.value + rule.reason)
        if all(map(facts.get, names)):
            is_other_drafter = rule.flag == DRAFTING and not drafter.is_default
            yield replace(
                rule,
                value=_FACT.sub(lambda fact: facts[fact[1]], rule.value),
                reason=_FACT.sub(lambda fact: facts[fact[1]], rule.reason),
                optional=rule.optional or is_other_drafter,
            )


def _is_recurrent(request: ServeRequest) -> bool:
    """Return whether flags of the preset or keys of the config are about Mamba or GDN layers."""
    preset = request.node.preset
    names = [flag.lstrip("-") for flag in (preset.flags if preset else ())]

    if request.checkpoint:
        names += request.checkpoint.config
    return any(name.startswith(RECURRENT) for name in names)


def _dense_facts(request: ServeRequest) -> Values:
    """Return the facts about dense layers in 16 bits, each "" if there are none.

    ``dense`` is the flag's value to convert them; ``reads`` and ``less`` are the GB that are read
    for a token without and with the conversion.
    """
    checkpoint = request.checkpoint
    dense = checkpoint and find_dense_layers(checkpoint, request.node.nodes)
    if not checkpoint or not dense:
        return {"dense": "", "reads": "", "less": ""}

    return {
        "dense": dense.setting,
        "reads": f"{checkpoint.reads / 1e9:.3g}",
        "less": f"{(checkpoint.reads - dense.saved) / 1e9:.3g}",
    }


@positional
class Drafter:
    """A way of drafting: ``setting`` is the JSON for ``--speculative-config``, "" for none.

    ``is_default`` says that it is on unless the user turns it off.
    """

    setting: str
    is_default: bool


def find_drafter(request: ServeRequest) -> Drafter:
    """Return the drafter of the preset or, without a preset, of upstream's recipe."""
    preset = request.node.preset
    if preset:
        setting = str(preset.flags.get(DRAFTING) or "")
        return Drafter(setting or preset.drafter, is_default=bool(setting))

    recipe = find_recipe(request.model)
    return Drafter(recipe.drafter if recipe else "", is_default=False)


def _shares_plain_head(request: ServeRequest, drafter: Drafter) -> bool:
    """Return whether the drafter is on and shares the model's head, and the head is in 16 bits."""
    checkpoint = request.checkpoint
    if checkpoint is None or not checkpoint.has_plain_head:
        return False

    choice = request.choice
    is_on_by_default = drafter.is_default and "drafter" not in choice.unwanted
    if not is_on_by_default and "drafter" not in choice.wanted:
        return False

    # A drafter from a second checkpoint may have its own head.
    config: dict[str, object] = json.loads(drafter.setting or "{}")
    return config.get("method") == "mtp" and "model" not in config
