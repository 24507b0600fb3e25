"""What ``patchkit inspect --loaded`` prints."""

from __future__ import annotations

import os
from dataclasses import asdict

from rich.text import Text

from patchkit.cli import show
from patchkit.cli.out import print_json
from patchkit.runtime.python.libnccl import Answer, Copy, loaded
from patchkit.runtime.python.startup import Choice


def show_loaded(python: str, *, as_json: bool) -> None:
    """Which libnccl torch and vLLM would load under a Python, with the present variables."""
    answer = loaded(python, os.environ)
    if as_json:
        print_json(_fields(answer))
        return
    console = show.console()
    vllm = f"vLLM {answer.vllm_version}" if answer.vllm_version else "no vLLM"
    torch = f"torch {answer.torch_version or 'of no package'}"
    console.print(show.text(f"{answer.python}: {torch}, {vllm}", style="bold"), soft_wrap=True)
    for who, choice in (("torch", answer.torch), ("vLLM", answer.vllm)):
        console.print(_choice(who, choice, answer), soft_wrap=True)
    for copy in answer.copies:
        console.print(show.text(copy.path, style="" if copy.mapped else "dim"), soft_wrap=True)
        console.print(show.text(f"  {_facts(copy)}", style="dim"), soft_wrap=True)
    for warning in answer.warnings:
        console.print(show.text(("warning ", "yellow"), warning), soft_wrap=True)


def _choice(who: str, choice: Choice, answer: Answer) -> Text:
    copy = next((each for each in answer.copies if each.path == choice.path), None)
    taken = (f"{copy.version} {copy.path}", "green") if copy else ("none", "red")
    return show.text(f"{who:5} takes ", taken, f": {choice.why}")


def _facts(copy: Copy) -> str:
    package = " and ".join(map(str, copy.owners)) or "no package"
    mapped = "mapped" if copy.mapped else "not mapped"
    version = copy.version or "unknown version"
    return f"{version}, {package}, sha256 {copy.sha256[:16]}, {mapped}: {copy.found}"


def _fields(answer: Answer) -> dict[str, object]:
    fields = asdict(answer)
    for version in ("torch_version", "vllm_version"):
        fields[version] = fields[version] or None
    return fields
