"""Show the contents of a wheel or a library: `patchkit inspect`."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from patchkit.cli.out import Shown, bold, dim, style
from patchkit.cli.render import Blocks, Record, lead_word, option, options_of, rendered
from patchkit.errors import UsageError
from patchkit.extras import BASE, require_libraries
from patchkit.runtime.python.libnccl import NcclCopy, NcclReport, find_loaded_nccl
from patchkit.runtime.python.startup import Choice
from patchkit.target import targets


@click.command
@options_of("inspect")
@option("--python EXE", "Python that has torch.", default=sys.executable)
@rendered
def inspect_command(
    file: Path | None, target: str, of_python: bool, python: str
) -> Blocks:
    """Show which device code a shared library or a wheel holds, and how it loads on a device.

    It loads as exact, family, compatible, jit (from PTX) or none, by NVIDIA's rules; no GPU and no
    toolkit is needed. A device runs live code (.nv_fatbin), which is linked from __nv_relfatbin.

    For a wheel also: pins, SBOMs, the changes by patchkit, the CUDA and the glibc that its
    libraries need, and its problems.
    """
    if (file is None) != of_python:
        raise UsageError("name a FILE, or say --loaded", hint="patchkit inspect --help")

    if file is None:
        yield from _loaded_blocks(find_loaded_nccl(python, os.environ))
        return

    require_libraries(BASE)
    # Imported only if needed: --loaded runs on nodes, which lack the libraries of that module.
    from patchkit.cli.wheel.inspect_view import inspected_blocks

    yield from inspected_blocks(file, targets()[target])


def _loaded_blocks(answer: NcclReport) -> Blocks:
    """Yield which libnccl torch and vLLM load, and the others that a Python has."""
    yield Record(answer)
    vllm = "no vLLM"
    if answer.vllm_version:
        vllm = f"vLLM {answer.vllm_version}"
    torch = f"torch {answer.torch_version or 'of no package'}"
    yield bold(f"{answer.python}: {torch}, {vllm}")

    copies = {copy.path: copy for copy in answer.copies}
    yield "torch takes " + _choice_text(answer.torch, copies)
    yield "vLLM  takes " + _choice_text(answer.vllm, copies)

    for copy in answer.copies:
        yield style(copy.path, dim=None if copy.mapped else True)
        yield dim(f"  {_copy_text(copy)}")
    yield from (lead_word("warning") + warning for warning in answer.warnings)


def _choice_text(choice: Choice, copies: Mapping[str, NcclCopy]) -> Shown:
    chosen = style("none", fg="red")
    if copy := copies.get(choice.path or ""):
        chosen = style(f"{copy.version} {copy.path}", fg="green")
    return chosen + f": {choice.why}"


def _copy_text(copy: NcclCopy) -> str:
    version = copy.version or "unknown version"
    package = " and ".join(map(str, copy.owners)) or "no package"
    mapped = "mapped" if copy.mapped else "not mapped"
    return f"{version}, {package}, sha256 {copy.sha256[:16]}, {mapped}: {copy.found}"
