"""Write an env file: `patchkit env`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import FILE_OR_DASH, PATH, Shown, style, tell
from patchkit.cli.render import GOOD, Block, Data, Record, VerbGroup, rendered
from patchkit.cli.runtime.env_explain import explain
from patchkit.cli.runtime.node_options import node_options, note_lines
from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.runtime.envfile.env_file import read_head
from patchkit.runtime.envfile.syntax import Format
from patchkit.runtime.envfile.write import write
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.software import find_ptxas
from patchkit.runtime.node.cluster_env import ClusterEnv, agree, cluster_env, file_text
from patchkit.runtime.node.decision import NodeOptions, decide
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.rules.rule import RuleChoice
from patchkit.runtime.rules.secret_texts import is_secret
from patchkit.runtime.rules.variable_rules import load_variable_rules


@click.group(cls=VerbGroup, invoke_without_command=True, subcommand_metavar="[explain] …")
@node_options
@click.option("--model", metavar="PRESET", help="A model of `serve-args --list`.")
@click.option(
    "--from",
    "head_file",
    metavar="FILE",
    type=PATH,
    help="The head's file: a worker takes over what it shares, and is compared with it.",
)
@click.option("--set", "extra", metavar="NAME=VALUE", multiple=True, help="Add one of your own.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=FILE_OR_DASH,
    help="Write FILE, all or nothing; - is standard output, the default.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice([each.value for each in Format]),
    default=Format.ENV.value,
    help="env is read alike by sh, systemd and docker.",
)
@click.option("--force", is_flag=True, help="Replace a file that patchkit did not write.")
@click.pass_context
@rendered
def command(context: click.Context, /, **options: Any) -> Iterator[Block]:
    """Write an env file for this node, from what this node has.

    \b
      patchkit env
      patchkit env --role head --nodes 2 -o head.env
      patchkit env --role worker --from head.env -o worker.env

    Probes interfaces, RDMA devices and the installed vLLM, applies the rules that
    `patchkit env explain` lists, and checks each name against what the installed versions read.
    """
    if context.invoked_subcommand is None:
        yield from _env_blocks(**options)


command.add_command(explain)


def _env_blocks(
    asked: NodeOptions, choice: RuleChoice, host: Host, root: Path, **options: Any
) -> Iterator[Block]:
    extra = {}
    for text in options["extra"]:
        name, sign, value = text.partition("=")
        if not (name and sign):
            hint = "write it as --set NAME=VALUE"
            raise UsageError(f"--set {text}: is not an assignment", hint=hint)
        extra[name] = value
    head = None
    if path := options["head_file"]:
        head = read_head(path, asked.role or "single", accept_edited=options["accept_edited"])
    asked = replace(asked, model=options["model"], extra=extra, choice=choice)
    node = decide(asked, host, head)
    rules = load_variable_rules()
    ptxas = find_ptxas(root, os.environ)
    env = cluster_env(node, host, rules, nccl=asked.nccl, ptxas=ptxas)
    if head:
        env = agree(env, head, rules.of_host, extra)
    kind, hostname = Format(options["kind"]), host.system.hostname
    text = file_text(env, kind, hostname=hostname, target=asked.target)
    yield Record(
        {
            "variables": {it.name: it.value for it in env.settings if not is_secret(it.name)},
            "reasons": {it.name: it.comment for it in env.settings},
            "notes": env.notes,
        }
    )
    output: Path | None = options["output"]
    if output is None or output == Path("-"):
        yield Data(text)
        for line in _env_note_lines(env):
            tell(line)
        return
    # A variable without a value is a secret: a file that refers to one is kept from others.
    private = any(not setting.value for setting in env.settings)
    outcome = write(output, text, force=options["force"], private=private)
    what = f"{len(env.settings)} variables for {node.role}, {node.topology}"
    yield GOOD + f"{output} {outcome}: {what}{env.where}"
    yield from _env_note_lines(env)
    if node.role == "head":
        there = f"on each worker, with a copy of {output.name} there"
        worker = ("env", "--role", "worker", "--from", Path(output.name), "-o", "worker.env")
        yield next_step(*program(), *worker, where=there)
    # The first model serves on one Spark, and on more.
    yield next_step(
        *program(), "serve-args", options["model"] or load_presets()[0].id, "--from", output
    )


def _env_note_lines(env: ClusterEnv) -> Iterator[Shown]:
    yield from note_lines(env.notes, env.advice)
    off = [rule.id for rule in env.off if rule.id not in env.node.choice.unwanted]
    if off:
        why = f"`{quoted('patchkit', 'env', 'explain', off[0])}` says why"
        why += f", --with {off[0]} turns it on"
        yield style("off", dim=True) + f" by default: {', '.join(off)}; {why}"
