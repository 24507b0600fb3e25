"""Make faults on real systemds, let `patchkit doctor` find them, and run the cures that it prints.

    python -m e2e.lifecycle.doctor_proof WORK [--write] [FAULT ...]

A fault is proved if doctor names its check and its node, claims nothing else that it did not claim
before, and says as before once the command that it printed was run. ``--write`` puts the table into
docs/doctor.md: rows of faults that were not made stay.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.emulation.nodes import NodeError
from e2e.emulation.scenarios import UnexpectedError
from e2e.lifecycle import page, rootfs
from e2e.lifecycle.cluster import EmulatedCluster, LifecycleLab, insist
from e2e.lifecycle.doctor_faults import FAULTS, Fault, allow_sudo, install, paste
from patchkit.errors import PatchkitError

WRONG = ("error", "warning")

Claims = dict[tuple[str, str], dict[str, Any]]
"""Claims of doctor: what is wrong, by check and node."""


@dataclass(frozen=True, kw_only=True)
class ProvedFault:
    """``row`` is its line of the table; ``failure`` what is not proved, "" for nothing."""

    name: str
    row: tuple[str, ...] = ()
    failure: str = ""


def main(words: Sequence[str]) -> int:
    """Prove them, some side by side; every one has its turn, even if another failed."""
    parser = argparse.ArgumentParser(prog="nox -s doctor-proof --")
    parser.add_argument("work", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="faults side by side")
    parser.add_argument("fault", nargs="*")
    given = parser.parse_intermixed_args(words)
    known = {each.name: each for each in FAULTS}
    if strange := sorted(set(given.fault) - set(known)):
        parser.error(f"no such fault: {', '.join(strange)}; there are {', '.join(known)}")
    chosen = [known[name] for name in given.fault] or list(FAULTS)
    work = given.work.resolve()
    lab = LifecycleLab(work, rootfs.ready(work, ["sudo"]))
    print(page.FAULTS.head, end="")
    with ThreadPoolExecutor(given.jobs) as pool:
        results = [_shown(each) for each in pool.map(lambda fault: _proved(lab, fault), chosen)]
    failed = [each.name for each in results if each.failure]
    found = len(results) - len(failed)
    print(f"{found} of {len(results)} faults found, named and cured; logs: {work / 'logs'}")
    if given.write and not failed:
        page.FAULTS.write([each.row for each in results], [each.name for each in FAULTS])
    return 1 if failed else 0


def _shown(result: ProvedFault) -> ProvedFault:
    if result.row:
        print(page.FAULTS.line(result.row), end="")
    if result.failure:
        print(f"{result.name}: {result.failure}")
    return result


def _proved(lab: LifecycleLab, fault: Fault) -> ProvedFault:
    try:
        with _begun(lab, fault) as cluster:
            return _proof(cluster, fault)
    except (UnexpectedError, NodeError, PatchkitError, AssertionError) as error:
        return ProvedFault(name=fault.name, failure=str(error))


def _begun(lab: LifecycleLab, fault: Fault) -> AbstractContextManager[EmulatedCluster]:
    return (lab.bare if fault.begin == "installed" else lab.prepared)(f"doctor-{fault.name}")


def _proof(cluster: EmulatedCluster, fault: Fault) -> ProvedFault:
    for node in cluster.rack.nodes.values():
        allow_sudo(node)
    if fault.begin == "installed":
        cluster.describe()
        install(cluster)
    cluster.up()
    if fault.begin != "serves":
        cluster.down()
    before = claims(cluster)
    fault.make(cluster)
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
    row = (f"`{fault.name}`", fault.what, found, shown, outcome, f"{seconds:.1f}")
    return ProvedFault(name=fault.name, row=row)


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
    sys.exit(main(sys.argv[1:]))
