"""Ray and vLLM on two and three emulated nodes, with the files of `patchkit env` and without.

    nox -s emulation -- [SCENARIO ...]

They are started as a user would. Each node probes itself for its file, as a Spark would. Each
scenario has nodes of its own, and an outcome that it insists on.
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
RAY = (
    "--num-gpus=1",
    "--num-cpus=2",
    "--object-store-memory=200000000",
    "--disable-usage-stats",
)
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
FINDINGS = 3  # exit status of `check`
RANKS = ("--distributed-executor-backend", "ray", "--tensor-parallel-size")
# On one node over a whole scenario, from `ray start` to the answers: what is left on the LAN is
# ARP and IPv6's own multicast, up to 2.5 kB; the model's traffic is megabytes.
LAN_NOISE = 4_000
MODEL_TRAFFIC = 1_000_000

Answers = list[tuple[str, list[int]]]


@dataclass(frozen=True)
class Lab:
    """``work`` holds the model, and the logs by scenario."""

    work: Path

    @property
    def model(self) -> Path:
        return self.work / "model"

    @contextlib.contextmanager
    def sparks(
        self, count: int, log: str, *, debian: bool = False
    ) -> Iterator[list[Node]]:
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
        command = with_file(
            file, "vllm", "serve", str(self.model), *listen, *fixed, *options
        )
        return node.start(*command, log="serve", seconds=SERVE_SECONDS, env=QUIET)

    def answers(self, node: Node, server: Server) -> Answers:
        """What it answers. Raises NodeError if it ends, or is not healthy in time."""
        url = f"http://{wires.lan_ip(node.number)}:{API_PORT}"
        question = (
            "python",
            str(HERE / "ask.py"),
            str(self.model),
            url,
            str(SERVE_SECONDS - 20),
        )
        asking = node.start(*question, log="answers", seconds=SERVE_SECONDS)
        while asking.poll() is None:
            if server.poll() is not None:
                raise NodeError(
                    f"vllm serve ended with {server.returncode}:\n{tail(node)}"
                )
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
    chosen = (
        "--executor",
        executor,
        "--topology",
        "socket",
        *(("--vllm", vllm) if vllm else ()),
    )
    _patchkit(head, "env", "--role", "head", *cluster, *chosen, *ON_CPU, "-o", ENV_FILE)
    for worker in workers:
        worker.file(HEAD_FILE).write_bytes(head.file(ENV_FILE).read_bytes())
        _patchkit(
            worker, "env", "--role", "worker", "--from", HEAD_FILE, "-o", ENV_FILE
        )
    for node in sparks:
        _patchkit(node, "check", ENV_FILE)


def check_strangers_file(node: Node) -> str:
    """What `check` finds in another node's file. Raises NodeError if it is content with it."""
    checking = node.start(
        *PATCHKIT, "check", ENV_FILE, log="check", seconds=SECONDS, env=ENV
    )
    code, output = checking.wait(), node.log("check").read_text()
    address = "this host has no address" in output
    interface = "this host has no interface" in output
    if code != FINDINGS or not (address and interface):
        raise NodeError(
            f"{node.name}: check, exit status {code}, of another's file:\n{output}"
        )
    errors = re.search(r"\d+ errors", output)
    return f"check: {errors[0] if errors else output}, address and interfaces"


def _patchkit(node: Node, *arguments: str) -> str:
    return node.run(*PATCHKIT, *arguments, log="patchkit", seconds=SECONDS, env=ENV)


class UnexpectedError(Exception):
    """A scenario ended otherwise than it should."""


def single(lab: Lab) -> str:
    """One node: the answers that all others have to give."""
    text, tokens = lab.expected[0]
    return f"{len(lab.expected)} answers of {len(tokens)} words: {text[:20].strip()} …"


def cured(lab: Lab) -> str:
    """Two nodes, Ray, the files, Debian's /etc/hosts: a single node's answers, over QSFP."""
    with lab.sparks(2, "cured", debian=True) as sparks:
        write_files(sparks, "ray")
        start_ray(sparks, file=ENV_FILE)
        _same_answers(lab, sparks, file=ENV_FILE)
        return _over_qsfp(sparks)


def lan(lab: Lab) -> str:
    """Without files it works too, but the model's traffic takes the LAN, and nothing says so."""
    with lab.sparks(2, "lan") as sparks:
        start_ray(sparks)
        _same_answers(lab, sparks)
        traffic = [wires.bytes_moved(spark) for spark in sparks]
        for on_lan, on_qsfp in traffic:
            insist(on_lan > MODEL_TRAFFIC > on_qsfp, f"not on the LAN: {traffic}")
    return f"same answers, over the LAN, silently; bytes on LAN, QSFP: {traffic}"


def copied(lab: Lab) -> str:
    """The head's file on the worker, too: `check` finds it, vLLM finds no such interface."""
    with lab.sparks(2, "copied") as sparks:
        write_files(sparks, "ray")
        head, worker = (spark.file(ENV_FILE) for spark in sparks)
        worker.write_bytes(head.read_bytes())
        found = check_strangers_file(sparks[1])
        start_ray(sparks, file=ENV_FILE)
        return (
            f"{found}; {_dies(lab, sparks, r'Unable to find address for: [a-z0-9]+')}"
        )


def mp(lab: Lab) -> str:
    """Without Ray: vLLM's own processes on both nodes, with the files."""
    with lab.sparks(2, "mp") as sparks:
        write_files(sparks, "mp")
        head = ("--master-addr", wires.qsfp_ip(1), "--master-port", str(MASTER_PORT))
        both = (*("--tensor-parallel-size", "2", "--nnodes", "2"), *head)
        lab.serve(sparks[1], *both, "--node-rank", "1", "--headless", file=ENV_FILE)
        server = lab.serve(sparks[0], *both, "--node-rank", "0", file=ENV_FILE)
        insist(lab.answers(sparks[0], server) == lab.expected, "other answers")
        return _over_qsfp(sparks)


def loopback_name(lab: Lab) -> str:
    """Debian's /etc/hosts names the node 127.0.1.1: without files gloo connects to nobody."""
    with lab.sparks(2, "loopback_name", debian=True) as sparks:
        start_ray(sparks)
        return _dies(
            lab, sparks, r"Gloo connectFullMesh failed with .*?remote=\[127\.0\.1\.1\]"
        )


SCENARIOS = (single, cured, lan, copied, mp, loopback_name)


def _same_answers(lab: Lab, sparks: Sequence[Node], *, file: str = "") -> None:
    server = lab.serve(sparks[0], *RANKS, str(len(sparks)), file=file)
    answers = lab.answers(sparks[0], server)
    insist(
        answers == lab.expected,
        f"{json.dumps(answers)} is not {json.dumps(lab.expected)}",
    )


def _over_qsfp(sparks: Sequence[Node]) -> str:
    traffic = [wires.bytes_moved(spark) for spark in sparks]
    for on_lan, on_qsfp in traffic:
        insist(on_lan < LAN_NOISE, f"too much on the LAN: {traffic}")
        insist(on_qsfp > MODEL_TRAFFIC, f"too little on the QSFP cable: {traffic}")
    return f"same answers, over the QSFP cable; bytes on LAN, QSFP: {traffic}"


def _dies(lab: Lab, sparks: Sequence[Node], words: str) -> str:
    file = ENV_FILE if sparks[0].file(ENV_FILE).exists() else ""
    server = lab.serve(sparks[0], *RANKS, "2", file=file)
    try:
        lab.answers(sparks[0], server)
    except NodeError as error:
        found = re.search(words, sparks[0].log("serve").read_text())
        if found is None or server.poll() is None:
            raise UnexpectedError(f"not {words!r}, but {error}") from None
        return "ends: " + re.sub(r" with node ids \[.*?\]| with \[.*?\]", "", found[0])
    raise UnexpectedError(f"answers, where it should end with {words!r}")


def insist(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnexpectedError(otherwise)
