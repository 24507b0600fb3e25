"""Plan how each variant is served: its command, its variables, and what its environment holds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterFile, ClusterNode, read_cluster_file
from patchkit.cluster.launch.plan import ServedModel, planned_ranks, served_model, served_words
from patchkit.cluster.launch.up import make_plan
from patchkit.cluster.openai.api_key import is_here
from patchkit.cluster.ssh.ssh import HERE
from patchkit.doctor.cluster import examined
from patchkit.doctor.peers.report import NodeReport
from patchkit.errors import HostError, UsageError
from patchkit.measure.bench.variants import Variant
from patchkit.reading import read_text
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.envfile.parse import parse
from patchkit.runtime.envfile.syntax import Format

_NO_PREFIXES = "--no-enable-prefix-caching"  # the warm-up asks the first prompt of those that count
VLLM = ("-m", "vllm.entrypoints.cli.main")  # a venv that was moved has no program of the right path


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedVariant:
    """A variant: the words of `vllm serve` on its head, the variables, what the nodes said.

    ``python`` is the one that asks, ``tokenizer`` a folder here, "" for what the model's name says.
    Without a ``cluster`` the words lack an address, and are run here.
    """

    variant: Variant
    words: tuple[str, ...]
    variables: Mapping[str, str]
    reports: tuple[NodeReport, ...]
    python: str
    tokenizer: str = ""
    cluster: Cluster | None = None

    @property
    def report(self) -> NodeReport:
        return self.reports[0]


def planned(
    variants: Sequence[Variant], model: str, commits: Mapping[str, str] | None = None
) -> list[PlannedVariant]:
    """Return how to serve a model in each way; ``commits`` are of models that lie here, by name.

    Raises HostError for an environment without vLLM, UsageError for two variants of one name.
    """
    names = [each.name for each in variants]
    if twice := [each for each in names if names.count(each) > 1]:
        raise UsageError(f"two variants are called {twice[0]!r}", hint="give each its own name")
    return [
        _of_cluster(each, model) if each.cluster else _here(each, model, commits or {})
        for each in variants
    ]


def planned_elsewhere(url: str, venv: str) -> PlannedVariant:
    """Return a server that runs already; of another machine than this nothing is known."""
    where = NodeReport(node=urlsplit(url).hostname or url)
    file = ClusterFile(node=(ClusterNode(ssh=HERE),), venv=_venv(venv))
    return PlannedVariant(
        variant=Variant(name="served"),
        words=(),
        variables={},
        reports=tuple(examined(Cluster(file))) if is_here(url) else (where,),
        python=f"{file.venv}/bin/python" if venv else sys.executable,
    )


def _venv(named: str) -> str:
    return str(Path(named).expanduser().absolute()) if named else sys.prefix


def _here(variant: Variant, model: str, commits: Mapping[str, str]) -> PlannedVariant:
    venv = _venv(variant.venv)
    file = ClusterFile(node=(ClusterNode(ssh=HERE),), venv=venv, models=commits)
    (report,) = examined(Cluster(file))
    if report.contents is None or "vllm" not in report.contents.versions:
        raise HostError(
            f"there is no vLLM in {venv}",
            why="it serves the model and measures it",
            hint="name the environment that has it: --venv DIR; or a server that runs: --url URL",
        )
    served = served_model(file, model)
    python = f"{venv}/bin/python"
    source = str(Path(served.folder).expanduser()) if served.folder else served.source
    words: tuple[str, ...] = ("vllm", "serve", source)
    variables: dict[str, str] = {}
    if not variant.plain:
        assert report.facts is not None
        (rank,) = planned_ranks(file, [report.facts], served)
        assert rank.command is not None
        words = served_words(file, rank.command, served)
        variables = parse(Format.SYSTEMD, rank.text, "the env file of this node")
    if variant.env_file:
        variables |= _loaded(Path(variant.env_file))
    return PlannedVariant(
        variant=variant,
        words=(python, *VLLM, *words[1:], _NO_PREFIXES, *variant.args),
        variables={**variables, **variant.set},
        reports=(report,),
        python=python,
        tokenizer=_tokenizer(served),
    )


def _of_cluster(variant: Variant, model: str) -> PlannedVariant:
    """Return a variant as `cluster up` would start it, with what a measurement asks for."""
    file = read_cluster_file(Path(variant.cluster))
    serve = replace(
        file.serve,
        args=(*file.serve.args, _NO_PREFIXES, *variant.args),
        set={**file.serve.set, **variant.set},
    )
    cluster = Cluster(replace(file, serve=serve))
    python = str(Path(variant.venv or file.venv).expanduser() / "bin/python")
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
            hint=f'listen = "lan" in [serve] of {variant.cluster}, or measure on the head',
        )
    return PlannedVariant(
        variant=variant,
        words=plan.units.ranks[0].words,
        variables=parse(Format.SYSTEMD, plan.ranks[0].text, "the env file of the head"),
        reports=tuple(examined(cluster)),
        python=python,
        tokenizer=_tokenizer(plan.model),
        cluster=cluster,
    )


def _tokenizer(model: ServedModel) -> str:
    folder = Path(model.folder).expanduser() if model.folder else Path()
    return str(folder) if (folder / "tokenizer.json").exists() else ""


def _loaded(path: Path) -> Mapping[str, str]:
    text = read_text(path, hint="`patchkit env --role single -o node.env` writes one")
    return parse(Format(head_facts(text).get("format", Format.ENV)), text, str(path))
