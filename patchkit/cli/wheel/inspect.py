"""Show what a wheel or a library holds: `patchkit inspect`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from patchkit.cli import complete
from patchkit.cli.out import as_json
from patchkit.cli.wheel.loaded_view import show_loaded
from patchkit.errors import UsageError
from patchkit.extras import require_base


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
    """Show which device code a shared library or a wheel holds, and how it loads on a device.

    It loads as exact, family, compatible, jit (from PTX) or none, by NVIDIA's rules; no GPU and no
    toolkit is needed. A device runs live code (.nv_fatbin), which is linked from __nv_relfatbin.

    Of a wheel also: pins, SBOMs, what patchkit did to it, which CUDA and which glibc its libraries
    need, and its problems.
    """
    if (file is None) != loaded:
        raise UsageError("name a FILE, or say --loaded", hint="patchkit inspect --help")
    if file is None:
        show_loaded(python, as_json=as_json)
        return
    require_base()
    from patchkit.cli.wheel.inspect_view import show_file  # --loaded does without what that needs

    show_file(file, name, codes=codes, as_json=as_json)
