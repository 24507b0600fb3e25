"""`patchkit env` on emulated nodes: each probes itself, as a Spark would."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import patchkit
from e2e.emulation import wires
from e2e.emulation.nodes import Node, NodeError

PATCHKIT = ("python", "-m", "patchkit")
ENV = {"PYTHONPATH": str(Path(patchkit.__file__).parents[1])}
# That rule leaves cores to what feeds a GPU. Here they are the device, and vLLM counts them itself.
ON_CPU = ("--without", "omp-threads")
ENV_FILE, HEAD_FILE = "/tmp/spark.env", "/tmp/head.env"
SECONDS = 60  # for what takes less than one where nothing else runs
FINDINGS = 3  # exit status of `env check`


def write_files(sparks: Sequence[Node], executor: str, vllm: str = "") -> None:
    """The head's file, carried to the workers, which make their own from it; all are checked.

    ``vllm``: a version instead of the installed one.
    """
    head, *workers = sparks
    cluster = ("--head-ip", wires.qsfp_ip(head), "--nodes", str(len(sparks)))
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
