"""Print the flags of `vllm serve`: `patchkit serve-args`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import dim, next_step, record_fields, style, table, tell
from patchkit.cli.render import Blocks, Data, Record, Row, options_of, rendered
from patchkit.cli.runtime.memory_lines import memory_lines
from patchkit.cli.runtime.node_options import node_options, note_lines
from patchkit.errors import PatchkitError, UsageError
from patchkit.frozen import Fields
from patchkit.runtime.envfile.env_file import read_env_file
from patchkit.runtime.host.host import Host
from patchkit.runtime.memory.checkpoint import (
    find_checkpoint,
    read_count,
    weights_gib,
)
from patchkit.runtime.memory.plan import LENGTH, MemoryPlan
from patchkit.runtime.memory.pool import memory_pool
from patchkit.runtime.node.decision import NodeOptions, decide_node
from patchkit.runtime.rules.presets import Preset, load_flag_rules, load_presets
from patchkit.runtime.rules.rule import RuleChoice
from patchkit.runtime.serve.args import ServeCommand, find_drafter, serve_args
from patchkit.runtime.serve.request import (
    ServeRequest,
    choose_preset,
    listen_address,
    models_url,
)

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
