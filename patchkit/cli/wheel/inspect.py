"""Show what a wheel or a library holds: `patchkit inspect`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from patchkit.cli import complete
from patchkit.cli.out import as_json, print_json, record_fields, say, style
from patchkit.errors import UsageError
from patchkit.extras import require_base
from patchkit.runtime.python.libnccl import Answer, NcclCopy, loaded
from patchkit.runtime.python.startup import Choice


@click.command()
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--target",
    "name",
    default="gb10",
    show_default=True,
    metavar="gb10|thor|h200",
    shell_complete=complete.target_names,
    help="Device.",
)
@click.option("--codes", is_flag=True, help="Every library's device code, not one row for each.")
@click.option(
    "--loaded", "of_python", is_flag=True, help="Which libnccl torch and vLLM would load, and why."
)
@click.option(
    "--python",
    default=sys.executable,
    metavar="EXE",
    help="With --loaded: the Python that has torch.",
)
@as_json
def command(
    file: Path | None, *, name: str, codes: bool, of_python: bool, python: str, as_json: bool
) -> None:
    """Show which device code a shared library or a wheel holds, and how it loads on a device.

    It loads as exact, family, compatible, jit (from PTX) or none, by NVIDIA's rules; no GPU and no
    toolkit is needed. A device runs live code (.nv_fatbin), which is linked from __nv_relfatbin.

    Of a wheel also: pins, SBOMs, what patchkit did to it, which CUDA and which glibc its libraries
    need, and its problems.
    """
    if (file is None) != of_python:
        raise UsageError("name a FILE, or say --loaded", hint="patchkit inspect --help")
    if file is None:
        _show_loaded(python, as_json=as_json)
        return
    require_base()
    from patchkit.cli.wheel.inspect_view import show_file  # --loaded does without what that needs

    show_file(file, name, codes=codes, as_json=as_json)


def _show_loaded(python: str, *, as_json: bool) -> None:
    """Print which libnccl torch and vLLM would load in a Python, with the variables of now."""
    answer = loaded(python, os.environ)
    if as_json:
        print_json(record_fields(answer))
        return
    vllm = f"vLLM {answer.vllm_version}" if answer.vllm_version else "no vLLM"
    torch = f"torch {answer.torch_version or 'of no package'}"
    say(style(f"{answer.python}: {torch}, {vllm}", bold=True))
    _say_choice("torch", answer.torch, answer)
    _say_choice("vLLM", answer.vllm, answer)
    for copy in answer.copies:
        say(style(copy.path, dim=None if copy.mapped else True))
        say(style(f"  {_facts(copy)}", dim=True))
    for warning in answer.warnings:
        say(style("warning ", fg="yellow") + warning)
    for note in answer.notes:
        say(style("note ", fg="yellow") + note)


def _say_choice(who: str, choice: Choice, answer: Answer) -> None:
    copy = next((each for each in answer.copies if each.path == choice.path), None)
    taken = style(f"{copy.version} {copy.path}", fg="green") if copy else style("none", fg="red")
    say(f"{who:5} takes " + taken + f": {choice.why}")


def _facts(copy: NcclCopy) -> str:
    package = " and ".join(map(str, copy.owners)) or "no package"
    mapped = "mapped" if copy.mapped else "not mapped"
    version = copy.version or "unknown version"
    return f"{version}, {package}, sha256 {copy.sha256[:16]}, {mapped}: {copy.found}"
