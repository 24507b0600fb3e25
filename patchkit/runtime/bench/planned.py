"""Plan how each variant is served: its command, its variables, and what its environment holds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError, UsageError
from patchkit.reading import read_text
from patchkit.runtime.bench.variants import Variant
from patchkit.runtime.doctor.cluster import examined
from patchkit.runtime.envfile.header import head_facts
from patchkit.runtime.envfile.parse import parse
from patchkit.runtime.envfile.syntax import Format
from patchkit.runtime.launch.cluster import Cluster
from patchkit.runtime.launch.cluster_file import ClusterFile, ClusterNode
from patchkit.runtime.launch.plan import planned_ranks, served_model
from patchkit.runtime.peers.report import NodeReport
from patchkit.runtime.remote.ssh import HERE

_NO_PREFIXES = "--no-enable-prefix-caching"  # the warm-up asks the first prompt of those that count
VLLM = ("-m", "vllm.entrypoints.cli.main")  # a venv that was moved has no program of the right path


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedVariant:
    """A variant with the words of `vllm serve` but for its address, and the variables it gets."""

    variant: Variant
    words: tuple[str, ...]
    variables: Mapping[str, str]
    report: NodeReport

    @property
    def python(self) -> str:
        return self.words[0]


def planned(variants: Sequence[Variant], model: str) -> list[PlannedVariant]:
    """Return how to serve a model in each way, on this machine.

    Raises HostError for an environment without vLLM, UsageError for two variants of one name.
    """
    names = [each.name for each in variants]
    if twice := [each for each in names if names.count(each) > 1]:
        raise UsageError(f"two variants are called {twice[0]!r}", hint="give each its own name")
    return [_planned(each, model) for each in variants]


def _planned(variant: Variant, model: str) -> PlannedVariant:
    venv = str(Path(variant.venv).expanduser().absolute()) if variant.venv else sys.prefix
    cluster = Cluster(ClusterFile(node=(ClusterNode(ssh=HERE),), venv=venv))
    (report,) = examined(cluster)
    if report.contents is None or "vllm" not in report.contents.versions:
        raise HostError(
            f"{variant.name}: there is no vLLM in {venv}", hint="name the one that has it: --venv"
        )
    words: tuple[str, ...] = (f"{venv}/bin/python", *VLLM, "serve", model)
    variables: dict[str, str] = {}
    if not variant.plain:
        assert report.facts is not None
        (rank,) = planned_ranks(cluster.file, [report.facts], served_model(cluster.file, model))
        assert rank.command is not None
        words = (*words[:3], *rank.command.words[1:])
        variables = parse(Format.SYSTEMD, rank.text, "the env file of this node")
    if variant.env_file:
        variables |= _loaded(Path(variant.env_file))
    return PlannedVariant(
        variant=variant,
        words=(*words, _NO_PREFIXES, *variant.args),
        variables={**variables, **variant.set},
        report=report,
    )


def _loaded(path: Path) -> Mapping[str, str]:
    text = read_text(path, hint="`patchkit env --role single -o node.env` writes one")
    return parse(Format(head_facts(text).get("format", Format.ENV)), text, str(path))
