"""patchkit inspect"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from patchkit.cli import show
from patchkit.cli.options import as_json, find_target
from patchkit.cli.out import print_json
from patchkit.cli.wheel.inspect_view import json_fields, print_wheel
from patchkit.cli.wheel.library_view import print_library
from patchkit.cli.wheel.loaded_view import show_loaded
from patchkit.errors import UsageError
from patchkit.finding import Finding
from patchkit.reading import require_file
from patchkit.wheel.device.inspect import inspect, inspect_wheel
from patchkit.wheel.device.libraries import Judged, judge
from patchkit.wheel.file.metadata import WheelMetadata, read_metadata
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.wheelhouse.device_checks import missed
from patchkit.wheel.wheelhouse.wheel_checks import check


@click.command()
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--target", "name", default="gb10", show_default=True, metavar="gb10|thor|h200", help="Device."
)
@click.option("--codes", is_flag=True, help="Every library's device code, not one row for each.")
@click.option("--loaded", is_flag=True, help="Which libnccl torch and vLLM would load, and why.")
@click.option(
    "--python",
    default=sys.executable,
    metavar="EXE",
    help="With --loaded: the Python that has torch.",
)
@as_json
def command(
    file: Path | None, *, name: str, codes: bool, loaded: bool, python: str, as_json: bool
) -> None:
    """Which device code a shared library or a wheel holds, and how it loads on a device.

    exact, family, compatible, jit (from PTX) or none, as NVIDIA's rules say; no GPU and no toolkit
    is asked. A device runs live code (.nv_fatbin); __nv_relfatbin is what that was linked from.

    Of a wheel also: pins, SBOMs, what patchkit did to it, which CUDA and which glibc its libraries
    need, and what speaks against it.
    """
    if (file is None) != loaded:
        raise UsageError("name a FILE, or say --loaded", hint="patchkit inspect --help")
    if file is None:
        show_loaded(python, as_json=as_json)
        return
    target = find_target(name)
    require_file(file, "give a shared library or a wheel")
    metadata: WheelMetadata | None = None
    judged: tuple[Judged, ...] = ()
    found: tuple[Finding, ...] = ()
    if file.suffix == ".whl":
        with WheelFile(file) as wheel:
            binaries, metadata = inspect_wheel(wheel), read_metadata(wheel)
            if wheel.name.project == "vllm":
                judged = judge(wheel, binaries, target, wheel.name.version)
        found = *check(metadata, binaries), *missed(metadata.name.version, judged, target)
    else:
        binaries = inspect(file)
    uses = {each.name: each.use.value for each in judged}
    if as_json:
        print_json({"file": str(file), **json_fields(metadata, binaries, uses, found, target)})
        return
    console = show.console()
    if metadata:
        print_wheel(console, metadata, binaries, uses, found, target)
    for binary in binaries if codes or len(binaries) == 1 else ():
        print_library(console, binary, target)
