"""Write an env file: `patchkit env`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import Shown, data, echo, print_json, say, style
from patchkit.cli.runtime.check import command as check
from patchkit.cli.runtime.env_explain import explain
from patchkit.cli.runtime.node_options import TRITON, asked_for, node_options, rule_choice
from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.runtime.env.cluster_env import ClusterEnv, cluster_env
from patchkit.runtime.env.file_text import file_text, where
from patchkit.runtime.envfile.syntax import Format
from patchkit.runtime.envfile.write import write
from patchkit.runtime.host.probe import probe
from patchkit.runtime.node.decision import decide
from patchkit.runtime.python.ptxas import find_ptxas
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.rules.sensitive_names import is_secret
from patchkit.runtime.rules.variable_rules import load_variable_rules
from patchkit.runtime.rules.variables import vllm_values, vllm_variables


@click.group(invoke_without_command=True, subcommand_metavar="[explain|check] …")
@node_options
@click.option("--model", metavar="PRESET", help="A model of `serve-args --list`.")
@click.option(
    "--from",
    "head_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The head's file: a worker takes over what it shares, and is compared with it.",
)
@click.option("--set", "extra", metavar="NAME=VALUE", multiple=True, help="Add one of your own.")
@TRITON
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write FILE, all or nothing; - is standard output, the default.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice([each.value for each in Format]),
    default=Format.ENV.value,
    help="env is read alike by sh, systemd and docker.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print variables, reasons and notes, for programs."
)
@click.option("--force", is_flag=True, help="Replace a file that patchkit did not write.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Write an env file for this node, from what this node has.

    \b
      patchkit env
      patchkit env --role head --nodes 2 -o head.env
      patchkit env --role worker --from head.env -o worker.env

    Probes interfaces, RDMA devices and the installed vLLM, applies the rules that
    `patchkit env explain` lists, and checks each name against what the installed versions read.
    """
    if context.invoked_subcommand is None:
        _write_env(options)


command.add_command(explain)
command.add_command(check, "check")


def _write_env(options: Mapping[str, Any]) -> None:
    extra = dict(map(_parse_setting, options["extra"]))
    host = probe(options["root"], python=options["python"], environment=os.environ)
    head = None
    if path := options["head_file"]:
        from patchkit.runtime.env.agreement import agree, read_head  # a head does without them

        head = read_head(path, options["role"] or "single", accept_edited=options["accept_edited"])
    asked = asked_for(
        options,
        model=options["model"],
        triton=options["triton"],
        extra=extra,
        choice=rule_choice(options),
    )
    node = decide(asked, host, head)
    rules = load_variable_rules()
    home = host.vllm_home(node.vllm)
    env = cluster_env(
        node,
        host,
        rules,
        vllm_variables(node.vllm, home),
        vllm_values(node.vllm, home),
        nccl=options["nccl"],
        ptxas=find_ptxas(options["root"], os.environ),
    )
    if head:
        env = agree(env, head, rules.of_host, extra)
    output: Path | None = options["output"]
    if options["as_json"]:
        if output:
            raise UsageError("--json is not written to a file", hint="leave --output out")
        print_json(_env_fields(env))
        return
    text = file_text(
        env,
        Format(options["kind"]),
        hostname=host.system.hostname,
        target=options["target"] or "",
    )
    if output is None or output == Path("-"):
        data(text)
        _say_notes(env, err=True)
        return
    # A variable without a value is a secret: a file that refers to one is kept from others.
    private = any(not each.value for each in env.settings)
    outcome = write(output, text, force=options["force"], private=private)
    what = f"{len(env.settings)} variables for {node.role}, {node.topology}"
    say(style("✓", fg="green") + f" {output} {outcome}: {what}{where(env)}")
    _say_notes(env)
    echo(_next_env_steps(output, node.role, options["model"]))


def _env_fields(env: ClusterEnv) -> dict[str, Any]:
    return {
        "variables": {each.name: each.value for each in env.settings if not is_secret(each.name)},
        "reasons": {each.name: each.comment for each in env.settings},
        "notes": env.notes,
    }


def _next_env_steps(file: Path, role: str, model: str | None) -> Iterator[Shown]:
    """Yield what comes after a file: those of the workers, then the line that serves a model."""
    if role == "head":
        worker: tuple[str | Path, ...] = (
            *program(),
            "env",
            "--role",
            "worker",
            "--from",
            Path(file.name),
        )
        where = f"on each worker, with a copy of {file.name} there"
        yield next_step(*worker, "-o", "worker.env", where=where)
    # The first one serves on one Spark, and on more.
    served = model or load_presets()[0].id
    yield next_step(*program(), "serve-args", served, "--from", file)


def _parse_setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise UsageError(f"--set {text}: is not an assignment", hint="write it as --set NAME=VALUE")
    return name, value


def _say_notes(env: ClusterEnv, *, err: bool = False) -> None:
    for note in env.notes:
        say(style("note", fg="yellow") + f" {note}", err=err)
    for each in env.advice:
        say(style("beware", fg="yellow") + f" {each.says}; instead: {each.instead}", err=err)
    off = [rule.id for rule in env.off if rule.id not in env.node.choice.unwanted]
    if off:
        why = f"`{quoted('patchkit', 'env', 'explain', off[0])}` says why"
        why += f", --with {off[0]} turns it on"
        say(style("off", dim=True) + f" by default: {', '.join(off)}; {why}", err=err)
