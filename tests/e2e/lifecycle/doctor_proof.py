"""Make faults on real systemds, let `patchkit doctor` find them, and run the cures that it prints.

    python -m e2e.lifecycle.doctor_proof WORK [--write] [FAULT ...]

A fault is proved if doctor names its check and its node, claims nothing else that it did not claim
before, and says as before once the command that it printed was run. ``--write`` puts the table of
all into docs/doctor.md.
"""

from __future__ import annotations

import json
import re
import sys
import time
from functools import partial
from typing import Any

from e2e.emulation.scenarios import UnexpectedError
from e2e.lifecycle.__main__ import PageTable, run_all
from e2e.lifecycle.cluster import EmulatedCluster, LifecycleLab, insist
from e2e.lifecycle.doctor_faults import FAULTS, Fault, paste
from e2e.lifecycle.rootfs import USER

WRONG = ("error", "warning")
# As on a new Spark: the user is root without a password.
SUDO = f"umask 337; echo '{USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/spark"
PAGE = PageTable(
    page="doctor.md",
    name="faults",
    maker="nox -s doctor-proof -- --write",
    header=("fault", "what was made", "found as", "the cure that it printed", "cured", "s"),
)

Claims = dict[tuple[str, str], dict[str, Any]]
"""Claims of doctor: what is wrong, by check and node."""


def prove(lab: LifecycleLab, fault: Fault) -> tuple[str, ...]:
    """Make a fault, and insist that it is found and cured; return its row."""
    with lab.cluster(f"doctor-{fault.name}", "serving") as cluster:
        for node in cluster.rack.nodes.values():
            node.root("sh", "-c", SUDO)
        if fault.begin != "serving":
            cluster.down()
        return _proof(cluster, fault)


def _proof(cluster: EmulatedCluster, fault: Fault) -> tuple[str, ...]:
    before = claims(cluster)
    fault.strike(cluster)
    began = time.monotonic()
    now = claims(cluster)
    seconds = time.monotonic() - began
    new = {key: each for key, each in now.items() if key not in before}
    about = fault.about or fault.name
    hits = [key for key in new if key[0] == about and fault.node in key[1]]
    insist(bool(hits), f"not found; new are {_listed(new)}")
    more = {key: each for key, each in new.items() if key[0] not in (about, *fault.also)}
    insist(not more, f"claimed beside it: {_listed(more)}")
    command = cure(str(new[hits[0]]["hint"]))
    (fault.cured or paste)(cluster, command)
    left = {key: each for key, each in claims(cluster).items() if key not in before}
    insist(not left, f"after `{command}`: {_listed(left)}")
    about, where = hits[0]
    outcome = f"yes, by {fault.by}" if fault.by else "yes"
    shown = f"`{command}`" if not fault.cured or "printed" in fault.by else ""
    found = f"`{about}` on {where}"
    return (f"`{fault.name}`", fault.what, found, shown, outcome, f"{seconds:.1f}")


def claims(cluster: EmulatedCluster) -> Claims:
    """Return what doctor says is wrong: errors and warnings."""
    done = cluster.rack.laptop.patchkit("doctor", "--cluster", "--json")
    insist("Traceback" not in done.errors, done.errors)
    try:
        found = json.loads(done.output)["findings"]
    except (ValueError, KeyError):
        raise UnexpectedError(f"doctor says {done.output[:200]} {done.errors}") from None
    return {(each["about"], each["where"]): each for each in found if each["level"] in WRONG}


def cure(hint: str) -> str:
    """Return the command of a hint: in backticks, or the whole of it up to a semicolon."""
    quoted = re.search("`([^`]+)`", hint)
    return quoted[1] if quoted else hint.partition(";")[0].split("\n")[0].strip()


def _listed(found: Claims) -> str:
    said = (f"{about} [{where}] {each['what']}" for (about, where), each in found.items())
    return "; ".join(said) or "nothing"


if __name__ == "__main__":
    made = {fault.name: partial(prove, fault=fault) for fault in FAULTS}
    sys.exit(run_all(sys.argv[1:], PAGE, made, packages=["sudo"]))
