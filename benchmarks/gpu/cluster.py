"""Two nodes made of network namespaces, a GPU each: what real NCCL does with patchkit's env files.

    python cluster.py --work DIR

Each node has a LAN interface, which its default route takes, and both halves of a QSFP cable, named
differently on the two. torch's own NCCL runs over them with the files of `patchkit env`, without,
and with the head's file on the worker. What moved where is read from the interfaces' counters.
There is no RDMA between them, so this is the socket topology. Takes root, iproute2 and two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from e2e.emulation import wires  # noqa: E402
from e2e.emulation.nodes import Node, NodeError, Nodes, obstacle  # noqa: E402

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
HEAD, WORKER = "/tmp/head.env", "/tmp/worker.env"  # noqa: S108  # of the node
SECONDS = 60
# NCCL's log and the rank's own words come through two buffers, so they may be mixed.
SAID = re.compile(r'\{"nccl": "([\d.]+)".*"gigabytes_per_second": ([\d.]+)\}')
USED = re.compile(r"NET/Socket : Using (.*)|(?:WARN|Bootstrap :) (.*interface.*)")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What moved per node and network, in MB, and what the ranks said."""

    name: str
    outcome: str
    lan: float
    qsfp: float
    used: str

    def __str__(self) -> str:
        moved = f"LAN {self.lan:9.1f} MB  QSFP {self.qsfp:9.1f} MB"
        return f"{self.name:34} {moved}  {self.outcome}\n{'':34} {self.used}"


@contextlib.contextmanager
def cluster(work: Path, name: str) -> Iterator[tuple[Node, Node]]:
    names = ("spark1", "spark2")
    hosts = {each: wires.hosts(names) for each in names}
    nodes = Nodes(
        folder=work / name, bin=BIN, shared=(REPOSITORY, work, Path(sys.prefix))
    )
    with nodes.up({**hosts, "switch": ""}) as (one, other, switch):
        wires.connect((one, other), switch)
        yield one, other


def environment(node: Node) -> dict[str, str]:
    keep = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME")
    kept = {key: os.environ[key] for key in keep if key in os.environ}
    return {**kept, "CUDA_VISIBLE_DEVICES": str(node.number - 1)}


def write_files(head: Node, worker: Node) -> None:
    """As a user does: on the head, then with the head's file on the worker."""
    patchkit = (
        "python3",
        "-m",
        "patchkit",
        "env",
        "--vllm=0.25.1",
        "--set=NCCL_DEBUG=INFO",
    )
    asked = (
        "--role=head",
        "--nodes=2",
        f"--head-ip={wires.qsfp_ip(head.number)}",
        f"--output={HEAD}",
    )
    head.run(*patchkit, *asked, log="env", seconds=30, env=environment(head))
    worker.file(HEAD).write_text(head.file(HEAD).read_text())
    patchkit = ("python3", "-m", "patchkit", "env")
    taken = ("--role=worker", f"--from={HEAD}", f"--output={WORKER}")
    worker.run(*patchkit, *taken, log="env", seconds=30, env=environment(worker))


def with_file(file: str, *command: str) -> tuple[str, ...]:
    source = 'set -a; . "$0"; set +a; exec "$@"'
    return ("sh", "-c", source, file, *command) if file else command


def all_reduce(work: Path, name: str, files: tuple[str, str], address: str) -> Row:
    """Both ranks in nodes of their own; ``files`` are what they source, empty for none."""
    with cluster(work, name.replace(" ", "-")) as nodes:
        write_files(*nodes)
        ranks = [
            node.start(
                *with_file(
                    file, "python3", str(HERE / "allreduce.py"), str(rank), address
                ),
                log="rank",
                seconds=SECONDS,
                env={"NCCL_DEBUG": "INFO", **environment(node)},
            )
            for rank, (node, file) in enumerate(zip(nodes, files, strict=True))
        ]
        codes = [rank.wait(SECONDS + 10) for rank in ranks]
        return row(name, nodes, codes)


def row(name: str, nodes: Sequence[Node], codes: Sequence[int]) -> Row:
    moved = [wires.bytes_moved(node) for node in nodes]
    logs = [node.log("rank").read_text(errors="replace") for node in nodes]
    return Row(
        name=name,
        outcome=" | ".join(map(outcome, codes, logs)),
        lan=moved[0][0] / 1e6,
        qsfp=moved[0][1] / 1e6,
        used=" | ".join(map(used, logs)),
    )


def outcome(code: int, log: str) -> str:
    if not code and (said := SAID.search(log)):
        return f"right, {said[2]} GB/s, NCCL {said[1]}"
    words = [line for line in log.splitlines() if "rror" in line or "WARN" in line]
    return f"exit {code}: {words[-1][-160:] if words else ''}"


def used(log: str) -> str:
    found = USED.search(log)
    return (found[1] or found[2]).strip() if found else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if why := obstacle():
        print(f"cannot be done here: {why}")  # noqa: T201
        return 1
    both, qsfp, lan = (HEAD, WORKER), "192.168.100.11", "10.0.0.11"
    cases = (
        ("patchkit's files", both, qsfp),
        ("no files", ("", ""), lan),
        ("the head's file on the worker", (HEAD, HEAD), qsfp),
    )
    for name, files, address in cases:
        try:
            print(all_reduce(work, name, files, address), flush=True)  # noqa: T201
        except NodeError as error:
            print(f"{name}: {error}", flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
