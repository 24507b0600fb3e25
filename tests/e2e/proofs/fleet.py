"""Measure what patchkit itself costs for many nodes, on machines made of files.

    python -m e2e.proofs.fleet [2 8 16 100]

One row for each number: each node probed, its env file, its command line, and one manifest from
the head's facts alone. Nothing is asked over ssh, and nothing is started.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.launch.plan import PlannedRank, planned_ranks, served_model
from patchkit.runtime.envfile.parse import parse
from patchkit.runtime.envfile.syntax import Format
from support import hosts
from support.clusters import cluster, node_facts
from support.manifests import manifest, planned

MODEL = "openai/gpt-oss-120b"
NODES = (2, 8, 16, 100)
HEADS = ("nodes", "machines probed", "env files and command lines", "one manifest, from the head")


def row(nodes: int, folder: Path) -> tuple[str, ...]:
    """Return a row of figures, in seconds. Checks what was made: one rank and address a node."""
    names = [f"spark-{number + 1}" for number in range(nodes)]
    for number in range(nodes):
        hosts.build(folder, "cable_port0", node=number)
    facts: list[NodeFacts] = []
    ranks: list[PlannedRank] = []
    file = cluster(*names)
    probed = _timed(
        lambda: facts.extend(node_facts(folder, node=each, vllm="0.33.0") for each in range(nodes))
    )
    planning = _timed(lambda: ranks.extend(planned_ranks(file, facts, served_model(file, MODEL))))
    written = _timed(lambda: manifest(planned(folder, MODEL, nodes)))
    texts = [parse(Format.SYSTEMD, each.text, each.ssh) for each in ranks]
    assert len({each["VLLM_HOST_IP"] for each in texts}) == nodes
    assert [each.command.request.number for each in ranks if each.command] == [*range(nodes)]
    return (str(nodes), *(f"{seconds:.2f} s" for seconds in (probed, planning, written)))


def _timed(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def main(arguments: Sequence[str]) -> None:
    """Print a table; the first row takes what is read once."""
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    for nodes in map(int, arguments or NODES):
        with tempfile.TemporaryDirectory() as folder:
            print(f"| {' | '.join(row(nodes, Path(folder)))} |")


if __name__ == "__main__":
    main(sys.argv[1:])
