"""Write files for other systems: `patchkit export`."""

from __future__ import annotations

from pathlib import Path

import click

from patchkit.cli.out import (
    GOOD,
    PATH,
    Blocks,
    Data,
    LaidOut,
    Record,
    VerbGroup,
    flag,
    option,
    rendered,
    tell,
)
from patchkit.cli.wheel.build_options import house_option
from patchkit.quoting import quoted
from patchkit.runtime.envfile.write import write
from patchkit.runtime.rules.variable_rules import cache_variables
from patchkit.wheel.wheelhouse.containerfile import (
    CACHE_HOME,
    build_lines,
    check_image,
    containerfile,
)
from patchkit.wheel.wheelhouse.contents import load_manifest


@click.group(cls=VerbGroup)
def export_command() -> None:
    """Write files for other systems: an image's Containerfile."""


@export_command.command("containerfile")
@option(
    "--base IMAGE@sha256:…",
    "Ubuntu or Debian that has the wheelhouse's Python.",
    required=True,
)
@flag("--unpinned", "Accept a base without a digest.")
@house_option
@option("-o", "--output", "Default: standard output.", type=PATH)
@flag("--force", "Replace a FILE with another content.")
@rendered
def write_containerfile(
    *, base: str, unpinned: bool, house: Path, output: Path | None, force: bool
) -> Blocks:
    """Write the Containerfile of an image with the wheelhouse, for docker, podman and buildah.

    \b
      patchkit export containerfile --base ubuntu:24.04@sha256:… -o Containerfile
    """
    check_image(base, pinned=not unpinned)
    manifest = load_manifest(house)
    vllm = manifest.version_of("vllm")
    caches = cache_variables(CACHE_HOME, vllm) if vllm else {}
    made = containerfile(manifest, base, house.as_posix(), caches)
    builds = list(build_lines(made.platform, output or Path("Containerfile")))
    yield Record(
        {
            "containerfile": made.text,
            "platform": made.platform,
            "build": builds,
        }
    )
    if output is None:
        yield Data(made.text)
        return

    outcome = write(
        output,
        made.text,
        force=force,
        private=False,
        by="patchkit export",
    )
    yield GOOD + f"{output} {outcome}: {made.platform}"

    tell("build it with one of these, and name it in cluster.toml: `image` in [serve]")
    for words in builds:
        tell(LaidOut(f"  {quoted(*words)}"))
