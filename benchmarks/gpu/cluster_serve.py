"""`vllm serve` on two nodes made of network namespaces, a GPU each, with real NCCL between them.

    python cluster_serve.py --work DIR --model FOLDER

The variables are those of `patchkit env`, the flags those of `patchkit serve-args`; vLLM is the one
that Python imports. What two nodes answer is compared with what one does, and what moved where is
read from the interfaces. The model is a small one with random weights: nothing here is about speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import cluster

from e2e.emulation import ask, wires
from e2e.emulation.nodes import Node, NodeError

START = 240  # seconds until a server answers
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HOME": "/tmp/home",  # noqa: S108  # of the node
}
SAME = ("--dtype=float32", "--attention-backend=TRITON_ATTN", "--max-model-len=1024")


def flags(node: Node, file: str, model: Path, *more: str) -> list[str]:
    """Those that `patchkit serve-args` prints."""
    command = (
        "python3",
        "-m",
        "patchkit",
        "serve-args",
        str(model),
        f"--from={file}",
        *more,
    )
    output = node.run(
        *command, "--json", log="args", seconds=30, env=cluster.environment(node)
    )
    return list(json.loads(output[output.index("{") :])["command"][2:])


def bare(node: Node, head: Node, model: Path, sizes: str) -> list[str]:
    """What a user who knows of no env file would type: the addresses of the LAN."""
    rank = node.number - 1
    place = (
        "--nnodes=2",
        f"--node-rank={rank}",
        f"--master-addr={wires.lan_ip(head.number)}",
    )
    return [str(model), *sizes.split(), *place, *(["--headless"] if rank else [])]


def start(node: Node, arguments: list[str], file: str) -> object:
    command = ("python3", "-m", "vllm.entrypoints.cli.main", "serve", *arguments, *SAME)
    env = {**cluster.environment(node), **QUIET, "NCCL_DEBUG": "INFO"}
    return node.start(
        *cluster.with_file(file, *command), log="rank", seconds=START, env=env
    )


def answers(node: Node, model: Path, address: str) -> list[list[int]]:
    """The tokens that it answers. Raises NodeError."""
    script = (
        "python3",
        str(Path(ask.__file__)),
        str(model),
        f"http://{address}:8000",
        "200",
    )
    output = node.run(
        *script, log="answers", seconds=START, env=cluster.environment(node)
    )
    found = next(line for line in output.splitlines() if line.startswith("[["))
    return [tokens for _, tokens in json.loads(found)]


def alone(work: Path, model: Path) -> list[list[int]]:
    with cluster.cluster(work, "alone") as (node, _):
        start(
            node,
            [
                str(model),
                f"--host={wires.lan_ip(node.number)}",
                "--gpu-memory-utilization=0.3",
            ],
            "",
        )
        return answers(node, model, wires.lan_ip(node.number))


def together(
    work: Path, name: str, model: Path, expected: object, *, files: bool
) -> None:
    with cluster.cluster(work, name.replace(" ", "-")) as nodes:
        head, worker = nodes
        cluster.write_files(head, worker)
        mine = flags(head, cluster.HEAD, model, "--listen=cable")
        his = flags(worker, cluster.WORKER, model, "--node-rank=1")
        if not files:
            sizes = "--pipeline-parallel-size=2"
            mine = [
                *bare(head, head, model, sizes),
                f"--host={wires.lan_ip(head.number)}",
            ]
            his = bare(worker, head, model, sizes)
        began = time.monotonic()
        start(worker, his, cluster.WORKER if files else "")
        start(head, mine, cluster.HEAD if files else "")
        address = wires.qsfp_ip(head.number) if files else wires.lan_ip(head.number)
        found = answers(head, model, address)
        took = time.monotonic() - began
        verdict = (
            "the tokens of one node" if found == expected else f"OTHER TOKENS: {found}"
        )
        row = cluster.row(name, nodes, [0, 0])
        moved = f"LAN {row.lan:.2f} MB  QSFP {row.qsfp:.2f} MB"
        print(f"{row.name}  {moved}  {verdict}  {took:.0f} s")  # noqa: T201
        print("  ", " ".join(mine), "\n  ", row.used, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    options = parser.parse_args()
    work, model = options.work.resolve(), options.model.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        expected = alone(work, model)
        together(work, "with files", model, expected, files=True)
        together(work, "without files", model, expected, files=False)
    except NodeError as error:
        print(error)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
