"""Say which code of vLLM a device compiles at its first use, on each node that doctor asked."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from patchkit.cluster.ssh.node import Remote, run_on_all
from patchkit.cluster.ssh.ssh import HERE
from patchkit.doctor.cluster_checks import NOT_WRONG
from patchkit.doctor.examination import Examination
from patchkit.doctor.installed_code import DeviceCodeFound, look_at_device_code
from patchkit.doctor.peers.node_report import (
    NodeReport,
    NotCheckedError,
    Outcome,
    check,
    require,
)
from patchkit.errors import PatchkitError
from patchkit.quoting import quoted
from patchkit.runtime.host.host import plain_version
from patchkit.runtime.rules.rule import CACHES, cache_variables
from patchkit.target import (
    Load,
    best_load,
    list_archs,
)
from patchkit.units import BYTES_PER_MIB

_ARCH_NAMES = re.compile(r"\b(?:sm|compute)_\d{2,3}[af]?\b")
_UNNAMED = "no Python with vLLM is known"
_DRIVERS_CACHE = "~/.nv/ComputeCache"  # the driver's default


def add_first_use(examination: Examination) -> Examination:
    """Return an examination with what each node compiles at a first use.

    All nodes are asked at the same time.
    """

    def look_on(report: NodeReport) -> DeviceCodeFound:
        software = require(report.host.software, _UNNAMED)
        require(software.vllm_home or None, _UNNAMED)
        cache = _DRIVERS_CACHE
        if report.placed:
            variables = cache_variables(f"~/{CACHES}", software.vllm)
            cache = variables["CUDA_CACHE_PATH"]

        processes = report.processes or ()
        return Remote(report.node).call(
            DeviceCodeFound,
            look_at_device_code,
            home=software.vllm_home,
            process=processes[0].pid if processes else 0,
            cache=cache,
        )

    findings = list(examination.findings)

    reports = examination.reports  # none for a log
    answers = run_on_all(reports, look_on)
    for report, answer in zip(reports, answers, strict=True):
        findings += check_first_use(report, answer)

    findings.sort(key=lambda finding: finding.level in NOT_WRONG)
    return replace(examination, findings=tuple(findings))


def count_compiled(
    codes: Mapping[str, Mapping[str, int]],
    capability: str,
) -> dict[str, tuple[int, int]]:
    """Return library → the number of fat binaries that a device compiles, and that it loads.

    Libraries of which it compiles nothing are left out. ``codes`` is as in ``DeviceCodeFound``;
    ``capability`` is the device's, such as ``12.1``. For any other text nothing is compiled.
    """
    numbers = re.fullmatch(r"(\d{1,2})\.(\d)", capability)
    if not numbers:
        return {}

    device = int(numbers[1]), int(numbers[2])
    compiled = {}
    for library, binaries in codes.items():
        loads = Counter[Load]()
        for names, count in binaries.items():
            archs = list_archs(_ARCH_NAMES.findall(names))
            loads[best_load(archs, device)] += count

        if loads[Load.JIT]:
            compiled[library] = loads[Load.JIT], loads.total() - loads[Load.NONE]

    return compiled


@check("first-use")
def check_first_use(
    node: NodeReport,
    answer: DeviceCodeFound | PatchkitError,
) -> Outcome:
    if isinstance(answer, PatchkitError):
        raise NotCheckedError(answer.what)

    gpus = node.host.gpus
    capability = gpus[0].capability if gpus else ""

    if not capability:
        raise NotCheckedError("no GPU says its compute capability")

    if answer.forced:
        return node.find("ptx-forced", name=answer.forced)

    software = require(node.host.software, _UNNAMED)
    compiled = count_compiled(answer.codes, capability)
    most_first = sorted(compiled, key=lambda name: compiled[name], reverse=True)
    shown = ", ".join(f"{name} ({compiled[name][0]})" for name in most_first)
    if not shown:
        return {"what": "vLLM's libraries hold machine code for this GPU"}

    if answer.kept:
        cache_size = f"{answer.cache} has {answer.kept / BYTES_PER_MIB:.0f} MiB"
        what = f"{shown} hold PTX alone for this GPU; {cache_size} of what was compiled"
        return {"what": what}

    command = node.command("patchkit", "apply", "--native", software.vllm_home)

    if node.node != HERE:  # patchkit need not be installed on another node
        release = f"vllm=={plain_version(software.vllm)}"
        repack = quoted("patchkit", "repack", release, "--native")
        command = f"`{repack}`, then `patchkit cluster install`"

    return node.find(
        "first-use",
        libraries=shown,
        cache=answer.cache,
        command=command,
    )
