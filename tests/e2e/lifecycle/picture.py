"""Draw docs/cluster.svg from what `patchkit cluster` prints on two nodes with a real systemd.

    python -m e2e.lifecycle.picture WORK

The ranks are the stand-in for vLLM; what is typed and printed is unchanged but for colours.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from e2e.lifecycle import fake_venv, rack, rootfs

PICTURE = Path(__file__).parents[3] / "docs" / "cluster.svg"
MODEL = "openai/gpt-oss-120b"
WIDTH = 96
_CHOICES = ("--topology", "socket", "--target", "gb10", "--head-ip", "192.168.177.1")
_COLOURS = ("env", "FORCE_COLOR=1", f"COLUMNS={WIDTH}", sys.executable, "-m", "patchkit")


def main(work: Path) -> None:
    """Run the commands and save the picture."""
    console = Console(record=True, width=WIDTH, file=Path("/dev/null").open("w"))  # noqa: SIM115
    with rack.up(rootfs.ready(work), work / "picture", 2) as nodes:
        for node in nodes.nodes.values():
            fake_venv.install(node, LOAD=4)
        nodes.laptop.patchkit("cluster", "init", "spark1", "spark2", *_CHOICES)
        place = f's#^venv.*#venv = "{fake_venv.VENV}"#'
        nodes.laptop.run("sed", "-i", place, "cluster.toml")
        for words in (("up", MODEL), ("status",), ("down",)):
            done = nodes.laptop.run(*_COLOURS, *words)
            console.print(f"[green]$[/] patchkit {' '.join(words)}", highlight=False)
            # Progress is on standard error, and comes first in a terminal.
            said = (done.errors + done.output).replace(f"{sys.executable} -m patchkit", "patchkit")
            console.print(Text.from_ansi(said.rstrip() + "\n"))
    svg = console.export_svg(title="patchkit", unique_id="cluster")
    PICTURE.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
