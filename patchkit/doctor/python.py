"""Judge the Python that has vLLM: packages that go together, compilers, compiled code. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from patchkit.cluster.health.packages import PackageVersions
from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.node_judge import NodeJudge, limits
from patchkit.doctor.peers.check import NotCheckedError, check, require
from patchkit.finding import Finding
from patchkit.quoting import quoted
from patchkit.runtime.host.hardware import target_of
from patchkit.runtime.rules.releases import within

_UNNAMED = "no environment with vLLM is known here: name it with --venv"
_NO_TOOLS = "the node does not say which compilers it has"
_PARTS = ("flashinfer-cubin", "flashinfer-jit-cache")
_SM = {"gb10": "12.1", "thor": "11.0"}


def _known_packages(judge: NodeJudge) -> PackageVersions:
    """Return the installed packages. Raises NotCheckedError if they are not known."""
    found = require(judge.health.packages, judge.health.why_not("packages"))
    if "vllm" not in found.versions:
        raise NotCheckedError(_UNNAMED)
    return found


def _install_command(judge: NodeJudge, by_hand: str = "") -> str:
    if judge.report.placed:
        return quoted("patchkit", "cluster", "install")
    if by_hand:
        return by_hand
    python = f"{judge.facts.venv}/bin/python" if judge.facts.venv else "python3"
    return there(judge.node, python, "-m", "pip", "install", f"vllm=={judge.vllm}")


@check("python-twice")
def check_twice(judge: NodeJudge) -> Iterator[Finding]:
    found = _known_packages(judge)
    if found.twice:
        what = "; ".join(f"{name} {' and '.join(both)}" for name, both in found.twice.items())
        yield judge.say("python-twice", what=what, command=_install_command(judge))
    else:
        yield judge.fine("python-twice", count=len(found.versions))


@check("torch-cpu")
def check_torch(judge: NodeJudge) -> Iterator[Finding]:
    software, gpus = judge.facts.host.software, judge.facts.host.gpus
    if software is None or not software.torch:
        raise NotCheckedError("no torch is known here")
    own = software.vllm.partition("+")[2]
    built_for = own.removeprefix("cu") if own.startswith("cu") else ""
    has = software.cuda.replace(".", "")
    fields = {"torch": software.torch, "vllm": software.vllm, "cuda": software.cuda}
    if not has and gpus:
        yield judge.say("torch-cpu", **fields, command=_install_command(judge))
    elif has and built_for and built_for[:2] != has[:2]:
        yield judge.say("torch-other", **fields, command=_install_command(judge))
    elif has:
        yield judge.fine("torch-cpu", **fields)
    else:
        raise NotCheckedError("torch is for CPUs, and there is no GPU")


def _check_lost_nccl(judge: NodeJudge) -> Iterator[Finding]:
    contents = judge.report.contents
    for file in contents.lost if contents else ():
        again = there(judge.node, *file.cure(f"{judge.facts.venv}/bin/python", "wheelhouse"))
        yield judge.say("nccl-lost", lost=file, command=_install_command(judge, again))


@check("nccl-two")
def check_nccl(judge: NodeJudge) -> Iterator[Finding]:
    contents, software = judge.report.contents, judge.facts.host.software
    if contents is None or software is None or not software.vllm:
        raise NotCheckedError(_UNNAMED)
    own, other = contents.nccl, contents.torch_nccl
    if not own.sha256 or not other.sha256:
        raise NotCheckedError("it is not known which libnccl torch and vLLM load")
    if own.sha256 != other.sha256:
        fields = {"vllm": own.version, "torch": other.version}
        yield judge.say("nccl-two", python=quoted(software.python), **fields)
    else:
        yield judge.fine("nccl-two", version=own.version)


@check("flashinfer-parts")
def check_flashinfer(judge: NodeJudge) -> Iterator[Finding]:
    found = _known_packages(judge)
    own = found.versions.get("flashinfer-python", "")
    parts = {name: found.versions[name] for name in _PARTS if name in found.versions}
    odd = [f"{name} {each}" for name, each in parts.items() if each.partition("+")[0] != own]
    if not own:
        raise NotCheckedError("it is not installed")
    if odd:
        yield judge.say(
            "flashinfer-parts", own=own, odd=", ".join(odd), command=_install_command(judge)
        )
    else:
        yield judge.fine("flashinfer-parts", own=own)


# Compilers, and what they made


@check("compiler")
def check_compilers(judge: NodeJudge) -> Iterator[Finding]:
    has = require(judge.health.compilers, _NO_TOOLS)
    if not judge.facts.venv:
        raise NotCheckedError(_UNNAMED)
    lacking = []
    if not has.has("gcc", "cc", "clang"):
        command = there(judge.node, "sudo", "apt", "install", "build-essential")
        lacking.append(judge.say("compiler", command=command))
    if not has.python_h:
        command = there(judge.node, "sudo", "apt", "install", "python3-dev")
        lacking.append(judge.say("python-header", command=command))
    yield from lacking or [judge.fine("compiler", header=has.python_h)]


@check("nvcc")
def check_jit_compilers(judge: NodeJudge) -> Iterator[Finding]:
    found, has = _known_packages(judge), require(judge.health.compilers, _NO_TOOLS)
    lacking = [name for name in ("nvcc", "ninja", "c++") if not has.has(name)]
    target = target_of(judge.facts.host)
    oldest = limits().assemblers.get(target, "")
    if "flashinfer-python" not in found.versions:
        raise NotCheckedError("FlashInfer is not installed, which compiles with it")
    if "flashinfer-jit-cache" in found.versions:
        yield judge.fine("nvcc", what="flashinfer-jit-cache has its kernels compiled")
    elif lacking:
        yield judge.say("nvcc", what=", ".join(lacking))
    elif oldest and has.nvcc and within(has.nvcc, f"<{oldest}"):
        yield judge.say("nvcc-old", cuda=has.nvcc, oldest=oldest, capability=_SM[target])
    else:
        yield judge.fine("nvcc", what=f"nvcc {has.nvcc or 'of unknown release'}, ninja and c++")


@check("ptxas")
def check_ptxas(judge: NodeJudge) -> Iterator[Finding]:
    """Judge the ptxas that Triton takes here; which one that is hangs on its release."""
    has, software = judge.health.compilers, judge.facts.host.software
    target = target_of(judge.facts.host)
    if has is None or software is None or not software.triton:
        raise NotCheckedError("no Triton is known here")
    if target not in limits().assemblers:
        raise NotCheckedError("it is not known what this GPU needs")
    name = "ptxas-blackwell" if within(software.triton, ">=3.6") else "ptxas"
    taken = next((each for each in has.ptxas if each.name == name), None)
    oldest = limits().assemblers[target]
    if taken is None:
        yield judge.say("ptxas-none", triton=software.triton, name=name)
        return
    if not taken.cuda:
        raise NotCheckedError(f"{taken.path} does not say its version")
    tell = judge.say if within(taken.cuda, f"<{oldest}") else judge.fine
    yield tell(
        "ptxas",
        path=taken.path,
        cuda=taken.cuda,
        oldest=oldest,
        capability=_SM[target],
        variable=f"TRITON_{name.upper().replace('-', '_')}_PATH",
        other=judge.facts.ptxas or "that of CUDA 13",
    )


@check("jit-locked")
def check_caches(judge: NodeJudge) -> Iterator[Finding]:
    caches = require(judge.health.compilers, _NO_TOOLS).caches
    locked = [cache.locked for cache in caches if cache.locked]
    for folder in locked:
        # What is not there yet is made by root's hands as well: it says who owns it now.
        owner = there(judge.node, "sudo", "chown", "-R", judge.facts.user, folder)
        yield judge.say("jit-locked", folder=folder, command=owner)
    if not locked:
        owners = ", ".join(cache.owner for cache in caches if cache.names)
        what = f"caches of {owners}, and writable" if owners else "nothing was compiled here yet"
        yield judge.fine("jit-locked", what=what)


PYTHON_CHECKS: tuple[Callable[[NodeJudge], Iterator[Finding]], ...] = (
    *(check_torch, check_twice, check_flashinfer, _check_lost_nccl, check_nccl),
    *(check_compilers, check_jit_compilers, check_ptxas, check_caches),
)
"""Checks of the Python that has vLLM, in this order."""
