"""Plan how each variant of a model is served, and describe the setup of its figures."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, field, replace
from pathlib import Path

from patchkit import __version__
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.bench.benchmark import BenchLoad
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.start_plan import make_plan
from patchkit.errors import HostError, UsageError
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.records import RecordError
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.units import KIB_PER_GIB

# With the prefix cache, the warm-up would cache a prompt that is measured later.
_NO_PREFIXES = "--no-enable-prefix-caching"
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


@frozen
class PlannedVariant:
    """A way to serve a model, and the ``python`` that runs the benchmark.

    ``words`` are those of `vllm serve` on the head, ``shared`` the variables of all nodes, and
    ``facts`` those of each node. ``tokenizer`` is a folder, "" for the tokenizer of the model. A
    server that runs already has a ``url``; its words, variables and facts are not known.
    """

    name: str
    python: str
    words: Texts = ()
    shared: Values = field(default_factory=dict)
    facts: tuple[NodeFacts, ...] = ()
    tokenizer: str = ""
    cluster: Cluster | None = None
    url: str = ""


def plan_cluster(
    cluster: Cluster,
    name: str,
    model: str,
    venv: str,
    args: Sequence[str],
) -> PlannedVariant:
    """Return a variant as `patchkit up` would start it, but without prefix caching.

    Raises HostError if no Python here can run the benchmark, or if the server would not listen to
    this machine; UsageError for arguments that cluster.toml must not hold; what ``make_plan`` does.
    """
    try:
        serve = replace(cluster.serve, args=(*cluster.serve.args, _NO_PREFIXES, *args))
    except RecordError as error:  # a key among the words
        raise UsageError(str(error)) from None

    cluster = replace(cluster, serve=serve)

    python = venv_python(venv or cluster.venv)
    if not Path(python).exists():
        raise HostError(
            f"{python} is not on this machine",
            why="the benchmark asks from here, and is a part of vLLM",
            hint="name the environment here that has it: --venv",
        )

    units = make_plan(cluster, model).units
    if not cluster.head.here and units.url.startswith("http://127."):
        raise HostError(
            f"{cluster.head.destination} answers itself alone",
            hint='listen = "lan" in [serve] of its file, or measure on the head',
        )

    folder = Path(units.model.folder).expanduser()
    has_tokenizer = (folder / "tokenizer.json").exists()

    settings = units.ranks[0].env.settings
    return PlannedVariant(
        name=name,
        python=python,
        words=units.words(0),
        shared={item.name: item.value for item in settings if item.scope != "host"},
        facts=tuple(rank.facts for rank in units.ranks),
        tokenizer=str(folder) if has_tokenizer else "",
        cluster=cluster,
    )


def describe_conditions(
    model: str,
    variants: Sequence[PlannedVariant],
    loads: Sequence[BenchLoad],
) -> Fields:
    """Return the setup as values for JSON, without addresses, names of machines and secrets.

    Raises UsageError if two variants have the same name.
    """
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two variants are called {names[0]!r}", hint="rename one of the files"
        )

    return {
        "patchkit": __version__,
        "tool": "vllm bench serve",
        "model": model,
        "machines": [_describe_machine(facts.host) for facts in variants[0].facts],
        "loads": {load.name: asdict(load) for load in loads},
        "variants": {variant.name: _describe_variant(variant) for variant in variants},
    }


def _describe_machine(host: Host) -> Fields:
    """Return the hardware and the system of a machine, without its name."""
    machine = asdict(host.system)
    del machine["hostname"]
    memory = f"{host.memory.total / KIB_PER_GIB:.0f} GiB" if host.memory else ""
    return {"gpus": list(map(asdict, host.gpus)), **machine, "memory": memory}


def _describe_variant(variant: PlannedVariant) -> Fields:
    # The name of a variable tells whether its value is a secret.
    settings = [_mask(f"{name}={value}") for name, value in variant.shared.items()]
    return {
        "command": _mask(" ".join(variant.words)),
        "variables": dict(setting.partition("=")[::2] for setting in settings),
        "versions": dict(variant.facts[0].host.versions) if variant.facts else {},
    }


def _mask(text: str) -> str:
    return _ADDRESS.sub("ADDRESS", mask_secrets(text))


def venv_python(venv: str) -> str:
    """Return the path of an environment's Python; "" stands for the environment of this process."""
    return str(Path(venv or sys.prefix).expanduser().absolute() / "bin/python")
