"""Print what `patchkit inspect --loaded` finds; without rich, since a node has click alone."""

from __future__ import annotations

import os
from dataclasses import asdict

from patchkit.cli.out import print_json, say, style
from patchkit.runtime.python.libnccl import Answer, NcclCopy, loaded
from patchkit.runtime.python.startup import Choice


def show_loaded(python: str, *, as_json: bool) -> None:
    """Print which libnccl torch and vLLM would load in a Python, with the variables of now."""
    answer = loaded(python, os.environ)
    if as_json:
        print_json(_fields(answer))
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


def _fields(answer: Answer) -> dict[str, object]:
    fields = asdict(answer)
    for version in ("torch_version", "vllm_version", "pin"):
        fields[version] = fields[version] or None
    return fields
