"""Say which code of vLLM a device compiles at its first use, on each node that doctor asked.

What looks there is given: it reads fat binaries, of which doctor by itself knows nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from patchkit.cluster.ssh.node import Remote, run_on_all
from patchkit.cluster.ssh.ssh import HERE, ssh_command
from patchkit.doctor.judgement import LATER
from patchkit.doctor.peers.node_report import (
    NodeReport,
    NotCheckedError,
    Outcome,
    check,
    require,
)
from patchkit.doctor.visit import Visit
from patchkit.errors import PatchkitError, reason
from patchkit.quoting import quoted
from patchkit.runtime.host.host import plain_version
from patchkit.runtime.rules.variable_rules import CACHES, cache_variables
from patchkit.target import Load, best_load, listed, targets
from patchkit.units import BYTES_PER_MIB
from patchkit.unreached import NOTHING_READ, known_dispatch

_NAMES = re.compile(r"\b(?:sm|compute)_\d{2,3}[af]?\b")
_UNNAMED = "no Python with vLLM is known"
_CACHE = "~/.nv/ComputeCache"  # the driver's own choice


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCodeFound:
    """What a first use finds.

    ``codes`` has, of each library that holds device code, how many fat binaries hold which:
    ``sm_80 compute_80``. ``kept`` are the bytes in the driver's ``cache``; ``forced`` is the
    variable that has it compile all PTX, "" if none does.
    """

    codes: Mapping[str, Mapping[str, int]]
    cache: str
    kept: int
    forced: str


def add_first_use(visited: Visit, look: Callable[..., dict[str, Any]]) -> Visit:
    """Return a visit with what each node compiles at a first use; all are asked side by side.

    ``look`` runs on the nodes, with the folder of vLLM, a process of it or 0, and the cache, and
    returns the fields of a ``DeviceCodeFound``.
    """

    def ask(report: NodeReport) -> DeviceCodeFound:
        software = require(report.host.software, _UNNAMED)
        require(software.vllm_home or None, _UNNAMED)
        process = next((each.pid for each in report.processes or ()), 0)
        own = cache_variables(f"~/{CACHES}", software.vllm)["CUDA_CACHE_PATH"]
        cache = own if report.placed else _CACHE
        asked = {"home": software.vllm_home, "process": process, "cache": cache}
        try:
            return Remote(report.node).call(DeviceCodeFound, look, **asked)
        except OSError as error:
            raise NotCheckedError(reason(error)) from None

    if not visited.reports:  # a log was read
        return visited
    said = run_on_all(visited.reports, ask)
    found = list(visited.findings)
    for report, its in zip(visited.reports, said, strict=True):
        found += check_first_use(report, its)
    return replace(
        visited, findings=tuple(sorted(found, key=lambda each: each.level in LATER))
    )


def count_loads(
    codes: Mapping[str, Mapping[str, int]], capability: str, version: str = ""
) -> dict[str, Counter[Load]]:
    """Return how many fat binaries of each library reach a device of ``12.1``, and how.

    What that version of vLLM never calls on the device is not counted.
    """
    major, minor = map(int, capability.split("."))
    device = next(
        (row for row in targets().values() if row.capability == (major, minor)), None
    )
    dispatch = known_dispatch("vllm", version, device) if device else NOTHING_READ
    found = {name: Counter[Load]() for name in codes}
    for name, held in codes.items():
        for names, count in held.items():
            if dispatch.leaves(name, names.split()):
                continue
            found[name][best_load(listed(_NAMES.findall(names)), (major, minor))] += (
                count
            )
    return found


@check("first-use")
def check_first_use(node: NodeReport, said: DeviceCodeFound | PatchkitError) -> Outcome:
    if isinstance(said, PatchkitError):
        raise NotCheckedError(said.what)
    capability = next((gpu.capability for gpu in node.host.gpus), "")
    if not re.fullmatch(r"\d{1,2}\.\d", capability):
        raise NotCheckedError("no GPU says its compute capability")
    if said.forced:
        return node.find("ptx-forced", name=said.forced)
    version = node.host.software.vllm if node.host.software else ""
    loads = count_loads(said.codes, capability, version)
    compiled = +Counter({name: its[Load.JIT] for name, its in loads.items()})
    shown = ", ".join(f"{name} ({count})" for name, count in compiled.most_common())
    if not shown:
        return {"what": "vLLM's libraries hold machine code for this GPU"}
    if said.kept:
        kept = f"{said.cache} has {said.kept / BYTES_PER_MIB:.0f} MiB"
        return {
            "what": f"{shown} hold PTX alone for this GPU; {kept} of what was compiled"
        }
    software = require(node.host.software, _UNNAMED)
    command = ssh_command(
        node.node, "patchkit", "apply", "--native", software.vllm_home
    )
    if node.node != HERE:  # where patchkit need not be
        again = quoted(
            "patchkit", "repack", f"vllm=={plain_version(software.vllm)}", "--native"
        )
        command = f"`{again}`, then `patchkit cluster install`"
    return node.find("first-use", libraries=shown, cache=said.cache, command=command)
