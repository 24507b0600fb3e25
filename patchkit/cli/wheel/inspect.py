"""Show what a wheel or a library holds: `patchkit inspect`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from patchkit.cli.out import style
from patchkit.cli.render import Block, Record, lead_word, rendered
from patchkit.errors import UsageError
from patchkit.extras import BASE, require_libraries
from patchkit.runtime.python.libnccl import loaded
from patchkit.target import DEFAULT_TARGET, targets


@click.command("inspect")
@click.argument(
    "file", metavar="[FILE]", required=False, type=click.Path(path_type=Path)
)
@click.option(
    "--target",
    type=click.Choice(list(targets())),
    default=DEFAULT_TARGET,
    help=f"Device to judge for; default: {DEFAULT_TARGET}.",
)
@click.option(
    "--loaded", "of_python", is_flag=True, help="Which libnccl torch and vLLM load."
)
@click.option("--python", default=sys.executable, metavar="EXE", help="That has torch.")
@rendered
def inspect_command(
    file: Path | None, *, target: str, of_python: bool, python: str
) -> Iterator[Block]:
    """Show which device code a shared library or a wheel holds, and how it loads on a device.

    It loads as exact, family, compatible, jit (from PTX) or none, by NVIDIA's rules; no GPU and no
    toolkit is needed. A device runs live code (.nv_fatbin), which is linked from __nv_relfatbin.

    Of a wheel also: pins, SBOMs, what patchkit did to it, which CUDA and which glibc its libraries
    need, and its problems.
    """
    if (file is None) != of_python:
        raise UsageError("name a FILE, or say --loaded", hint="patchkit inspect --help")
    if file is not None:
        require_libraries(BASE)
        # --loaded, which runs on nodes, does without what that needs.
        from patchkit.cli.wheel.inspect_view import inspected_blocks

        yield from inspected_blocks(file, targets()[target])
        return
    answer = loaded(python, os.environ)
    yield Record(answer)
    vllm = f"vLLM {answer.vllm_version}" if answer.vllm_version else "no vLLM"
    torch = f"torch {answer.torch_version or 'of no package'}"
    yield style(f"{answer.python}: {torch}, {vllm}", bold=True)
    copies = {copy.path: copy for copy in answer.copies}
    for who, choice in (("torch", answer.torch), ("vLLM ", answer.vllm)):
        copy = copies.get(choice.path or "")
        taken = f"{copy.version} {copy.path}" if copy else "none"
        yield (
            f"{who} takes "
            + style(taken, fg="green" if copy else "red")
            + f": {choice.why}"
        )
    for copy in answer.copies:
        yield style(copy.path, dim=None if copy.mapped else True)
        package = " and ".join(map(str, copy.owners)) or "no package"
        mapped = "mapped" if copy.mapped else "not mapped"
        version = copy.version or "unknown version"
        hashed = f"{version}, {package}, sha256 {copy.sha256[:16]}"
        yield style(f"  {hashed}, {mapped}: {copy.found}", dim=True)
    yield from (lead_word("warning") + warning for warning in answer.warnings)
