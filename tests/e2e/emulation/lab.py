"""Ray and vLLM on emulated nodes, started as a user would, with or without patchkit's files.

`patchkit env` writes those: each node probes itself, as a Spark would.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import patchkit
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
PATCHKIT = ("python", "-m", "patchkit")
ENV = {"PYTHONPATH": str(Path(patchkit.__file__).parents[1])}
# That rule leaves cores to what feeds a GPU. Here they are the device, and vLLM counts them itself.
ON_CPU = ("--without", "omp-threads")
ENV_FILE, HEAD_FILE = "/tmp/spark.env", "/tmp/head.env"
SECONDS = 60  # for what takes less than one where nothing else runs
FINDINGS = 3  # exit status of `env check`

Answers = list[tuple[str, list[int]]]


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

    def serve(self, node: Node, *options: str, file: str = "") -> Server:
        """Start `vllm serve`, which listens on the node's own LAN address, and nowhere else."""
        listen = ("--host", wires.lan_ip(node.number), "--port", str(API_PORT))
        fixed = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager")
        command = with_file(file, "vllm", "serve", str(self.model), *listen, *fixed, *options)
        return node.start(*command, log="serve", seconds=SERVE_SECONDS, env=QUIET)

    def answers(self, node: Node, server: Server) -> Answers:
        """What it answers. Raises NodeError if it ends, or is not healthy in time."""
        url = f"http://{wires.lan_ip(node.number)}:{API_PORT}"
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
    address = f"{wires.qsfp_ip(head.number)}:{RAY_PORT}"
    for node in sparks:
        own = f"--node-ip-address={wires.qsfp_ip(node.number)}"
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


def write_files(sparks: Sequence[Node], executor: str, vllm: str = "") -> None:
    """The head's file, carried to the workers, which make their own from it; all are checked.

    ``vllm``: a version instead of the installed one.
    """
    head, *workers = sparks
    cluster = ("--head-ip", wires.qsfp_ip(head.number), "--nodes", str(len(sparks)))
    chosen = ("--executor", executor, "--topology", "socket", *(("--vllm", vllm) if vllm else ()))
    _patchkit(head, "env", "--role", "head", *cluster, *chosen, *ON_CPU, "-o", ENV_FILE)
    for worker in workers:
        worker.file(HEAD_FILE).write_bytes(head.file(ENV_FILE).read_bytes())
        _patchkit(worker, "env", "--role", "worker", "--from", HEAD_FILE, "-o", ENV_FILE)
    for node in sparks:
        _patchkit(node, "env", "check", ENV_FILE)


def check_strangers_file(node: Node) -> str:
    """What `env check` finds in another node's file. Raises NodeError if it is content with it."""
    checking = node.start(
        *PATCHKIT, "env", "check", ENV_FILE, log="check", seconds=SECONDS, env=ENV
    )
    code, output = checking.wait(), node.log("check").read_text()
    address = "this host has no address" in output
    interface = "this host has no interface" in output
    if code != FINDINGS or not (address and interface):
        raise NodeError(f"{node.name}: env check, exit status {code}, of another's file:\n{output}")
    errors = re.search(r"\d+ errors", output)
    return f"env check: {errors[0] if errors else output}, address and interfaces"


def _patchkit(node: Node, *arguments: str) -> str:
    return node.run(*PATCHKIT, *arguments, log="patchkit", seconds=SECONDS, env=ENV)
