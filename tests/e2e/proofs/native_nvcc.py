"""Device code of two compilers: nvcc of x86-64 that compiles for aarch64, and aarch64's own.

NVIDIA's nvcc for aarch64 runs under qemu-user, with the same g++; PTX, machine code, fat binary and
object have to be the same bytes. So what a cross build gives is what a build on aarch64 gives.
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from e2e.cross_proof import arm64
from patchkit.errors import ProofError
from patchkit.wheel.build.toolkit import locked_toolkit
from support.proving import require

CXX = "aarch64-linux-gnu-g++"
LIBRARIES = "/usr/aarch64-linux-gnu"  # of the cross g++: glibc for nvcc itself
COMPARED = (".ptx", ".cubin", ".fatbin", ".o")


def obstacle() -> str:
    """Return why the two cannot be compared here; empty if nothing is in the way."""
    if platform.machine() != "x86_64":
        return f"the other nvcc is for x86-64, not for {platform.machine()}"
    if not shutil.which(CXX):
        return f"{CXX} is not installed: sudo apt install g++-aarch64-linux-gnu"
    return arm64.no_programs()


def compare(build: Path, ending: str, folder: Path) -> str:
    """Compile one source of a build folder with both; return in words what is the same.

    ``build`` has compile_commands.json, whose flags hold for both. Raises ProofError.
    """
    entries = json.loads((build / "compile_commands.json").read_text())
    # A source may go into two libraries: either command will do.
    entry = next((each for each in entries if each["file"].endswith(ending)), None)
    if entry is None:
        raise ProofError(f"{build} compiles no {ending}")
    flags = list(_flags(shlex.split(entry["command"])))
    toolkits = {
        "across": locked_toolkit("x86_64", arm64.CPU, offline=False, progress=None),
        "natively": locked_toolkit(arm64.CPU, arm64.CPU, offline=False, progress=None),
    }
    made = {name: _compiled(home, flags, folder / name) for name, home in toolkits.items()}
    across, natively = made["across"], made["natively"]
    require(len(across) >= len(COMPARED), f"nvcc kept {sorted(across)} of {entry['file']}")
    different = [n for n in sorted(across | natively) if across.get(n) != natively.get(n)]
    if different:
        raise ProofError(
            f"{ending}: {', '.join(different)} are other bytes of nvcc on {arm64.CPU}",
            hint=f"compare {folder / 'across'} and {folder / 'natively'}",
        )
    sizes = ", ".join(f"{name.rpartition('.')[2]} {len(across[name]):,}" for name in sorted(across))
    return f"{ending}: the same bytes across and natively: {sizes}"


def _flags(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a compile command but the compilers and the output, and -g.

    With -g an object names the headers, which each toolkit has in a folder of its own.
    """
    rest = iter(words[1:])
    for word in rest:
        if word == "-o":
            next(rest)
        elif word != "-g" and not word.startswith(("-ccbin", "--threads")):
            yield word


def _compiled(home: Path, flags: Sequence[str], kept: Path) -> Mapping[str, bytes]:
    """Compile in a folder of one name for both, and return the files that are compared."""
    work = kept.with_name("work")
    work.mkdir(parents=True)
    nvcc = [str(home / "bin" / "nvcc"), f"-ccbin={shutil.which(CXX)}", "--keep", *flags]
    script = f"cd {shlex.quote(str(work))}; {shlex.join([*nvcc, '-o', 'object.o'])} >&2"
    done = arm64.in_namespaces(script, {"QEMU_LD_PREFIX": LIBRARIES})
    work.rename(kept)
    if done.returncode:
        raise ProofError(f"{nvcc[0]} ended with {done.returncode}:\n{done.stderr[-arm64.SHOWN :]}")
    return {file.name: file.read_bytes() for file in kept.iterdir() if file.suffix in COMPARED}
