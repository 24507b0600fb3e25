"""Draw docs/apply.svg and docs/node.svg from what patchkit really prints.

The node is a fixture of the tests, written from documented facts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from support import hosts, readme

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 118


def main() -> None:
    """Run the commands of the README in an empty folder and save their output as pictures."""
    with tempfile.TemporaryDirectory() as folder:
        draw("apply", [f"patchkit apply vllm=={readme.release()}"], Path(folder))
    draw_node()


def draw_node() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = hosts.build(Path(folder), "cable_port1")
        named = f" --vllm {readme.release()} --triton 3.8.0 --nccl 2.30.7 --root {root}"
        shown = (
            "patchkit probe",
            "patchkit env --role head --nodes 2 -o head.env",
            "tail -n 14 head.env",
        )
        hidden = {shown[0]: f" --root {root}", shown[1]: named}
        draw("node", shown, Path(folder), hidden)


def draw(
    name: str,
    commands: Sequence[str],
    folder: Path,
    hidden: Mapping[str, str] | None = None,
) -> None:
    """Draw commands and their output; ``hidden`` is what a real node would not need."""
    console = Console(record=True, width=WIDTH, file=Path(os.devnull).open("w"))  # noqa: SIM115
    for shown in commands:
        console.print(f"[green]$[/] {shown}", highlight=False)
        output = run(shown + (hidden or {}).get(shown, ""), folder)
        for added in (hidden or {}).values():
            output = output.replace(added, "")  # what comes next is printed with it
        console.print(Text.from_ansi(output))
    svg = console.export_svg(title="patchkit", unique_id="patchkit")
    (DOCS / f"{name}.svg").write_text(svg, encoding="utf-8")


def run(command: str, folder: Path) -> str:
    beside = str(Path(sys.executable).parent)  # patchkit is called as if PATH led to it
    environment = {
        "FORCE_COLOR": "1",
        "COLUMNS": str(WIDTH),
        "TERM": "xterm-256color",
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        command.split(),
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return done.stdout


if __name__ == "__main__":
    main()
