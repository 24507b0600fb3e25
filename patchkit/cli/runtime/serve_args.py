"""Print the flags of `vllm serve`: `patchkit serve-args`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from patchkit.cli import complete
from patchkit.cli.next_step import next_step
from patchkit.cli.out import record_fields, table, tell
from patchkit.cli.render import Block, Data, Record, lead_word, rendered
from patchkit.cli.runtime.node_options import asked_for, node_options, rule_choice
from patchkit.cli.runtime.serve_view import HEADS, command_fields, flag_rows, preset_rows
from patchkit.errors import UsageError
from patchkit.runtime.host.probe import probe
from patchkit.runtime.node.decision import decide
from patchkit.runtime.node.env_file import read_env_file
from patchkit.runtime.rules.flag_rules import load_flag_rules
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.serve.args import ServeCommand, release_flags, serve_args
from patchkit.runtime.serve.listen import CHOICES as LISTEN
from patchkit.runtime.serve.listen import listen_address, models_url
from patchkit.runtime.serve.memory import memory_pool
from patchkit.runtime.serve.model import full_name, preset_of, weights_gib
from patchkit.runtime.serve.request import ServeRequest

# Facts of an env file that the command line is made from.
_TAKEN = ("role", "topology", "executor", "vllm", "nodes", "head", "target", "quantization")


@click.command("serve-args")
@click.argument("model", required=False, shell_complete=complete.models)
@node_options
@click.option("--node-rank", type=click.IntRange(0), metavar="R", help="The worker's number.")
@click.option(
    "--preset",
    metavar="ID",
    shell_complete=complete.models,
    help="The preset to take; none: flags for any model.",
)
@click.option(
    "--from",
    "env_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The env file that goes with it: role, topology, executor, nodes and head.",
)
@click.option(
    "--listen",
    type=click.Choice(LISTEN),
    help="Who may ask: this machine (default), those on the cable, or those on the LAN.",
)
@click.option("--host", metavar="A", help="Listen on this address, instead of --listen.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--explain", is_flag=True, help="Show each flag's reason, and what is left out.")
@click.option("--list", "presets", is_flag=True, help="List the models that have presets.")
@rendered
def command(**options: Any) -> Iterator[Block]:
    """Print the `vllm serve` flags that go with the env, valid for the installed version.

    \b
      patchkit serve-args openai/gpt-oss-120b
      patchkit serve-args Qwen3.5-122B-A10B-FP8 --from head.env
      patchkit serve-args Qwen3.5-122B-A10B-FP8 --from head.env --role worker

    MODEL is a name at Hugging Face, a folder, or the last part of a preset's name. Prints one line
    for the shell.
    """
    if options["presets"]:
        # The presets as presets.toml has them.
        yield Record([{**record_fields(preset), "name": preset.name} for preset in load_presets()])
        yield from table(preset_rows(), heads=HEADS)
        return
    if not options["model"]:
        raise UsageError("missing MODEL", hint="OWNER/NAME, a folder, or one of --list")
    served = _serve_command(options)
    yield Record(command_fields(served))
    if options["explain"]:
        yield from table(flag_rows(served))
    else:
        yield Data(served.shell_line + "\n")
    # The command alone is on standard output.
    for note in served.notes:
        tell(lead_word("note") + note)
    for advice in served.advice:
        tell(lead_word("beware") + f"{advice.says}: {advice.instead}")
    if url := models_url(served.request):
        tell(next_step("curl", url, where="once it serves"))


def _serve_command(options: Mapping[str, Any]) -> ServeCommand:
    if options["listen"] and options["host"]:
        raise UsageError(
            "--listen and --host both say where to listen", hint="leave one of them out"
        )
    path: Path | None = options["env_file"]
    file = read_env_file(path, accept_edited=options["accept_edited"]) if path else None
    if file and file.edited:
        taken = " ".join(f"{name}={file.facts[name]}" for name in _TAKEN if name in file.facts)
        tell(lead_word("note") + f"{path} was edited after patchkit wrote it; taken: {taken}")
    host = probe(options["root"], python=options["python"], environment=os.environ)
    model = options["model"]
    preset = preset_of(model, options["preset"], os.environ)
    asked = asked_for(options, model=preset.id if preset else "")
    # The line may be for another machine, so this one need not have the address.
    node = decide(asked, host, file, addressed=False)
    rules = load_flag_rules()
    served = full_name(model, preset)
    request = ServeRequest(
        model=served,
        node=node,
        memory=memory_pool(host, node, rules.memory),
        rank=options["node_rank"],
        host=options["host"] or listen_address(options["listen"] or LISTEN[0], node, host),
        port=options["port"],
        folder_gib=weights_gib(served, os.environ),
        choice=rule_choice(options),
    )
    return serve_args(request, rules, release_flags(node.vllm, host.vllm_home(node.vllm)))
