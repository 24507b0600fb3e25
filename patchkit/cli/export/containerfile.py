"""Write a Containerfile for a wheelhouse: `patchkit export containerfile`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from patchkit.cli.export.options import put
from patchkit.cli.out import LaidOut, as_json, print_json, say
from patchkit.measure.containerfile import build_lines, check_base, containerfile, run_lines
from patchkit.quoting import quoted
from patchkit.wheel.wheelhouse.contents import load_manifest


@click.command("containerfile")
@click.option(
    "--base",
    required=True,
    metavar="IMAGE@sha256:…",
    help="What it is built on: Ubuntu or Debian with the wheelhouse's Python; 24.04 has 3.12.",
)
@click.option("--unpinned", is_flag=True, help="Take a base without a digest.")
@click.option(
    "--dir",
    "house",
    type=click.Path(path_type=Path),
    default=Path("wheelhouse"),
    show_default=True,
    help="The wheelhouse, in the folder that is built from.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write FILE, all or nothing; default: standard output.",
)
@click.option("--force", is_flag=True, help="Replace a FILE with another content.")
@as_json
def command(
    *, base: str, unpinned: bool, house: Path, output: Path | None, force: bool, as_json: bool
) -> None:
    """Write what docker, podman and buildah make an image of the wheelhouse from.

    \b
      patchkit export containerfile --base ubuntu:24.04@sha256:… -o Containerfile
    """
    check_base(base, pinned=not unpinned)
    made = containerfile(load_manifest(house), base, house.as_posix())
    builds = build_lines(made.platform, output or Path("Containerfile"))
    runs = run_lines()
    if as_json:
        print_json(
            {
                "containerfile": made.text,
                "platform": made.platform,
                "build": [list(each) for each in builds],
                "run": [list(each) for each in runs],
            }
        )
        return
    by = quoted("patchkit", "export", "containerfile")
    put(made.text, output, force=force, what=made.platform, by=by)
    if output:
        _tell("build it with one of", [quoted(*each) for each in builds])
        _tell("run it on each node with one of", [quoted(*each) for each in runs])


def _tell(title: str, lines: Sequence[str]) -> None:
    say(f"{title}:", err=True)
    for each in lines:
        say(LaidOut(f"  {each}"), err=True)
