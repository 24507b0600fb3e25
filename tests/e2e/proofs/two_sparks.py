"""Say which blocks of docs/two-sparks-from-a-workstation.md run on one machine, and which reduced.

The workstation's commands run as they are, but for the builds, which are reduced: the smallest
extensions of vLLM and one kernel family of NCCL. On the nodes pip takes the two wheels by hash, as
files for aarch64 in a folder for each node; nothing of them is executed.
"""

from __future__ import annotations

import re
from pathlib import Path

from e2e.proofs.steps import Page

_PATH = Path(__file__).parents[3] / "docs" / "two-sparks-from-a-workstation.md"
TITLES = (
    "The workstation compiles",
    "Both Sparks get the same files",
    "Each Spark installs them",
    "Or from a server",
    "Settings of its own for each",
)
_RELEASE = re.compile(r"patchkit build vllm --version (\S+)")
_APT = re.compile(r"^sudo apt install (.*)$", re.MULTILINE)

# The smallest extensions of build_proof.py, which imports what a fresh machine lacks.
SMALL_VLLM = (
    "--extensions cumem_allocator,fs_io_C,spinloop "
    "--source cutlass=flashinfer-python==0.6.8.post1 --without flash-attn --without flashmla "
    "--without qutlass --without triton-kernels --without deepgemm --without fmha-sm100"
)
# NCCL 2.29.7 is the one that a distribution carries; the page takes 2.30.7, which only GitHub has.
SMALL_NCCL = (
    "patchkit wheelhouse override nvidia-nccl-cu13==2.29.7 && "
    "patchkit build nccl --functions 'AllReduce Sum f32 RING SIMPLE'"
)
# For a node's Python, whatever machine this is: pip takes the tags that are named, and no others.
_AARCH64 = (
    "--no-compile --only-binary=:all: --implementation cp --python-version 3.12 "
    "$(seq -f --platform=manylinux_2_%g_aarch64 17 39)"
)
_BUILT = 'grep -E "^(vllm|nvidia-nccl)" wheelhouse/requirements.txt > built.txt'
_NODE = "/srv/{machine}"

PAGE = Page(
    path=_PATH,
    machines={
        "": ("single", 0),
        "workstation": ("single", 0),
        "spark-1": ("cable_port0", 0),
        "spark-2": ("cable_port1", 1),
    },
    skipped={
        r"sudo apt ": "the machine came with these packages",
        r"git clone ": "this is a clone",
        r"rsync |scp ": "one folder stands for all machines",
        r"patchkit inspect --loaded": "nothing is loaded: nox -s cross-proof does, under qemu-user",
    },
    stand_ins={
        r"(patchkit build vllm)": rf"\1 {SMALL_VLLM}",
        r"patchkit build nccl$": SMALL_NCCL,
        r"(patchkit wheelhouse fill)": r"\1 --lock-only",
        # 5 names the libraries that a reduced wheel lacks; a file that is not whole would be 8.
        r"(patchkit verify)": r"\1 || test $? = 5",
        r"(pip install --no-index .*) -r wheelhouse/requirements.txt": (
            rf"{_BUILT} && \1 -r built.txt --target {_NODE} {_AARCH64}"
        ),
        r"ssh -R \S+ (spark-\d) patchkit/.venv/bin/(pip install .*) -r patchkit/requirements.txt": (
            rf"\2 -r built.txt --target /srv/\1-server {_AARCH64}"
        ),
        r"(patchkit fixes) \.venv/lib/python3.12/site-packages": rf"\1 {_NODE}",
        r"(patchkit env)": r"\1 --root {root} --lock wheelhouse",
    },
)


def release() -> str:
    """Return the release of vLLM that the page builds."""
    (named,) = _RELEASE.findall(PAGE.text())
    return str(named)


def packages() -> list[str]:
    """Return what the page takes from the distribution."""
    return sorted({name for line in _APT.findall(PAGE.text()) for name in line.split()})
