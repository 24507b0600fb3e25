"""List and assemble what a device compiles at first use: `patchkit native`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from patchkit.cli.options import offline_option
from patchkit.cli.out import PATH, next_step, program, record_fields, style, table
from patchkit.cli.progress import progress
from patchkit.cli.render import GOOD, Block, Record, counted_noun, lead_word, rendered
from patchkit.target import DEFAULT_TARGET, targets
from patchkit.wheel.device.first_use import compile_seconds, first_use_phrase
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.installed import make_installed_native, revert_installed
from patchkit.wheel.native.listing import DeviceLibrary, find_site, list_libraries
from patchkit.wheel.native.new_wheel import write_native_library, write_native_wheel


@click.command("native")
@click.argument(
    "path", metavar="WHEEL|LIBRARY|ENVIRONMENT", type=click.Path(path_type=Path)
)
@click.option(
    "--target", "name", type=click.Choice(list(targets())), default=DEFAULT_TARGET
)
@click.option("--write", is_flag=True, help="Assemble it: in place, or as a new file.")
@click.option("--revert", is_flag=True, help="Put an environment's own libraries back.")
@click.option(
    "--force", is_flag=True, help="Revert though files were edited or are damaged."
)
@click.option(
    "-o", "--output", type=PATH, default=Path(), help="Folder of the new file."
)
@offline_option
@rendered
def native_command(
    path: Path,
    *,
    name: str,
    write: bool,
    revert: bool,
    force: bool,
    output: Path,
    offline: bool,
) -> Iterator[Block]:
    """Show what a device compiles at first use, and how long that takes; or compile it now.

    \b
      patchkit native bitsandbytes-0.50.2-py3-none-manylinux_2_24_aarch64.whl
      patchkit native .venv --write

    A driver compiles PTX where a library has no machine code for the device: on one core, before
    the first call returns, again in every fresh container. --write has ptxas of the locked CUDA
    toolkit do it once. A wheel becomes a new one with a version of its own; an environment is
    changed in place, with a ledger, and --revert takes that back. NVIDIA's own libraries are
    listed, and never rewritten.
    """
    target = targets()[name]
    if revert:
        restored = revert_installed(find_site(path), force=force)
        yield Record({"restored": restored})
        count = sum(map(len, restored.values()))
        done = f"put back as upstream shipped it: {counted_noun(count, 'file')}"
        yield (
            GOOD + done
            if count
            else "nothing to do: patchkit has changed no library here"
        )
        return
    found = list_libraries(path, target)
    if not write:
        fields = [
            record_fields(it, "entries")
            | {"compiled": len(it.entries), "seconds": compile_seconds(it.entries)}
            for it in found
        ]
        yield Record({"target": name, "libraries": fields})
        yield from _listed(found, target.title)
        if any(library.writable for library in found):
            yield next_step(
                *program(), "native", path, "--write", where="to compile it now"
            )
        return
    with progress() as report:
        assembler = Assembler(offline=offline, progress=report("Fetching the compiler"))
        if path.is_dir():
            bar = report("Assembling PTX")
            made, new = (
                make_installed_native(find_site(path), target, assembler, bar),
                None,
            )
        else:
            write_file = (
                write_native_wheel if path.suffix == ".whl" else write_native_library
            )
            written = write_file(path, output, target, assembler, report)
            made, new = written.libraries, written.path
    yield Record(
        {"target": name, "wheel": new, "libraries": [record_fields(it) for it in made]}
    )
    for library in made:
        if library.path:
            made_of = counted_noun(len(library.ptx), "fat binary", "fat binaries")
            yield GOOD + f"{library.name}: {made_of} assembled"
        yield from (
            lead_word("note") + f"{why}; it stays as it is" for why in library.refused
        )
        for row in library.unreached:
            told = (
                f"{row.name} of {library.name} stays PTX: {row.source} never calls it"
            )
            yield lead_word("note") + told
    if new:
        yield GOOD + f"{new}  {new.stat().st_size / 1e6:.1f} MB"
    elif made:
        yield next_step(*program(), "native", path, "--revert", where="to take it back")
    else:
        yield "nothing to do: the device compiles nothing here"


def _listed(found: Sequence[DeviceLibrary], title: str) -> Iterator[Block]:
    rows = [
        (
            library.name,
            str(library.fat_binaries),
            style(str(len(library.entries)), fg="yellow" if library.entries else None),
            f"{compile_seconds(library.entries):.0f} s" if library.entries else "-",
            "NVIDIA's" if library.closed else "",
        )
        for library in sorted(
            found, key=lambda library: -compile_seconds(library.entries)
        )
    ]
    yield from table(
        rows, heads=("library", "fat binaries", "compiled", "at first use", "")
    )
    entries = [entry for library in found for entry in library.entries]
    if entries:
        yield lead_word("note") + f"on {title}, {first_use_phrase(entries)}"
    elif found:
        yield GOOD + f"on {title} nothing is compiled at first use"
    else:
        yield "nothing here holds device code"
