"""Print the flags of `vllm serve`: `patchkit serve-args`."""

from __future__ import annotations

import json
import os
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from patchkit.cli import complete
from patchkit.cli.out import PATH, next_step, record_fields, style, table, tell
from patchkit.cli.render import Block, Data, Record, lead_word, rendered
from patchkit.cli.runtime.node_options import node_options, note_lines
from patchkit.errors import UsageError
from patchkit.runtime.envfile.env_file import read_env_file
from patchkit.runtime.host.host import Host
from patchkit.runtime.node.decision import NodeOptions, decide_node
from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import Preset, load_presets
from patchkit.runtime.rules.rule import RuleChoice
from patchkit.runtime.serve.args import ServeCommand, serve_args
from patchkit.runtime.serve.checkpoint import find_checkpoint
from patchkit.runtime.serve.facts import drafter_of
from patchkit.runtime.serve.listen import CHOICES as LISTEN
from patchkit.runtime.serve.listen import listen_address, models_url
from patchkit.runtime.serve.model import memory_pool, preset_of, weights_gib
from patchkit.runtime.serve.request import ServeRequest

_HEADS = (
    "model",
    "quantization",
    "GiB",
    "Sparks",
    "memory",
    "tokens",
    "vLLM",
    "evidence",
)
# Facts of an env file that the command line is made from.
_TAKEN = (
    "role",
    "topology",
    "executor",
    "vllm",
    "nodes",
    "head",
    "target",
    "quantization",
)


@click.command("serve-args")
@click.argument("model", required=False, shell_complete=complete.models)
@node_options
@click.option(
    "--node-rank", type=click.IntRange(0), metavar="R", help="The worker's number."
)
@click.option(
    "--preset",
    shell_complete=complete.models,
    help="Of another model; none: no preset.",
)
@click.option("--recipe", type=PATH, help="A recipe: YAML of vLLM, eugr or sparkrun.")
@click.option("--from", "env_file", type=PATH, help="The env file that goes with it.")
@click.option(
    "--listen", type=click.Choice(LISTEN), help="Who may ask; default: this machine."
)
@click.option(
    "--host",
    "address",
    metavar="A",
    help="Listen on this address, instead of --listen.",
)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option(
    "--explain", is_flag=True, help="Show each flag's reason, and what is left out."
)
@click.option(
    "--list", "presets", is_flag=True, help="List the models that have presets."
)
@rendered
def serve_args_command(
    model: str | None,
    *,
    presets: bool,
    explain: bool,
    asked: NodeOptions,
    **options: Any,
) -> Iterator[Block]:
    """Print the `vllm serve` flags that go with the env, valid for the installed version.

    \b
      patchkit serve-args openai/gpt-oss-120b
      patchkit serve-args --recipe recipe.yaml
      patchkit serve-args Qwen3.5-122B-A10B-FP8 --from head.env
      patchkit serve-args Qwen3.5-122B-A10B-FP8 --from head.env --role worker

    MODEL is a name at Hugging Face, a folder, or the last part of a preset's name. Prints one line
    for the shell.
    """
    if presets:
        # The presets as presets.toml has them.
        yield Record(
            [
                {**record_fields(preset), "name": preset.name}
                for preset in load_presets()
            ]
        )
        rows = [
            (
                it.id,
                it.quantization,
                "?" if it.weights_gib is None else f"{it.weights_gib:.0f}",
                "1" if it.single else f"{it.nodes}",
                str(it.flags.get("--gpu-memory-utilization", "")),
                str(it.flags.get("--max-model-len", "")),
                f">={it.min_vllm}" + (" (a build)" if it.build else ""),
                f"{it.evidence}, {it.confidence}",
            )
            for it in load_presets()
        ]
        yield from table(rows, heads=_HEADS)
        return
    if not model and not options["recipe"]:
        raise UsageError("missing MODEL", hint="OWNER/NAME, a folder, or one of --list")
    served = serve_command(model or "", asked, **options)
    node, preset = served.request.node, served.request.node.preset
    own = {name: getattr(node, name) for name in ("vllm", "role", "nodes")}
    made = {
        "command": served.words,
        "executor": node.executor.name,
        "preset": preset.id if preset else None,
        "variables": preset.variables if preset else {},
        "url": models_url(served.request),
        "memory": served.request.memory,
    }
    yield Record({**record_fields(served, "request"), **own, **made})
    if explain:
        yield from table(_flag_rows(served))
    else:
        yield Data(shlex.join(served.words) + "\n")
    # The command alone is on standard output.
    for line in note_lines(served.notes, served.advice):
        tell(line)
    if url := models_url(served.request):
        tell(next_step("curl", url, where="once it serves"))


def serve_command(
    model: str, asked: NodeOptions, choice: RuleChoice, host: Host, **given: Any
) -> ServeCommand:
    """Return the command that the options ask for. Raises what ``serve_args`` raises."""
    options = defaultdict(lambda: None, given)
    for one, other, what in (
        ("listen", "address", "where to listen"),
        ("recipe", "preset", "how"),
    ):
        if options[one] and options[other]:
            names = (f"--{one}", "--host" if other == "address" else f"--{other}")
            raise UsageError(
                f"{' and '.join(names)} both say {what}", hint="leave one out"
            )
    path: Path | None = options["env_file"]
    file = read_env_file(path, accept_edited=options["accept_edited"]) if path else None
    if file and file.edited:
        taken = " ".join(
            f"{name}={file.facts[name]}" for name in _TAKEN if name in file.facts
        )
        tell(
            lead_word("note")
            + f"{path} was edited after patchkit wrote it; taken: {taken}"
        )
    if options["recipe"]:
        from patchkit.runtime.serve.recipe_files import (
            read_recipe,
        )  # not for a node without PyYAML

        preset: Preset | None
        preset, untold = read_recipe(options["recipe"], model)
        asked, model = replace(asked, model="", preset=preset), preset.id
        for line in untold:
            tell(lead_word("note") + f"{options['recipe']}: {line}")
    else:
        preset = preset_of(model, options["preset"], os.environ)
        asked = replace(asked, model=preset.id if preset else "")
    # The line may be for another machine, so this one need not have the address.
    node = decide_node(asked, host, file, addressed=False)
    served = model
    # A preset may be named by its last part, unless there is a folder of that name.
    if preset and model.lower() == preset.name.lower() and not Path(model).is_dir():
        served = preset.id
    request = ServeRequest(
        model=served,
        node=node,
        memory=memory_pool(host, node),
        rank=options["node_rank"],
        host=options["address"]
        or listen_address(options["listen"] or LISTEN[0], node, host),
        port=options["port"] or 8000,
        folder_gib=weights_gib(served, os.environ),
        checkpoint=find_checkpoint(served, os.environ),
        choice=choice,
    )
    drafter = str(json.loads(drafter_of(request)[0] or "{}").get("model", ""))
    request = replace(
        request, drafter_gib=weights_gib(drafter, os.environ) if drafter else None
    )
    return serve_args(request, load_flag_rules(), host.vllm_home(node.vllm))


def _flag_rows(served: ServeCommand) -> Iterator[tuple[str, ...]]:
    """Yield each flag with its reason; then what is left out, and what a rule could turn on."""
    good, dash = style("✓", fg="green"), style("-", dim=True)
    for mark, flags in ((good, served.flags), (dash, served.left_out)):
        for flag in flags:
            reason = f"{flag.reason} ({flag.origin}; {flag.source})"
            yield mark, " ".join(flag.words), " ".join(reason.split())
    for rule in served.off:
        yield (
            style("off", dim=True),
            f"{rule.flag} {rule.value}",
            f"{rule.reason} ({rule.id})",
        )
