"""What ``patchkit inspect --loaded`` prints."""

from __future__ import annotations

import os
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from patchkit.cli import show
from patchkit.runtime.choices import Choice
from patchkit.runtime.loaded import Answer, Copy, loaded


def show_loaded(python: str, *, as_json: bool) -> None:
    """Which libnccl torch and vLLM would load under a Python, with the present variables."""
    answer = loaded(python, os.environ)
    if as_json:
        show.print_json(_fields(answer))
        return
    console = show.console()
    vllm = f"vLLM {answer.vllm_version}" if answer.vllm_version else "no vLLM"
    console.print(Text(f"{answer.python}: torch {answer.torch_version}, {vllm}", "bold"))
    for who, choice in (("torch", answer.torch), ("vLLM", answer.vllm)):
        console.print(_choice(who, choice, answer), soft_wrap=True)
    if answer.copies:
        console.print(_table(answer))
    for warning in answer.warnings:
        console.print(Text.assemble(("warning ", "yellow"), warning), soft_wrap=True)


def _choice(who: str, choice: Choice, answer: Answer) -> Text:
    copy = next((each for each in answer.copies if each.path == choice.path), None)
    taken = (f"{copy.version} {copy.path}", "green") if copy else ("none", "red")
    return Text.assemble(f"{who:5} takes ", taken, f": {choice.why}")


def _table(answer: Answer) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("version", "package", "sha256", "mapped", "found", "path"):
        table.add_column(column, overflow="fold")
    for copy in answer.copies:
        table.add_row(*_cells(copy), style="" if copy.mapped else "dim")
    return table


def _cells(copy: Copy) -> tuple[str, ...]:
    package = ", ".join(map(str, copy.owners)) or "-"
    mapped = "yes" if copy.mapped else "no"
    return copy.version or "?", package, copy.sha256[:12], mapped, copy.found, copy.path


def _fields(answer: Answer) -> dict[str, object]:
    fields = asdict(answer)
    for version in ("torch_version", "vllm_version"):
        fields[version] = fields[version] or None
    return fields
