"""Write env files, explain variables, print flags: `env`, `env explain`, `serve-args`."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import (
    bold,
    dim,
    next_step,
    next_verb,
    record_fields,
    style,
    table,
    tell,
)
from patchkit.cli.render import (
    GOOD,
    Blocks,
    Data,
    Lines,
    Record,
    Row,
    VerbGroup,
    fact_lines,
    options_of,
    rendered,
    section,
)
from patchkit.cli.runtime.node_options import memory_lines, node_options, note_lines
from patchkit.errors import PatchkitError, UsageError
from patchkit.frozen import Fields
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.envfile.env_file import Format, read_env_file, read_head, write
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.software import find_ptxas
from patchkit.runtime.memory.checkpoint import (
    find_checkpoint,
    read_count,
    weights_gib,
)
from patchkit.runtime.memory.plan import LENGTH, MemoryPlan
from patchkit.runtime.memory.pool import memory_pool
from patchkit.runtime.node.cluster_env import (
    ClusterEnv,
    adopt_shared_settings,
    file_text,
    make_cluster_env,
)
from patchkit.runtime.node.decision import NodeOptions, decide_node
from patchkit.runtime.rules.presets import Preset, load_flag_rules, load_presets
from patchkit.runtime.rules.releases import (
    Lifetime,
    OtherVariable,
    lifetime,
    other_variables,
    read_table,
)
from patchkit.runtime.rules.rule import (
    CACHES,
    Avoid,
    RuleChoice,
    VariableRule,
    VariableRules,
    describe_condition,
    describe_routes,
    load_variable_rules,
)
from patchkit.runtime.rules.secret_texts import is_secret
from patchkit.runtime.rules.spelling import nearest_hint
from patchkit.runtime.rules.variable_values import TAKEN
from patchkit.runtime.serve.args import ServeCommand, find_drafter, serve_args
from patchkit.runtime.serve.request import (
    ServeRequest,
    choose_preset,
    listen_address,
    models_url,
)

_Entry = VariableRule | Avoid


@click.group(
    cls=VerbGroup, invoke_without_command=True, subcommand_metavar="[explain] …"
)
@node_options
@options_of("env")
@click.pass_context
@rendered
def env_command(context: click.Context, /, **options: Any) -> Blocks:
    """Write an env file for this node, from its hardware and software.

    \b
      patchkit env
      patchkit env --role head --nodes 2 -o head.env
      patchkit env --role worker --from head.env -o worker.env

    Probes interfaces, RDMA devices and the installed vLLM, applies the rules that
    `patchkit env explain` lists, and checks each name against what the installed versions read.
    """
    if context.invoked_subcommand is None:
        yield from _env_blocks(**options)


def _env_blocks(
    request: NodeOptions, choice: RuleChoice, host: Host, root: Path, **options: Any
) -> Blocks:
    extra = _read_assignments(options["extra"])
    head = None
    if path := options["head_file"]:
        role = request.role or "single"
        head = read_head(path, role)

    request = replace(
        request,
        model=options["model"],
        extra=extra,
        choice=choice,
    )

    env = make_cluster_env(
        decide_node(request, host, head),
        host,
        load_variable_rules(),
        nccl=request.nccl,
        ptxas=find_ptxas(root, os.environ),
        caches=str(Path.home() / CACHES),
    )
    if head:
        env = adopt_shared_settings(env, head)

    kind = Format(options["kind"])
    hostname = host.system.hostname
    text = file_text(env, kind, hostname=hostname, target=request.target)
    variables = {}
    reasons = {}
    for setting in env.settings:
        reasons[setting.name] = setting.comment
        if not is_secret(setting.name):
            variables[setting.name] = setting.value

    yield {"variables": variables, "reasons": reasons, "notes": env.notes}

    output: Path | None = options["output"]
    if output is None or output == Path("-"):
        yield Data(text)
        for line in _env_notes(env):
            tell(line)
        return

    # A variable without a value stands for a secret: a file with one is for its owner alone.
    private = any(not setting.value for setting in env.settings)
    outcome = write(output, text, force=options["force"], private=private)

    node = env.node
    what = f"{len(env.settings)} variables for {node.role}, {node.attachment.topology}"
    yield GOOD + f"{output} {outcome}: {what}{env.where}"
    yield from _env_notes(env)

    if node.role == "head":
        copy = output.name
        where = f"on each worker, with a copy of {copy} there"
        words = ("--role", "worker", "--from", Path(copy), "-o", "worker.env")
        yield next_verb("env", *words, where=where)

    # The example is the first preset, since that model fits on one Spark as well as on more.
    model = options["model"] or load_presets()[0].id
    yield next_verb("serve-args", model, "--from", output)


def _read_assignments(texts: Sequence[str]) -> dict[str, str]:
    """Return the variables of --set by name. Raises UsageError if a text is not NAME=VALUE."""
    variables = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not name or not sign:
            hint = "write it as --set NAME=VALUE"
            raise UsageError(f"--set {text}: is not an assignment", hint=hint)

        variables[name] = value
    return variables


def _env_notes(env: ClusterEnv) -> Lines:
    """Yield the notes of an env file, and the rules that are off by default."""
    yield from note_lines(env.notes, env.advice)

    off = [rule.id for rule in env.off if rule.id not in env.node.choice.unwanted]
    if off:
        explain = quoted("patchkit", "env", "explain", off[0])
        reason = f"`{explain}` says why, --with {off[0]} turns it on"
        yield dim("off") + f" by default: {', '.join(off)}; {reason}"


@env_command.command("explain")
@options_of("env-explain")
@rendered
def explain_variable(name: str | None) -> Blocks:
    """Explain what a variable does here, why, since when, who says so, and what guides say.

    VARIABLE may be the id of a rule as well. Without it: everything that has a rule.
    """
    rules = load_variable_rules()
    if name is None:
        yield from _overview_blocks(rules)
        return

    entries = [rule for rule in rules.entries if name in (rule.id, *rule.variables)]

    life = lifetime(name)
    reader = other_variables().get(name)
    claims = _claims_about(name)
    if not (entries or life or reader or claims):
        names = [
            text for entry in rules.entries for text in (*entry.variables, entry.id)
        ]

        hint = nearest_hint(name, names, "`patchkit env explain` lists the rules")
        raise UsageError(f"nothing is known of {name}", hint=hint)

    rule_fields = []
    avoids = []
    for entry in entries:
        if isinstance(entry, Avoid):
            avoids.append(entry)
        else:
            rule_fields.append(record_fields(entry) | {"default": entry.default})

    yield {
        "name": name,
        "lifetime": life,
        "meaning": reader.meaning if reader else None,
        "rules": rule_fields,
        "avoids": avoids,
        "claims": claims,
    }

    yield bold(name)
    yield from _reader_lines(name, life, reader)

    for entry in entries:
        yield ""
        yield from _entry_lines(entry)

    for claim in claims:
        yield ""
        text = f"  what guides say, {claim['verdict']}: {claim['says']}"
        yield style(claim["id"], fg="cyan") + text
        yield next_step("patchkit", "explain", claim["id"])


def _reader_lines(
    name: str, life: Lifetime | None, reader: OtherVariable | None
) -> Lines:
    """Yield which releases read a variable, and which values they take."""
    if life:
        # Only for variables of vLLM and NCCL is it known which releases read them.
        project = "NCCL" if name.startswith("NCCL_") else "vLLM"
        until = "on" if life.is_current else f"to {life.last}"
        default = life.default or "unset"
        yield f"  {project} reads it from {life.first} {until}; default: {default}"
        if not life.is_current:
            yield f"  {project} after {life.last} ignores it: leave it out there"

    for row in read_table(TAKEN).rows:
        if row.name == name:
            yield f"  {row.first} to {row.last}: {row.default}"

    if reader:
        program = f"  {reader.of} {reader.versions}".rstrip()
        yield f"{program} reads it: {reader.meaning}"


def _claims_about(name: str) -> list[dict[str, str]]:
    """Return the claims of guides that name a variable, as they are in the data.

    Reading the data directly works on a node, which lacks the libraries of `patchkit explain`.
    """
    place = RECIPES / "vllm/folklore.toml"
    claims = read_toml(tuple[dict[str, Any], ...], place, key="claim")
    whole_name = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    keys = ("id", "verdict", "says", "instead")
    return [
        {key: claim[key] for key in keys}
        for claim in claims
        if whole_name.search(claim["says"])
    ]


def _overview_blocks(rules: VariableRules) -> Blocks:
    yield Record(rules)

    rows = []
    for rule in rules.rules:
        state = "" if rule.default else "off"
        rows.append((rule.id, state, describe_condition(rule.when), _assignments(rule)))
    yield from section("Set", rows)

    rows = []
    for avoid in rules.avoids:
        names = " ".join(avoid.variables)
        rows.append((avoid.id, avoid.severity, describe_condition(avoid.when), names))
    yield from section("Better left out", rows)

    yield "`patchkit env explain VARIABLE` says why, who says so, and what guides say."


def _assignments(rule: VariableRule) -> str:
    return " ".join(f"{name}={value}" for name, value in rule.set.items())


def _entry_lines(entry: _Entry) -> Lines:
    facts = {"when": describe_condition(entry.when) or "always", "why": entry.reason}
    if isinstance(entry, VariableRule):
        scope = "each node its own"
        if entry.scope == "shared":
            scope = "the same on all nodes"
        yield style(entry.id, fg="green") + f"  sets {_assignments(entry)}  ({scope})"
        if not entry.default:
            reason = "it rests on a single report"
            if entry.optional:
                reason = "a choice of yours"
            facts["off"] = f"{reason}: --with {entry.id} turns it on"
    else:
        yield style(entry.id, fg="yellow") + f"  {entry.severity}: better left out"
        facts["instead"] = entry.instead

    for releases, text in entry.by_release.items():
        facts[f"why in {releases}"] = text

    evidence = f"{entry.evidence}, confidence {entry.confidence}"
    facts |= {
        "leads": describe_routes(entry.routes),
        "source": f"{entry.source} ({evidence})",
        "guides": entry.guides,
    }
    yield from fact_lines(facts)


_HEADS = (
    "model",
    "quantization",
    "GiB",
    "Sparks",
    "memory",
    "tokens",
    "at most",
    "vLLM",
    "evidence",
)
_ANY_ADDRESS = "192.0.2.1"  # of a head, for documentation: a plan does not depend on it
_UNKNOWN = (
    "at most: the longest context that fits; ?: unknown without the model's files here, or "
    "without a release: `patchkit serve-args MODEL --vllm X.Y.Z`"
)


@click.command
@node_options
@options_of("serve-args")
@rendered
def serve_args_command(
    model: str | None,
    presets: bool,
    explain: bool,
    **options: Any,
) -> Blocks:
    """Print the `vllm serve` flags that go with the env, valid for the installed version.

    \b
      patchkit serve-args openai/gpt-oss-120b
      patchkit serve-args Qwen3.5-122B-A10B-FP8 --from head.env
      patchkit serve-args Qwen3.5-122B-A10B-FP8 --from head.env --role worker

    MODEL is a name at Hugging Face, a folder, or the last part of a preset's name. Prints one line
    for the shell.
    """
    if presets:
        rows = [(row, _longest_context(row, options)) for row in load_presets()]
        yield Record(
            [
                record_fields(row) | {"name": row.name, "longest_context": longest}
                for row, longest in rows
            ]
        )
        yield from table(starmap(_preset_row, rows), heads=_HEADS)
        tell(_UNKNOWN)
        return
    if not model:
        raise UsageError("missing MODEL", hint="OWNER/NAME, a folder, or one of --list")

    command = serve_command(model, **options)
    url = models_url(command.request)
    yield _command_fields(command, url)

    if explain:
        yield from table(_flag_rows(command))
    else:
        yield Data(shlex.join(command.words) + "\n")

    # Standard output is for the command alone.
    for line in memory_lines(command.plan):
        tell(line)
    for line in note_lines(command.notes, command.advice):
        tell(line)
    if url:
        tell(next_step("curl", url, where="once it serves"))


def _longest_context(preset: Preset, options: Fields) -> int:
    """Return the tokens of the longest request that fits on the preset's nodes, 0 if unknown."""
    checkpoint = find_checkpoint(preset.id, os.environ)
    if checkpoint is None:
        return 0

    request = options["request"]
    if not preset.single:
        cluster = {"role": "head", "head": _ANY_ADDRESS, "topology": "socket"}
        request = replace(request, nodes=preset.nodes, **cluster)
    with suppress(PatchkitError):  # no release is named, or it does not fit
        plan = serve_command(preset.id, **{**options, "request": request}).plan
        most = read_count(checkpoint.config, "max_position_embeddings")
        return replace(plan, context=most).longest_context if plan else 0
    return 0


def _preset_row(preset: Preset, longest: int) -> Row:
    return (
        preset.id,
        preset.quantization,
        "?" if preset.weights_gib is None else f"{preset.weights_gib:.0f}",
        "1" if preset.single else f"{preset.nodes}",
        str(preset.flags.get("--gpu-memory-utilization", "")),
        str(preset.flags.get("--max-model-len", "")),
        str(longest or "?"),
        f">={preset.min_vllm}" + (" (a build)" if preset.build else ""),
        f"{preset.evidence}, {preset.confidence}",
    )


def _command_fields(command: ServeCommand, url: str) -> Fields:
    node = command.request.node
    preset = node.preset

    return {
        **record_fields(command, "request", "plan"),
        "vllm": node.vllm,
        "role": node.role,
        "nodes": node.nodes,
        "command": command.words,
        "executor": node.executor.name,
        "preset": preset.id if preset else None,
        "variables": preset.variables if preset else {},
        "url": url,
        "memory": command.request.memory,
        "plan": _plan_fields(command.plan),
    }


def _plan_fields(plan: MemoryPlan | None) -> Fields | None:
    """Return the fields of a plan of the memory, for machines."""
    if plan is None:
        return None
    return {
        "is_whole": plan.is_whole,
        "rows": plan.rows,
        "outside": plan.outside,
        "cache_gib": plan.cache_gib,
        "context": plan.context,
        "longest_context": plan.longest_context,
        "sequences": plan.fitting_sequences(plan.longest_context),
    }


def serve_command(
    model: str, request: NodeOptions, choice: RuleChoice, host: Host, **options: Any
) -> ServeCommand:
    """Return the command for the options; its errors are those of ``serve_args``."""
    if options.get("listen") and options.get("address"):
        what = "--listen and --host both say where to listen"
        raise UsageError(what, hint="leave one out")

    path = options.get("env_file")
    file = read_env_file(path) if path else None
    preset = choose_preset(model, options.get("preset"), os.environ)
    request = replace(request, model=preset.id if preset else "")

    # The command may be for another machine: do not require this one to have the address.
    node = decide_node(request, host, file, addressed=False)
    listen = options.get("listen") or "local"
    # The last part of a preset's id stands for the whole, unless it is a folder.
    is_short = preset and model.lower() == preset.name.lower()
    if preset and is_short and not Path(model).is_dir():
        model = preset.id

    serving = ServeRequest(
        model=model,
        node=node,
        memory=memory_pool(host, node),
        rank=options.get("node_rank"),
        host=options.get("address") or listen_address(listen, node, host),
        port=options.get("port", 8000),
        folder_gib=weights_gib(model, os.environ),
        checkpoint=find_checkpoint(model, os.environ),
        choice=choice,
        given={LENGTH: str(options["ctx"])} if options.get("ctx") else {},
    )

    drafting = json.loads(find_drafter(serving).setting or "{}")
    if drafter := drafting.get("model"):
        serving = replace(serving, drafter_gib=weights_gib(drafter, os.environ))
    return serve_args(serving, load_flag_rules(), host.vllm_home(node.vllm))


def _flag_rows(command: ServeCommand) -> Iterator[Row]:
    """Yield each flag with its reason, then flags that were left out, then rules that are off."""
    dash = dim("-")
    for sign, flags in (
        (style("✓", fg="green"), command.flags),
        (dash, command.left_out),
    ):
        for row in flags:
            reason = f"{row.reason} ({row.origin}; {row.source})"
            yield sign, " ".join(row.words), " ".join(reason.split())

    for rule in command.off:
        reason = f"{rule.reason} ({rule.id})"
        yield dim("off"), f"{rule.flag} {rule.value}", reason
