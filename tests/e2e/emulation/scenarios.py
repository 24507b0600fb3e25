"""What happens on two and three emulated nodes, with and without the files of `patchkit env`.

    nox -s emulation -- [SCENARIO ...]

Each scenario has nodes of its own, and an outcome that it insists on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from e2e.emulation import wires
from e2e.emulation.lab import (
    ENV_FILE,
    MASTER_PORT,
    Lab,
    check_strangers_file,
    start_ray,
    write_files,
)
from e2e.emulation.nodes import Node, NodeError

RAY = ("--distributed-executor-backend", "ray", "--tensor-parallel-size")
# On one node over a whole scenario, from `ray start` to the answers: what is left on the LAN is
# ARP and IPv6's own multicast, up to 2.5 kB; the model's traffic is megabytes.
LAN_NOISE = 4_000
MODEL_TRAFFIC = 1_000_000


class UnexpectedError(Exception):
    """A scenario ended otherwise than it should."""


def single(lab: Lab) -> str:
    """One node: the answers that all others have to give."""
    text, tokens = lab.expected[0]
    return f"{len(lab.expected)} answers of {len(tokens)} words: {text[:20].strip()} …"


def cured(lab: Lab) -> str:
    """Two nodes, Ray, the files: the answers are a single node's, over the QSFP cable."""
    with lab.sparks(2, "cured") as sparks:
        write_files(sparks, "ray")
        return _served_over_qsfp(lab, sparks)


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
    """The head's file on the worker, too: `env check` finds it, vLLM finds no such interface."""
    with lab.sparks(2, "copied") as sparks:
        write_files(sparks, "ray")
        head, worker = (spark.file(ENV_FILE) for spark in sparks)
        worker.write_bytes(head.read_bytes())
        found = check_strangers_file(sparks[1])
        start_ray(sparks, file=ENV_FILE)
        return f"{found}; {_dies(lab, sparks, r'Unable to find address for: [a-z0-9]+')}"


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
        return _dies(lab, sparks, r"Gloo connectFullMesh failed with .*?remote=\[127\.0\.1\.1\]")


def loopback_name_cured(lab: Lab) -> str:
    """The same /etc/hosts, with the files."""
    with lab.sparks(2, "loopback_name_cured", debian=True) as sparks:
        write_files(sparks, "ray")
        return _served_over_qsfp(lab, sparks)


SCENARIOS = (single, cured, lan, copied, mp, loopback_name, loopback_name_cured)


def _served_over_qsfp(lab: Lab, sparks: Sequence[Node]) -> str:
    start_ray(sparks, file=ENV_FILE)
    _same_answers(lab, sparks, file=ENV_FILE)
    return _over_qsfp(sparks)


def _same_answers(lab: Lab, sparks: Sequence[Node], *, file: str = "") -> None:
    server = lab.serve(sparks[0], *RAY, str(len(sparks)), file=file)
    answers = lab.answers(sparks[0], server)
    insist(answers == lab.expected, f"{json.dumps(answers)} is not {json.dumps(lab.expected)}")


def _over_qsfp(sparks: Sequence[Node]) -> str:
    traffic = [wires.bytes_moved(spark) for spark in sparks]
    for on_lan, on_qsfp in traffic:
        insist(on_lan < LAN_NOISE, f"too much on the LAN: {traffic}")
        insist(on_qsfp > MODEL_TRAFFIC, f"too little on the QSFP cable: {traffic}")
    return f"same answers, over the QSFP cable; bytes on LAN, QSFP: {traffic}"


def _dies(lab: Lab, sparks: Sequence[Node], words: str) -> str:
    file = ENV_FILE if sparks[0].file(ENV_FILE).exists() else ""
    server = lab.serve(sparks[0], *RAY, "2", file=file)
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
