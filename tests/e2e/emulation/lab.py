"""Ray and vLLM on emulated nodes, started as a user would, with or without patchkit's files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from e2e.emulation import wires
from e2e.emulation.nodes import Node, NodeError, Nodes

HERE = Path(__file__).parent
BIN = Path(sys.prefix) / "bin"
SPARKS = ("spark1", "spark2", "spark3")
RAY_PORT, API_PORT, MASTER_PORT = 6379, 8000, 29501
RAY_SECONDS, SERVE_SECONDS = 120, 300
RAY = ("--num-gpus=1", "--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats")
# Not about the network: no hub, no statistics, and few cores that others use, too.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

Answers = list[tuple[str, list[int]]]
Env = Mapping[str, str]


@dataclass(frozen=True)
class Lab:
    """``work`` holds the model, and the logs by scenario."""

    work: Path

    @property
    def model(self) -> Path:
        return self.work / "model"

    @contextlib.contextmanager
    def sparks(self, count: int, log: str, *, debian: bool = False) -> Iterator[list[Node]]:
        """So many nodes, connected; their logs are in a folder of that name.

        ``debian``: /etc/hosts names each node 127.0.1.1 for itself.
        """
        names = SPARKS[:count]
        hosts = {name: wires.hosts(names, name if debian else "") for name in names}
        shared = (self.work, HERE.parents[2], Path(sys.prefix))
        nodes = Nodes(folder=self.work / "logs" / log, bin=BIN, shared=shared)
        with nodes.up({**hosts, "switch": ""}) as (*sparks, switch):
            wires.connect(sparks, switch)
            yield sparks

    @cached_property
    def expected(self) -> Answers:
        """What a single node answers: one process holds the whole model."""
        with self.sparks(1, "single") as (spark,):
            return self.answers(spark, self.serve(spark))

    def serve(
        self,
        node: Node,
        *options: str,
        file: str = "",
    ) -> Server:
        """Start `vllm serve`, which listens on the node's own LAN address, and nowhere else."""
        listen = ("--host", wires.lan_ip(node), "--port", str(API_PORT))
        fixed = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager")
        command = with_file(file, "vllm", "serve", str(self.model), *listen, *fixed, *options)
        return node.start(*command, log="serve", seconds=SERVE_SECONDS, env=QUIET)

    def answers(self, node: Node, server: Server) -> Answers:
        """What it answers. Raises NodeError if it ends, or is not healthy in time."""
        url = f"http://{wires.lan_ip(node)}:{API_PORT}"
        question = ("python", str(HERE / "ask.py"), str(self.model), url, str(SERVE_SECONDS - 20))
        asking = node.start(*question, log="answers", seconds=SERVE_SECONDS)
        while asking.poll() is None:
            if server.poll() is not None:
                raise NodeError(f"vllm serve ended with {server.returncode}:\n{tail(node)}")
            time.sleep(0.5)
        if asking.returncode:
            raise NodeError(f"no answer:\n{tail(node, 'answers')}\n{tail(node)}")
        lines = node.log("answers").read_text().splitlines()
        return [(text, tokens) for text, tokens in json.loads(lines[-1])]


Server = subprocess.Popen[bytes]


def start_ray(sparks: Sequence[Node], *, file: str = "") -> None:
    """A cluster on the QSFP addresses. Variables are those of `ray start`, so of Ray's workers."""
    head = sparks[0]
    address = f"{wires.qsfp_ip(head)}:{RAY_PORT}"
    for node in sparks:
        own = f"--node-ip-address={wires.qsfp_ip(node)}"
        place = (f"--port={RAY_PORT}", "--head", "--include-dashboard=false")
        where = place if node is head else (f"--address={address}",)
        command = with_file(file, "ray", "start", *where, own, *RAY)
        node.run(*command, log="ray", seconds=RAY_SECONDS, env=QUIET)


def with_file(file: str, *command: str) -> tuple[str, ...]:
    """The command with a file's variables, read as a shell reads them; no file: as it is."""
    source = 'set -a; . "$0"; set +a; exec "$@"'
    return ("sh", "-c", source, file, *command) if file else command


def tail(node: Node, log: str = "serve") -> str:
    """The end of a log, without the frames of tracebacks."""
    lines = node.log(log).read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if "  File " not in line][-30:])
