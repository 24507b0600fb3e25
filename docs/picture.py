"""Draw docs/apply.svg from what ``patchkit apply`` really prints."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

RELEASE = "vllm==0.19.1"
WIDTH = 118


def main() -> None:
    """Run the command of the README in an empty folder and save its output as a picture."""
    shown = f"patchkit apply --vllm-src {RELEASE}"
    with tempfile.TemporaryDirectory() as folder:
        output = subprocess.run(
            [sys.executable, "-m", "patchkit", *shown.split()[1:]],
            cwd=folder,
            env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
    console = Console(record=True, width=WIDTH, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.print(f"[green]$[/] {shown}", highlight=False)
    console.print(Text.from_ansi(output))
    svg = console.export_svg(title="patchkit", unique_id="patchkit")
    Path(__file__).with_name("apply.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
