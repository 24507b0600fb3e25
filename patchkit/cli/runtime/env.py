"""patchkit env"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import data, say, style
from patchkit.cli.runtime.env_check import check
from patchkit.cli.runtime.env_explain import explain
from patchkit.cli.runtime.node_options import accept_edited, first_version, node_options
from patchkit.errors import HostError, UsageError
from patchkit.runtime.env.agreement import agree
from patchkit.runtime.env.cluster import ClusterEnv, EnvRequest, decide
from patchkit.runtime.env.head_file import HeadFile, read_head
from patchkit.runtime.envfile.render import EnvEntry, Format, Written, render, write
from patchkit.runtime.host.host import Host, plain
from patchkit.runtime.host.probe import probe
from patchkit.runtime.python.ptxas import find_ptxas
from patchkit.runtime.rules.presets import Preset, find
from patchkit.runtime.rules.variable_rules import VariableRules, load_rules
from patchkit.runtime.rules.variables import nccl_variables, other_variables, vllm_variables


@click.group(invoke_without_command=True, subcommand_metavar="[explain|check] …")
@node_options
@click.option("--model", metavar="PRESET", help="A model of `serve-args --list`.")
@click.option(
    "--from",
    "head_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The head's file: a worker takes over what it shares, and is held against it.",
)
@accept_edited
@click.option("--with", "wanted", metavar="ID", multiple=True, help="Turn an optional rule on.")
@click.option("--without", "unwanted", metavar="ID", multiple=True, help="Turn a rule off.")
@click.option("--set", "extra", metavar="NAME=VALUE", multiple=True, help="Add one of your own.")
@click.option("--nccl", metavar="VERSION", default="", help="Instead of the one that torch loads.")
@click.option("--triton", metavar="VERSION", default="", help="Instead of the installed one.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write FILE, all or nothing.")
@click.option(
    "--format",
    "kind",
    type=click.Choice([each.value for each in Format]),
    default=Format.ENV.value,
    help="env is read alike by sh, systemd and docker.",
)
@click.option("--force", is_flag=True, help="Replace a file that patchkit did not write.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Env files for this node, from what this node has.

    \b
      patchkit env --role single
      patchkit env --role head --nodes 2 -o head.env
      patchkit env --role worker --from head.env -o worker.env

    Probes interfaces, RDMA devices and the installed vLLM, applies the rules that
    `patchkit env explain` lists, and checks each name against what the installed versions read.
    """
    if context.invoked_subcommand is None:
        _run(options)


command.add_command(explain)
command.add_command(check)


def _run(options: Mapping[str, Any]) -> None:
    if options["role"] is None:
        raise UsageError("which role?", hint="say --role single, --role head or --role worker")
    host = probe(options["root"], python=options["python"], environment=os.environ)
    head = _head(options)
    request = _request(options, host, head)
    rules = load_rules()
    known = vllm_variables(request.vllm, host.vllm_home(request.vllm))
    here = {name for name, _value in map(_assignment, options["extra"])}
    if head:
        _check_carried(head, rules, [*known, *nccl_variables(request.nccl)], here)
    env = decide(request, host, rules, known)
    if head:
        env = agree(env, head, rules, here)
    text = render(Format(options["kind"]), _header(env, host), _entries(env))
    output: Path | None = options["output"]
    if output is None:
        data(text)
        _tell(env, err=True)
        return
    private = any(not each.value for each in env.settings)
    outcome = write(output, text, force=options["force"], private=private)
    _tell_written(env, output, outcome)
    _tell(env)


# What is asked for


def _head(options: Mapping[str, Any]) -> HeadFile | None:
    path: Path | None = options["head_file"]
    return read_head(path, accept_edited=options["accept_edited"]) if path else None


def _check_carried(
    head: HeadFile, rules: VariableRules, known: Sequence[str], here: set[str]
) -> None:
    from patchkit.runtime.env.carried import check_carried  # a head does without it

    check_carried(head, rules, {*known, *other_variables()}, here)


def _request(options: Mapping[str, Any], host: Host, head: HeadFile | None) -> EnvRequest:
    """The options, what they leave open from the head's file, and the rest from this host."""
    facts = _facts(options, head)
    return EnvRequest(
        role=options["role"],
        vllm=_vllm(options["vllm"], facts.get("vllm", ""), host),
        topology=options["topology"] or facts.get("topology", "auto"),
        executor=options["executor"] or facts.get("executor", "auto"),
        nodes=options["nodes"] or int(facts.get("nodes", 1 if options["role"] == "single" else 2)),
        head=options["head_ip"] or facts.get("head", ""),
        target=options["target"] or "",
        quantization=options["quantization"] or facts.get("quantization", ""),
        preset=_preset(options["model"] or facts.get("model", "")),
        nccl=options["nccl"],
        triton=options["triton"],
        ptxas=find_ptxas(options["root"], os.environ),
        wanted=frozenset(options["wanted"]) | (head.wanted if head else frozenset()),
        unwanted=frozenset(options["unwanted"]) | (head.unwanted if head else frozenset()),
        extra={**(head.extra if head else {}), **dict(map(_assignment, options["extra"]))},
    )


def _preset(model: str) -> Preset | None:
    preset = find(model) if model else None
    if model and preset is None:
        raise UsageError(
            f"no preset is called {model}",
            hint="`patchkit serve-args --list` shows them; for another model say --quantization",
        )
    return preset


def _facts(options: Mapping[str, Any], head: HeadFile | None) -> Mapping[str, str]:
    """What the head's file says. Raises UsageError for an option that contradicts it."""
    if head is None:
        return {}
    if options["role"] != "worker":
        raise UsageError("--from is for a worker", hint="take --role worker, or leave --from out")
    names = {"topology": "topology", "executor": "executor", "vllm": "vllm", "head_ip": "head"}
    for option, fact in names.items():
        given = options[option]
        if given and given != "auto" and plain(given) != plain(head.facts[fact]):
            raise UsageError(
                f"--{option.replace('_', '-')} {given} contradicts {head.where}, "
                f"which says {head.facts[fact]}",
                hint="leave the option out, or write the head's file anew",
            )
    return head.facts


def _vllm(asked: str, heads: str, host: Host) -> str:
    """The version to write for. Raises HostError for an installed one that is not the head's."""
    installed = host.versions["vllm"]
    if heads and installed and not asked and plain(installed) != plain(heads):
        raise HostError(
            f"vLLM {installed} is installed here, and the head's file is for {heads}",
            why="the ranks of one model must run the same vLLM",
            hint="install the same wheel on every node, then write the head's file anew",
        )
    return first_version(asked, heads, installed)


def _assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise UsageError(f"--set {text}: is no assignment", hint="write it as --set NAME=VALUE")
    return name, value


# What is written


def _header(env: ClusterEnv, host: Host) -> list[str]:
    request = env.request
    facts = {
        "role": request.role,
        "topology": env.seat.topology,
        "executor": env.situation["executor"],
        "vllm": request.vllm,
        "nodes": str(request.nodes),
        "head": env.head,
        "nccl": plain(env.situation["nccl"]),
        "target": request.target,
        "quantization": request.quantization,
        "model": request.preset.id if request.preset else "",
        "set": ",".join(sorted(request.extra)),
        "with": ",".join(sorted(request.wanted)),
        "without": ",".join(sorted(request.unwanted)),
    }
    about = [f"For {host.system.hostname or 'this node'}{_where(env)}. {_use(env)}"]
    about += [f"Note: {note}." for note in env.notes]
    about += [f"Beware: {each.says}. Instead: {each.instead}." for each in env.advice]
    return [" ".join(f"{key}={value}" for key, value in facts.items() if value), *about]


def _where(env: ClusterEnv) -> str:
    seat = env.seat
    return f": {seat.address} on {seat.netdev}" if seat.address else ""


def _use(env: ClusterEnv) -> str:
    when = "before `ray start` and" if env.situation["executor"] == "ray" else "before"
    return f"Load it {when} `vllm serve`."


def _entries(env: ClusterEnv) -> list[EnvEntry]:
    """A reason stands above the first variable of its rule."""
    told: set[str] = set()
    entries = []
    for each in env.settings:
        again = each.rule in told and not each.rule.startswith("--")
        told.add(each.rule)
        comment = f"as above ({each.rule})" if again else each.comment
        entries.append(EnvEntry(each.name, each.value, comment))
    return entries


def _tell_written(env: ClusterEnv, output: Path, outcome: Written) -> None:
    what = f"{len(env.settings)} variables for {env.request.role}, {env.seat.topology}"
    say(style("✓", fg="green") + f" {output} {outcome}: {what}{_where(env)}")


def _tell(env: ClusterEnv, *, err: bool = False) -> None:
    for note in env.notes:
        say(style("note", fg="yellow") + f" {note}", err=err)
    for each in env.advice:
        say(style("beware", fg="yellow") + f" {each.says}; instead: {each.instead}", err=err)
    off = [rule.id for rule in env.off if rule.id not in env.request.unwanted]
    if off:
        which = f"{', '.join(off)}: `patchkit env explain ID`, --with ID"
        say(style("off", dim=True) + f" {which}", err=err)
