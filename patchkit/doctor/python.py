"""Judge the Python that has vLLM: packages that go together, and its compilers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.peers.check import NotCheckedError, Outcome, check
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.finding import Finding
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Software

_UNNAMED = "no environment with vLLM is known here: name it with --venv"


def python_findings(node: NodeReport) -> Iterator[Finding]:
    """Yield what is wrong with the Python that has vLLM, what is well, and what is not known."""
    if node.facts is None or node.health is None:
        return  # said by what is judged of the machine
    for run_check in (check_torch, check_lost_nccl, check_nccl, check_compilers):
        yield from run_check(node)


def _known_software(node: NodeReport) -> Software:
    software = node.host.software
    if software is None or not (software.vllm and software.torch):
        raise NotCheckedError(_UNNAMED)
    return software


def _install_command(node: NodeReport, by_hand: str) -> str:
    return quoted("patchkit", "cluster", "install") if node.placed else by_hand


@check("torch-cpu")
def check_torch(node: NodeReport) -> Outcome:
    software = _known_software(node)
    own = software.vllm.partition("+")[2]
    built_for = own.removeprefix("cu") if own.startswith("cu") else ""
    has = software.cuda.replace(".", "")
    fields = {"torch": software.torch, "vllm": software.vllm, "cuda": software.cuda}
    if not has and not node.host.gpus:
        raise NotCheckedError("torch is for CPUs, and there is no GPU")
    if has and built_for[:2] in ("", has[:2]):
        return fields
    venv = node.part("facts").venv
    python = f"{venv}/bin/python" if venv else "python3"
    again = there(node.node, python, "-m", "pip", "install", f"vllm=={software.vllm}")
    about = "torch-other" if has else "torch-cpu"
    return node.find(about, command=_install_command(node, again), **fields)


@check("nccl-lost")
def check_lost_nccl(node: NodeReport) -> Outcome:
    found = []
    for file in node.contents.lost if node.contents else ():
        again = there(node.node, *file.cure(f"{node.part('facts').venv}/bin/python", "wheelhouse"))
        found.append(node.find("nccl-lost", lost=file, command=_install_command(node, again)))
    return found


@check("nccl-two")
def check_nccl(node: NodeReport) -> Outcome:
    software, contents = _known_software(node), node.part("contents")
    own, other = contents.nccl, contents.torch_nccl
    if not own.sha256 or not other.sha256:
        raise NotCheckedError("it is not known which libnccl torch and vLLM load")
    if own.sha256 == other.sha256:
        return {"version": own.version}
    python = quoted(software.python)
    return node.find("nccl-two", vllm=own.version, torch=other.version, python=python)


@check("compiler")
def check_compilers(node: NodeReport) -> Outcome:
    has = node.health_fact("compilers")
    if not node.part("facts").venv:
        raise NotCheckedError(_UNNAMED)
    lacking = [] if has.compiler else [node.find("compiler")]
    lacking += [] if has.python_h else [node.find("python-header")]
    return lacking or {"header": has.python_h}
