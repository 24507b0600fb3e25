"""Write an env file, and explain what stands in it: `patchkit env`, `patchkit env explain`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import (
    FILE_OR_DASH,
    PATH,
    next_step,
    program,
    record_fields,
    style,
    table,
    tell,
)
from patchkit.cli.render import (
    GOOD,
    Block,
    Data,
    Record,
    VerbGroup,
    fact_lines,
    rendered,
)
from patchkit.cli.runtime.node_options import node_options, note_lines
from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.envfile.env_file import read_head
from patchkit.runtime.envfile.syntax import Format
from patchkit.runtime.envfile.write import write
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.software import find_ptxas
from patchkit.runtime.node.cluster_env import (
    adopt_shared_settings,
    file_text,
    make_cluster_env,
)
from patchkit.runtime.node.decision import NodeOptions, decide_node
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.rules.releases import Lifetime, read_table
from patchkit.runtime.rules.rule import RuleChoice, in_words, routes_in_words
from patchkit.runtime.rules.secret_texts import is_secret
from patchkit.runtime.rules.spelling import nearest_hint
from patchkit.runtime.rules.variable_rules import (
    CACHES,
    Avoid,
    VariableRule,
    VariableRules,
    load_variable_rules,
)
from patchkit.runtime.rules.variable_values import TAKEN
from patchkit.runtime.rules.variables import lifetime, other_variables


@click.group(
    cls=VerbGroup, invoke_without_command=True, subcommand_metavar="[explain] …"
)
@node_options
@click.option("--model", metavar="PRESET", help="A model of `serve-args --list`.")
@click.option(
    "--from", "head_file", type=PATH, help="The head's file, which a worker follows."
)
@click.option(
    "--set", "extra", metavar="NAME=VALUE", multiple=True, help="Add one of your own."
)
@click.option(
    "-o", "--output", type=FILE_OR_DASH, help="Default: -, which is standard output."
)
@click.option(
    "--format", "kind", type=click.Choice(list(map(str, Format))), default="env"
)
@click.option(
    "--force", is_flag=True, help="Replace a file that patchkit did not write."
)
@click.pass_context
@rendered
def env_command(context: click.Context, /, **options: Any) -> Iterator[Block]:
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
        head = read_head(
            path, asked.role or "single", accept_edited=options["accept_edited"]
        )
    asked = replace(asked, model=options["model"], extra=extra, choice=choice)
    node = decide_node(asked, host, head)
    rules = load_variable_rules()
    ptxas = find_ptxas(root, os.environ)
    caches = str(Path.home() / CACHES)
    env = make_cluster_env(
        node, host, rules, nccl=asked.nccl, ptxas=ptxas, caches=caches
    )
    if head:
        env = adopt_shared_settings(env, head, extra)
    kind, hostname = Format(options["kind"]), host.system.hostname
    text = file_text(env, kind, hostname=hostname, target=asked.target)
    yield Record(
        {
            "variables": {
                it.name: it.value for it in env.settings if not is_secret(it.name)
            },
            "reasons": {it.name: it.comment for it in env.settings},
            "notes": env.notes,
        }
    )
    notes = [*note_lines(env.notes, env.advice)]
    if off := [rule.id for rule in env.off if rule.id not in node.choice.unwanted]:
        why = f"`{quoted('patchkit', 'env', 'explain', off[0])}` says why"
        why += f", --with {off[0]} turns it on"
        notes.append(style("off", dim=True) + f" by default: {', '.join(off)}; {why}")
    output: Path | None = options["output"]
    if output is None or output == Path("-"):
        yield Data(text)
        for line in notes:
            tell(line)
        return
    # A variable without a value is a secret: a file that refers to one is kept from others.
    private = any(not setting.value for setting in env.settings)
    outcome = write(output, text, force=options["force"], private=private)
    what = f"{len(env.settings)} variables for {node.role}, {node.attachment.topology}"
    yield GOOD + f"{output} {outcome}: {what}{env.where}"
    yield from notes
    if node.role == "head":
        there = f"on each worker, with a copy of {output.name} there"
        worker = (
            "env",
            "--role",
            "worker",
            "--from",
            Path(output.name),
            "-o",
            "worker.env",
        )
        yield next_step(*program(), *worker, where=there)
    model = (
        options["model"] or load_presets()[0].id
    )  # which serves on one Spark, and on more
    yield next_step(*program(), "serve-args", model, "--from", output)


@env_command.command("explain")
@click.argument("name", metavar="[VARIABLE]", required=False)
@rendered
def explain_variable(name: str | None) -> Iterator[Block]:
    """Explain what a variable does here, why, since when, who says so, and what guides say.

    VARIABLE may be the id of a rule as well. Without it: everything that has a rule.
    """
    rules = load_variable_rules()
    if name is None:
        yield from _overview_blocks(rules)
        return
    found = [entry for entry in rules.entries if name in (entry.id, *entry.variables)]
    known, other = lifetime(name), other_variables().get(name)
    claims = _claims_about(name)
    if not (found or known or other or claims):
        names = [
            text for entry in rules.entries for text in (*entry.variables, entry.id)
        ]
        hint = nearest_hint(name, names, "`patchkit env explain` lists the rules")
        raise UsageError(f"nothing is known of {name}", hint=hint)
    set_here = [entry for entry in found if isinstance(entry, VariableRule)]
    yield Record(
        {
            "name": name,
            "lifetime": known,
            "meaning": other.meaning if other else None,
            "rules": [
                {**record_fields(rule), "default": rule.default} for rule in set_here
            ],
            "avoids": [entry for entry in found if isinstance(entry, Avoid)],
            "claims": claims,
        }
    )
    yield style(name, bold=True)
    yield from _reader_lines(name, known)
    if other:
        yield f"  {other.of} {other.versions}".rstrip() + f" reads it: {other.meaning}"
    for entry in found:
        yield ""
        yield from _entry_lines(entry)
    for claim in claims:
        yield ""
        yield (
            style(claim["id"], fg="cyan")
            + f"  what guides say, {claim['verdict']}: {claim['says']}"
        )
        yield next_step("patchkit", "explain", claim["id"])


def _reader_lines(name: str, known: Lifetime | None) -> Iterator[str]:
    """Yield since when a variable is read, and which values its releases take."""
    reader = (
        "NCCL" if name.startswith("NCCL_") else "vLLM"
    )  # of others no lifetime is known
    if known:
        until = "on" if known.is_current else f"to {known.last}"
        default = known.default or "unset"
        yield f"  {reader} reads it from {known.first} {until}; default: {default}"
    if known and not known.is_current:
        yield f"  {reader} after {known.last} ignores it: leave it out there"
    rows = (row for row in read_table(TAKEN).rows if row.name == name)
    yield from (f"  {row.first} to {row.last}: {row.default}" for row in rows)


def _claims_about(name: str) -> list[dict[str, str]]:
    """Return the claims of guides that name a variable, as the data has them.

    A node reads them without the libraries that `patchkit explain` takes.
    """
    place = RECIPES / "vllm" / "folklore.toml"
    claims = read_toml(tuple[dict[str, Any], ...], place, key="claim")
    named = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    keys = ("id", "verdict", "says", "instead")
    return [
        {key: claim[key] for key in keys}
        for claim in claims
        if named.search(claim["says"])
    ]


def _overview_blocks(rules: VariableRules) -> Iterator[Block]:
    yield Record(rules)
    whens = {entry.id: in_words(entry.when) for entry in rules.entries}
    rows = [
        (it.id, "" if it.default else "off", " ".join(map("=".join, it.set.items())))
        for it in rules.rules
    ]
    left_out = [(it.id, it.severity, " ".join(it.variables)) for it in rules.avoids]
    for head, entries in (("Set", rows), ("Better left out", left_out)):
        yield style(head, bold=True)
        yield from table(
            [(name, how, whens[name], text) for name, how, text in entries], indent="  "
        )
        yield ""
    yield "`patchkit env explain VARIABLE` says why, who says so, and what guides say."


def _entry_lines(entry: VariableRule | Avoid) -> Iterator[str]:
    rows = {"when": in_words(entry.when) or "always", "why": entry.reason}
    if isinstance(entry, VariableRule):
        whose = (
            "the same on all nodes" if entry.scope == "shared" else "each node its own"
        )
        pairs = " ".join(map("=".join, entry.set.items()))
        yield style(entry.id, fg="green") + f"  sets {pairs}  ({whose})"
        if not entry.default:
            why = (
                "a choice of yours" if entry.optional else "it rests on a single report"
            )
            rows["off"] = f"{why}: --with {entry.id} turns it on"
    else:
        yield style(entry.id, fg="yellow") + f"  {entry.severity}: better left out"
        rows["instead"] = entry.instead
    rows |= {f"why in {bounds}": text for bounds, text in entry.by_release.items()}
    rows["leads"] = routes_in_words(entry.routes)
    rows["source"] = f"{entry.source} ({entry.evidence}, confidence {entry.confidence})"
    rows["guides"] = entry.guides
    yield from fact_lines(rows)
