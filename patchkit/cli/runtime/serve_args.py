"""patchkit serve-args"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import data, echo, print_json, say, table
from patchkit.cli.runtime.node_options import accept_edited, first_version, node_options
from patchkit.cli.runtime.serve_view import NOTE, explained, listing, tell
from patchkit.errors import SourceError, UsageError
from patchkit.reading import read_text
from patchkit.runtime.env.cluster import target_of
from patchkit.runtime.env.head_file import check_digest
from patchkit.runtime.env.topology import take_seat
from patchkit.runtime.envfile.facts import check_facts
from patchkit.runtime.envfile.render import head_facts
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.probe import probe
from patchkit.runtime.rules.executors import choose_executor
from patchkit.runtime.rules.flag_rules import load_flag_rules
from patchkit.runtime.rules.flag_values import takes
from patchkit.runtime.rules.flags import flags
from patchkit.runtime.rules.presets import Preset, find
from patchkit.runtime.rules.releases import release
from patchkit.runtime.rules.variable_rules import load_rules
from patchkit.runtime.serve.args import ReleaseFlags, Served, serve_args
from patchkit.runtime.serve.render import fields, line, lines
from patchkit.runtime.serve.request import ServeRequest

_GIB = 2**30
_TAKEN = ("role", "topology", "executor", "vllm", "nodes", "head", "target", "quantization")
_FORMATS = {"line": line, "lines": lines}


@click.command("serve-args")
@click.argument("model", required=False)
@node_options
@click.option("--node-rank", type=click.IntRange(0), metavar="R", help="The worker's number.")
@click.option("--preset", metavar="ID", help="Whose flags to take; none: those for any model.")
@click.option(
    "--from",
    "env_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The env file that goes with it: role, topology, executor, nodes and head.",
)
@accept_edited
@click.option("--with", "wanted", metavar="ID", multiple=True, help="Turn an optional rule on.")
@click.option("--without", "unwanted", metavar="ID", multiple=True, help="Turn a rule off.")
@click.option("--host", metavar="A", help="Listen there; default: only this node, or the cable.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--format", "kind", type=click.Choice([*_FORMATS, "json"]), default="line")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--explain", is_flag=True, help="Each flag's reason, and what is left out and why.")
@click.option("--list", "presets", is_flag=True, help="The models that patchkit has presets of.")
def command(**options: Any) -> None:
    """The `vllm serve` flags that go with the env, valid for the installed version.

    \b
      patchkit serve-args openai/gpt-oss-120b
      patchkit serve-args Qwen3.5-122B-A10B-FP8 --from head.env
      patchkit serve-args Qwen3.5-122B-A10B-FP8 --from head.env --role worker

    MODEL is a name at Hugging Face, a folder, or the last part of a preset's name. Prints one line
    for the shell; --format lines is a script with the reason of every flag.
    """
    if options["presets"]:
        echo(table(listing()))
        return
    if not options["model"]:
        raise UsageError("which model?", hint="OWNER/NAME, a folder, or one of --list")
    served = _served(options)
    if options["explain"]:
        echo(table(explained(served)))
    else:
        _print(served, "json" if options["as_json"] else options["kind"])
    tell(served)


def _print(served: Served, kind: str) -> None:
    if kind == "json":
        print_json(fields(served))
    else:
        data(_FORMATS[kind](served) + "\n")


# What is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClusterPlace:
    """The node's place in its cluster, from the options, the env file and this host."""

    role: str
    topology: str
    executor: str
    nodes: int
    head: str


def _served(options: Mapping[str, Any]) -> Served:
    file: Path | None = options["env_file"]
    facts = _facts(file, accept_edited=options["accept_edited"]) if file else {}
    host = probe(options["root"], python=options["python"], environment=os.environ)
    vllm = _vllm(options["vllm"], facts.get("vllm", ""), host)
    target = options["target"] or facts.get("target") or target_of(host)
    place = _place(options, facts, host, vllm, target)
    preset = _preset(options["preset"], options["model"])
    request = ServeRequest(
        model=_model(options["model"], preset),
        vllm=vllm,
        role=place.role,
        topology=place.topology,
        executor=place.executor,
        nodes=place.nodes,
        rank=_rank(options["node_rank"], place),
        head=place.head,
        host=options["host"] or "",
        port=options["port"],
        target=target,
        quantization=options["quantization"] or facts.get("quantization", ""),
        preset=preset,
        weights_gib=_weights(Path(options["model"])),
        memory_gib=_memory(host),
        wanted=frozenset(options["wanted"]),
        unwanted=frozenset(options["unwanted"]),
    )
    return serve_args(request, load_flag_rules(), known(vllm, host.vllm_home(vllm)))


def known(vllm: str, home: Path | None) -> ReleaseFlags:
    """What a release takes, by its code where it is installed in ``home``."""

    names = flags(vllm, home)
    return ReleaseFlags(
        has=lambda flag: flag in names,
        takes=lambda flag, value: takes(flag, value, vllm, home),
    )


def _facts(path: Path, *, accept_edited: bool) -> dict[str, str]:
    text = read_text(path, hint="write it with `patchkit env`")
    facts = head_facts(text)
    if not facts.get("role"):
        raise SourceError(
            f"{path}: is no env file of patchkit",
            why="its first line does not say for which role it is",
            hint="write one: patchkit env --role head -o head.env",
        )
    if check_digest(text, path, accept_edited=accept_edited):
        taken = " ".join(f"{name}={facts[name]}" for name in _TAKEN if name in facts)
        say(NOTE + f" {path} was edited after patchkit wrote it; taken: {taken}", err=True)
    check_facts(facts, str(path))
    return facts


def _vllm(asked: str, files: str, host: Host) -> str:
    found = first_version(asked, host.versions["vllm"], files)
    if files and release(files) != release(found):
        say(NOTE + f" the env file is for vLLM {files}, this is {found}", err=True)
    return found


def _place(
    options: Mapping[str, Any], facts: Mapping[str, str], host: Host, vllm: str, target: str
) -> _ClusterPlace:
    role = options["role"] or facts.get("role", "single")
    if role == "single":
        return _ClusterPlace(
            role=role, topology="single", executor="uni", nodes=options["nodes"] or 1, head=""
        )
    nodes = options["nodes"] or int(facts.get("nodes", "2"))
    topology = options["topology"] or facts.get("topology", "auto")
    head = options["head_ip"] or facts.get("head", "")
    if topology == "auto" or not head:
        seat = take_seat(host, role=role, topology=topology, nodes=nodes, head=head, target=target)
        topology, head = seat.topology, head or seat.address
    asked = options["executor"] or facts.get("executor", "auto")
    executor = choose_executor(load_rules(), vllm, role=role, asked=asked).name
    return _ClusterPlace(role=role, topology=topology, executor=executor, nodes=nodes, head=head)


def _rank(asked: int | None, place: _ClusterPlace) -> int:
    if asked is not None:
        return asked
    if place.role == "worker" and place.nodes > 2 and place.executor == "mp":
        raise UsageError(
            f"which of the {place.nodes - 1} workers?", hint="number them: --node-rank 1 …"
        )
    return 1 if place.role == "worker" else 0


def _preset(asked: str | None, model: str) -> Preset | None:
    if asked is None or asked == "none":
        return find(model) if asked is None else None
    preset = find(asked)
    if preset is None:
        raise UsageError(f"no preset is called {asked}", hint="`patchkit serve-args --list`")
    return preset


def _model(model: str, preset: Preset | None) -> str:
    """The whole name of a preset that was named by its last part, unless there is such a folder."""
    named = preset is not None and model.lower() == preset.name.lower()
    return preset.id if preset and named and not Path(model).is_dir() else model


def _weights(folder: Path) -> float | None:
    """The size of a checkpoint on this disk, in GiB."""
    if not folder.is_dir():
        return None
    size = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    return size / _GIB if size else None


def _memory(host: Host) -> float | None:
    """This host's, if it is one that serves: the command may be written on another machine."""
    served = host.memory is not None and target_of(host) != "other"
    return host.memory.total / 2**20 if host.memory and served else None
