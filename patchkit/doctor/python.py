"""Judge the Python that has vLLM: packages that go together, compilers, compiled code. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.cluster.health.node_health import PackageVersions
from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.machine import machine_limits
from patchkit.doctor.peers.check import NotCheckedError, Outcome, check, make_finding
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.finding import Finding
from patchkit.quoting import quoted
from patchkit.runtime.host.hardware import target_of
from patchkit.runtime.host.host import Software
from patchkit.runtime.rules.releases import within

_UNNAMED = "no environment with vLLM is known here: name it with --venv"
_PARTS = ("flashinfer-cubin", "flashinfer-jit-cache")
_SM = {"gb10": "12.1", "thor": "11.0"}


def python_findings(node: NodeReport) -> Iterator[Finding]:
    """Yield what is wrong with the Python that has vLLM, what is well, and what is not known."""
    if node.facts is None or node.health is None:
        return  # said by what is judged of the machine
    for run_check in (
        *(check_torch, check_flashinfer, check_lost_nccl, check_nccl),
        *(check_compilers, check_jit_compilers, check_ptxas, check_caches),
    ):
        yield from run_check(node)


def _known_packages(node: NodeReport) -> PackageVersions:
    """Return the installed packages. Raises NotCheckedError if they are not known."""
    found: PackageVersions = node.health_fact("packages")
    if "vllm" not in found.versions:
        raise NotCheckedError(_UNNAMED)
    return found


def _known_software(node: NodeReport, project: str) -> Software:
    software = node.host.software
    if software is None or not getattr(software, project):
        raise NotCheckedError(f"no {project} is known here: name its environment with --venv")
    return software


def _install_command(node: NodeReport, by_hand: str = "") -> str:
    if node.placed:
        return quoted("patchkit", "cluster", "install")
    if by_hand:
        return by_hand
    software, venv = node.host.software, node.known_facts.venv
    python = f"{venv}/bin/python" if venv else "python3"
    vllm = f"vllm=={software.vllm if software else ''}"
    return there(node.node, python, "-m", "pip", "install", vllm)


@check("torch-cpu")
def check_torch(node: NodeReport) -> Outcome:
    software = _known_software(node, "torch")
    own = software.vllm.partition("+")[2]
    built_for = own.removeprefix("cu") if own.startswith("cu") else ""
    has = software.cuda.replace(".", "")
    fields = {"torch": software.torch, "vllm": software.vllm, "cuda": software.cuda}
    if not has and not node.host.gpus:
        raise NotCheckedError("torch is for CPUs, and there is no GPU")
    if has and built_for[:2] in ("", has[:2]):
        return fields
    about = "torch-other" if has else "torch-cpu"
    return make_finding(about, node.node, **fields, command=_install_command(node))


@check("nccl-lost")
def check_lost_nccl(node: NodeReport) -> Outcome:
    found = []
    for file in node.contents.lost if node.contents else ():
        again = there(node.node, *file.cure(f"{node.known_facts.venv}/bin/python", "wheelhouse"))
        command = _install_command(node, again)
        found.append(make_finding("nccl-lost", node.node, lost=file, command=command))
    return found


@check("nccl-two")
def check_nccl(node: NodeReport) -> Outcome:
    software = _known_software(node, "vllm")
    if node.contents is None:
        raise NotCheckedError(_UNNAMED)
    own, other = node.contents.nccl, node.contents.torch_nccl
    if not own.sha256 or not other.sha256:
        raise NotCheckedError("it is not known which libnccl torch and vLLM load")
    if own.sha256 == other.sha256:
        return {"version": own.version}
    fields = {"vllm": own.version, "torch": other.version, "python": quoted(software.python)}
    return make_finding("nccl-two", node.node, **fields)


@check("flashinfer-parts")
def check_flashinfer(node: NodeReport) -> Outcome:
    versions = _known_packages(node).versions
    own = versions.get("flashinfer-python", "")
    if not own:
        raise NotCheckedError("it is not installed")
    parts = {name: versions[name] for name in _PARTS if name in versions}
    odd = [f"{name} {each}" for name, each in parts.items() if each.partition("+")[0] != own]
    if not odd:
        return {"own": own}
    fields = {"own": own, "odd": ", ".join(odd), "command": _install_command(node)}
    return make_finding("flashinfer-parts", node.node, **fields)


# Compilers, and what they made


@check("compiler")
def check_compilers(node: NodeReport) -> Outcome:
    has = node.health_fact("compilers")
    if not node.known_facts.venv:
        raise NotCheckedError(_UNNAMED)
    packages = {}
    if not has.has("gcc", "cc", "clang"):
        packages["compiler"] = "build-essential"
    if not has.python_h:
        packages["python-header"] = "python3-dev"
    lacking = [
        make_finding(about, node.node, command=there(node.node, "sudo", "apt", "install", package))
        for about, package in packages.items()
    ]
    return lacking or {"header": has.python_h}


@check("nvcc")
def check_jit_compilers(node: NodeReport) -> Outcome:
    versions, has = _known_packages(node).versions, node.health_fact("compilers")
    target = target_of(node.host)
    oldest = machine_limits().assemblers.get(target, "")
    if "flashinfer-python" not in versions:
        raise NotCheckedError("FlashInfer is not installed, which compiles with it")
    if "flashinfer-jit-cache" in versions:
        return {"what": "flashinfer-jit-cache has its kernels compiled"}
    if lacking := [name for name in ("nvcc", "ninja", "c++") if not has.has(name)]:
        return make_finding("nvcc", node.node, what=", ".join(lacking))
    if oldest and has.nvcc and within(has.nvcc, f"<{oldest}"):
        fields = {"cuda": has.nvcc, "oldest": oldest, "capability": _SM[target]}
        return make_finding("nvcc-old", node.node, **fields)
    return {"what": f"nvcc {has.nvcc or 'of unknown release'}, ninja and c++"}


@check("ptxas")
def check_ptxas(node: NodeReport) -> Outcome:
    """Judge the ptxas that Triton takes here; which one that is hangs on its release."""
    has, triton = node.health_fact("compilers"), _known_software(node, "triton").triton
    target, assemblers = target_of(node.host), machine_limits().assemblers
    if target not in assemblers:
        raise NotCheckedError("it is not known what this GPU needs")
    name = "ptxas-blackwell" if within(triton, ">=3.6") else "ptxas"
    taken = next((each for each in has.ptxas if each.name == name), None)
    if taken is None:
        return make_finding("ptxas-none", node.node, triton=triton, name=name)
    if not taken.cuda:
        raise NotCheckedError(f"{taken.path} does not say its version")
    fields = {"path": taken.path, "cuda": taken.cuda}
    if not within(taken.cuda, f"<{assemblers[target]}"):
        return fields
    return make_finding(
        "ptxas",
        node.node,
        oldest=assemblers[target],
        capability=_SM[target],
        variable=f"TRITON_{name.upper().replace('-', '_')}_PATH",
        other=node.known_facts.ptxas or "that of CUDA 13",
        **fields,
    )


@check("jit-locked")
def check_caches(node: NodeReport) -> Outcome:
    caches = node.health_fact("compilers").caches
    # What is not there yet is made by root's hands as well: it says who owns it now.
    locked = [
        make_finding(
            "jit-locked",
            node.node,
            folder=cache.locked,
            command=there(node.node, "sudo", "chown", "-R", node.known_facts.user, cache.locked),
        )
        for cache in caches
        if cache.locked
    ]
    owners = ", ".join(cache.owner for cache in caches if cache.names)
    what = f"caches of {owners}, and writable" if owners else "nothing was compiled here yet"
    return locked or {"what": what}
