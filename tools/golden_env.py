"""Record what `patchkit env` writes for machines of every kind, in tests/data/env.

    python -m tools.regenerate --pages     writes them anew, with PYTHONPATH=tests

Look at the difference before you commit it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from patchkit.cli import group
from patchkit.errors import PatchkitError, UsageError
from patchkit.runtime.envfile.env_file import Format, parse_assignments
from support import hosts

DATA = Path(__file__).parents[1] / "tests" / "data" / "env"
TABLE = DATA / "variables.json"
WHOLE = (
    "single",
    "head",
    "worker on the other port",
    "worker in a ring",
    "worker that is a Thor",
)
NOW = ("--vllm=0.33.0", "--triton=3.8.0", "--nccl=2.30.7")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A machine, its number, and what is asked of it; ``head`` is the case whose file it takes."""

    machine: str
    options: tuple[str, ...]
    node: int = 0
    head: str = ""
    versions: tuple[str, ...] = NOW


def _head(machine: str, *more: str, versions: tuple[str, ...] = NOW) -> Case:
    return Case(machine=machine, options=("--role=head", *more), versions=versions)


def _worker(
    machine: str, head: str, *more: str, node: int = 1, versions: tuple[str, ...] = NOW
) -> Case:
    options = ("--role=worker", *more)
    return Case(
        machine=machine, node=node, options=options, head=head, versions=versions[1:]
    )


V1 = ("--vllm=0.19.1", "--triton=3.6.0", "--nccl=2.28.9")
OLD = ("--vllm=0.11.2", "--triton=3.5.1", "--nccl=2.27.5")
CASES = {
    "single": Case(machine="single", options=("--role=single",)),
    "single, FP8": Case(
        machine="single", options=("--role=single", "--quantization=fp8")
    ),
    "single, NVFP4, old": Case(
        machine="single", options=("--role=single", "--quantization=nvfp4"), versions=V1
    ),
    "single, FP8, old": Case(
        machine="single", options=("--role=single", "--quantization=fp8"), versions=V1
    ),
    "single, no ptxas": Case(
        machine="single", options=("--role=single",), versions=OLD
    ),
    "head": _head("cable_port0"),
    "worker": _worker("cable_port0", "head"),
    "worker on the other port": _worker("cable_port1", "head"),
    "worker without RDMA": _worker("no_rdma", "head"),
    "worker without a cable": _worker("cable_out", "head"),
    "worker off the bus": _worker("single", "head"),
    "worker in another NCCL": _worker(
        "cable_port0", "head", versions=("", NOW[1], "--nccl=2.30.4")
    ),
    "head itself as a worker": _worker("cable_port0", "head", node=0),
    "head, Ray": _head("cable_port0", "--executor=ray"),
    "worker, Ray, other port": _worker("cable_port1", "head, Ray"),
    "head, Ray that overwrites": _head("cable_port0", "--executor=ray", versions=V1),
    "worker, Ray that overwrites": _worker(
        "cable_port0", "head, Ray that overwrites", versions=V1
    ),
    "worker, Ray that overwrites, other port": _worker(
        "cable_port1", "head, Ray that overwrites", versions=V1
    ),
    "head with both cables": _head("both_cables"),
    "head at a switch": _head("cable_port0", "--nodes=4"),
    "head in a ring": _head("ring", "--nodes=3"),
    "worker in a ring": _worker("ring", "head in a ring"),
    "third in a ring": _worker("ring", "head in a ring", node=2),
    "head in a ring of four": _head("ring", "--nodes=4"),
    "head without RDMA": _head("no_rdma"),
    "worker, RDMA that the head lacks": _worker("cable_port0", "head without RDMA"),
    "head, RoCE asked for without RDMA": _head("no_rdma", "--topology=roce"),
    "head, devices renamed": _head("renamed"),
    "head, link down": _head("link_down"),
    "head, no cable": _head("cable_out"),
    "head, no ConnectX on the bus": _head("single"),
    "head on the LAN": _head("single", "--head-ip=10.0.0.10"),
    "head on the LAN, though cabled": _head("cable_port0", "--head-ip=10.0.0.10"),
    "head, an address it lacks": _head("cable_port0", "--head-ip=192.168.100.77"),
    "head, MTU wrong on one half": _head("wrong_mtu"),
    "head, two addresses": _head("two_addresses"),
    "head, IPv6 only": _head("ipv6_only"),
    "head, files missing": _head("missing_files"),
    "head, halves in one subnet": _head("same_subnet"),
    "head, link-local": _head("link_local"),
    "head, one half without an address": _head("one_twin"),
    "head, that half left out": _head("one_twin", "--without=bare-twin"),
    "worker, both halves, the head's one bare": _worker(
        "cable_port0", "head, one half without an address"
    ),
    "head, second half alone": _head("second_half_only"),
    "head, first half taken in": _head("second_half_only", "--with=bare-first-half"),
    "head, a random twin": _head("random_twin"),
    "head, a random twin taken in": _head("random_twin", "--with=random-twin"),
    "head, two NICs in one subnet": _head("two_in_one_subnet"),
    "worker, two NICs in the head's subnet": Case(
        machine="two_in_one_subnet",
        node=1,
        options=("--role=worker", "--head-ip=10.0.0.10"),
    ),
    "head, a switch in the LAN": _head("switch_in_the_lan"),
    "head of sixteen": _head("pair_and_switch", "--nodes=16"),
    "worker of sixteen": _worker("pair_and_switch", "head of sixteen"),
    "head of a pair beside a switch": _head("pair_and_switch"),
    "head of eight, two networks": _head("two_switches", "--nodes=8"),
    "head of eight, network named": _head(
        "two_switches", "--nodes=8", "--head-ip=10.2.0.10"
    ),
    "head of eight, RoCE asked for": _head(
        "two_switches", "--nodes=8", "--topology=roce"
    ),
    "head, kernel 7": _head("kernel7"),
    "head, kernel 7 mended": _head("kernel7_mended"),
    "head, managed over Wi-Fi": _head("wifi_managed"),
    "head on the Wi-Fi": _head("wifi_managed", "--head-ip=192.168.1.40"),
    "worker on the Wi-Fi": _worker("wifi_managed", "head on the Wi-Fi"),
    "head on an overlay": _head("tailscale", "--head-ip=100.101.102.10"),
    "worker on an overlay": _worker("tailscale", "head on an overlay"),
    "worker on the LAN, though cabled": _worker(
        "cable_port0", "head on the LAN, though cabled"
    ),
    "head on the LAN, RoCE asked for": _head(
        "cable_port0", "--head-ip=10.0.0.10", "--topology=roce"
    ),
    "head, sockets asked for": _head(
        "cable_port0", "--head-ip=10.0.0.10", "--topology=socket"
    ),
    "head of Spark and Thor": _head(
        "cable_port0", "--topology=hetero", "--head-ip=192.168.100.10"
    ),
    "worker that is a Thor": _worker("thor", "head of Spark and Thor"),
    "head of Spark and Thor, overwriting": _head(
        "cable_port0",
        "--topology=hetero",
        "--head-ip=192.168.100.10",
        "--executor=ray",
        versions=V1,
    ),
    "a Thor, overwritten": _worker(
        "thor",
        "head of Spark and Thor, overwriting",
        "--without=ptxas-thor",
        versions=V1,
    ),
    "worker, vLLM that is not the head's": _worker(
        "cable_port0", "head", "--vllm=0.32.0"
    ),
    "a name that NCCL does not know": _head(
        "cable_port0", "--set=NCCL_SOCKET_IFACE=eth0"
    ),
    "a rule that is not known": _head("cable_port0", "--with=ray-v3"),
}


def run(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the file's text, and its variables and notes, or the error."""
    case = CASES[name]
    root = folder / f"{case.machine}-{case.node}"
    if not root.exists():
        hosts.build(folder, case.machine, node=case.node)
    taken = ()
    if case.head:
        taken = (f"--from={folder / case.head}.env",)
        (folder / f"{case.head}.env").write_text(run(case.head, folder)[0])
    # A toolkit of this machine's must not come into the golden files.
    done = CliRunner(env={"CUDA_HOME": ""}).invoke(
        group,
        ["env", f"--root={root}", *filter(None, case.versions), *case.options, *taken],
    )
    if isinstance(error := done.exception, PatchkitError):
        return "", {
            "exit_code": error.exit_code,
            "error": str(error).replace(str(folder), "DIR"),
        }
    assert done.exit_code == 0, (name, done.output, done.exception)
    notes = done.stderr.splitlines()
    return done.stdout, {
        "variables": parse_assignments(Format.ENV, done.stdout, name),
        "notes": notes,
    }


def refuse_new_errors(table: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raise UsageError for a case that had a file and is an error now: a slip in a rule."""
    for name, facts in table.items():
        if "error" in facts and "error" not in before.get(name, facts):
            raise UsageError(
                f"{name!r} of tools/golden_env.py had a file, and now: {facts['error']}",
                hint=f"mend the rule; or, if that is meant, take the case out of {TABLE} first",
            )


def golden() -> dict[Path, str]:
    """Return path → text of everything."""
    with tempfile.TemporaryDirectory() as folder:
        found = {name: run(name, Path(folder)) for name in CASES}
    table = {name: facts for name, (_, facts) in found.items()}
    refuse_new_errors(table, json.loads(TABLE.read_text(encoding="utf-8")))
    files = {DATA / f"{name.replace(' ', '-')}.env": found[name][0] for name in WHOLE}
    return {TABLE: json.dumps(table, indent=1, ensure_ascii=False) + "\n", **files}
