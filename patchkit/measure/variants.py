"""Plan how each variant of a model is served, and note what makes its figures."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from patchkit import __version__
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterFile, ClusterNode, read_cluster_file
from patchkit.cluster.launch.plan import (
    PlannedRank,
    ServedModel,
    planned_ranks,
    served_model,
    served_words,
)
from patchkit.cluster.launch.up import make_plan
from patchkit.cluster.ssh.ssh import HERE
from patchkit.errors import HostError, UsageError
from patchkit.reading import read_text
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.envfile.syntax import Format, parse
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.units import KIB_PER_GIB

_NO_PREFIXES = "--no-enable-prefix-caching"  # the warm-up asks the first prompt of those that count
VLLM = ("-m", "vllm.entrypoints.cli.main")  # a venv that was moved has no program of the right path
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """Random prompts of ``depth`` tokens, answers of ``output``, ``concurrency`` at a time."""

    depth: int
    output: int
    concurrency: int
    prompts: int

    @property
    def name(self) -> str:
        return f"in{self.depth}-out{self.output}-c{self.concurrency}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedVariant:
    """A way to serve a model: the words of `vllm serve` on its head, its variables, its machines.

    ``python`` is the one that asks, ``tokenizer`` a folder here, "" for what the model's name says.
    With neither ``cluster`` nor ``url`` the words lack an address, and are run here. ``shared`` are
    the variables that are no node's own.
    """

    name: str
    python: str
    words: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[NodeFacts, ...] = ()
    tokenizer: str = ""
    cluster: Cluster | None = None
    url: str = ""


def plan_url(url: str, venv: str) -> PlannedVariant:
    """Return a server that runs already: nothing is known of its machine."""
    return PlannedVariant(name="served", python=_venv_python(venv), url=url)


def plan_file(path: Path, model: str, venv: str, args: Sequence[str]) -> PlannedVariant:
    """Return the variant of a cluster file (.toml) or of an env file, named as the file is."""
    if path.suffix == ".toml":
        return _plan_cluster(path, model, venv, args)
    text = read_text(path, hint="`patchkit env --role single -o node.env` writes one")
    loaded = parse(Format(head_facts(text).get("format", Format.ENV)), text, str(path))
    planned = plan_here(model, venv, args)
    variables = {**planned.variables, **loaded}
    shared = {**planned.shared, **loaded}
    return replace(planned, name=path.stem, variables=variables, shared=shared)


def plan_here(model: str, venv: str, args: Sequence[str]) -> PlannedVariant:
    """Return how a model is served on this machine. Raises HostError without vLLM there."""
    python = _venv_python(venv)
    home = Path(python).parents[1]
    file = ClusterFile(node=(ClusterNode(ssh=HERE),), venv=str(home))
    served = served_model(file, model)
    (facts,) = Cluster(file).facts()
    if not facts.host.versions["vllm"]:
        raise HostError(
            f"there is no vLLM in {home}",
            why="it serves the model and measures it",
            hint="name the environment that has it: --venv DIR; or a server that runs: --url URL",
        )
    (rank,) = planned_ranks(file, [facts], served)
    assert rank.command is not None
    words = served_words(file, rank.command, served)
    return PlannedVariant(
        name="served",
        python=python,
        words=(python, *VLLM, *words[1:], _NO_PREFIXES, *args),
        variables=parse(Format.SYSTEMD, rank.text, "the env file of this node"),
        shared=_shared_variables(rank),
        facts=(facts,),
        tokenizer=_find_tokenizer(served),
    )


def _plan_cluster(path: Path, model: str, venv: str, args: Sequence[str]) -> PlannedVariant:
    """Return a variant as `patchkit up` would start it, with what a measurement asks for."""
    file = read_cluster_file(path)
    serve = replace(file.serve, args=(*file.serve.args, _NO_PREFIXES, *args))
    cluster = Cluster(replace(file, serve=serve))
    python = _venv_python(venv or file.venv)
    if not Path(python).exists():
        raise HostError(
            f"{python} is not on this machine",
            why="the benchmark asks from here, and is a part of vLLM",
            hint="name the environment here that has it: --venv",
        )
    plan = make_plan(cluster, model)
    if not cluster.head.here and plan.units.url.startswith("http://127."):
        raise HostError(
            f"{cluster.head.destination} answers itself alone",
            hint=f'listen = "lan" in [serve] of {path}, or measure on the head',
        )
    return PlannedVariant(
        name=path.stem,
        python=python,
        words=plan.units.words(0),
        shared=_shared_variables(plan.units.ranks[0]),
        facts=tuple(rank.facts for rank in plan.units.ranks),
        tokenizer=_find_tokenizer(plan.units.model),
        cluster=cluster,
    )


def describe_conditions(
    model: str, variants: Sequence[PlannedVariant], loads: Sequence[BenchLoad]
) -> dict[str, Any]:
    """Return what makes the figures, as JSON takes it; without addresses, names and secrets."""
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise UsageError(f"two variants are called {names[0]!r}", hint="rename one of the files")
    return {
        "patchkit": __version__,
        "tool": "vllm bench serve",
        "model": model,
        "machines": [_describe_machine(facts.host) for facts in variants[0].facts],
        "loads": {load.name: asdict(load) for load in loads},
        "variants": {
            variant.name: {
                "command": _hide_private(" ".join(variant.words)),
                "variables": {
                    name: _hide_private(f"{name}={value}").partition("=")[2]
                    for name, value in variant.shared.items()
                },
                "versions": dict(variant.facts[0].host.versions) if variant.facts else {},
            }
            for variant in variants
        },
    }


def _describe_machine(host: Host) -> dict[str, str]:
    system = host.system
    return {
        "gpu": ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in host.gpus),
        "driver": next((gpu.driver for gpu in host.gpus if gpu.driver), ""),
        "cpu": f"{system.cpu}, {system.cores} cores",
        "machine": f"{system.vendor} {system.product}".strip(),
        **{name: getattr(system, name) for name in ("bios", "kernel", "os")},
        "memory": f"{host.memory.total / KIB_PER_GIB:.0f} GiB" if host.memory else "",
    }


def _hide_private(text: str) -> str:
    return _ADDRESS.sub("ADDRESS", mask_secrets(text))


def _shared_variables(rank: PlannedRank) -> dict[str, str]:
    """Return the variables but for a node's own address and interfaces."""
    return {each.name: each.value for each in rank.env.settings if each.scope != "host"}


def _venv_python(venv: str) -> str:
    """Return the Python of an environment; by default the one that runs this."""
    return str(Path(venv or sys.prefix).expanduser().absolute() / "bin/python")


def _find_tokenizer(model: ServedModel) -> str:
    folder = Path(model.folder).expanduser() if model.folder else Path()
    return str(folder) if (folder / "tokenizer.json").exists() else ""
