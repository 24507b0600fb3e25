"""Compile a library's PTX ahead of time: `patchkit native`."""

from pathlib import Path

import click

from patchkit.cli.out import (
    next_verb,
    progress,
    record_fields,
    style,
    table,
)
from patchkit.cli.render import (
    GOOD,
    Blocks,
    Lines,
    Row,
    counted_noun,
    note,
    options_of,
    rendered,
)
from patchkit.errors import UsageError
from patchkit.target import Target, targets
from patchkit.wheel.device.inspect import compile_seconds, first_use_phrase
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.installed import make_installed_native, revert_installed
from patchkit.wheel.native.make import (
    DeviceLibrary,
    NativeLibrary,
    find_site,
    list_libraries,
)


@click.command
@options_of("native")
@rendered
def native_command(
    path: Path,
    name: str,
    write: bool,
    revert: bool,
    force: bool,
    offline: bool,
) -> Blocks:
    """Show the code that a device compiles at first use, and how long that takes; or compile it.

    \b
      patchkit native bitsandbytes-0.50.2-py3-none-manylinux_2_24_aarch64.whl
      patchkit native .venv --write

    A driver compiles PTX where a library has no machine code for the device: on one core, before
    the first call returns, again in every fresh container. --write compiles it once with the pinned
    ptxas. The environment is changed in place, with a ledger, and --revert takes that back.
    NVIDIA's own libraries are listed, and never rewritten. `patchkit repack NAME==X.Y.Z --native`
    makes a wheel.
    """
    target = targets()[name]
    if revert:
        yield from _revert_blocks(path, force=force)
    elif write:
        yield from _write_blocks(path, target, offline=offline)
    else:
        yield from _list_blocks(path, target)


def _revert_blocks(path: Path, *, force: bool) -> Blocks:
    restored = revert_installed(find_site(path), force=force)
    yield {"restored": restored}
    if count := sum(map(len, restored.values())):
        yield GOOD + f"put back as upstream shipped it: {counted_noun(count, 'file')}"
    else:
        yield "nothing to do: patchkit has changed no library here"


def _list_blocks(path: Path, target: Target) -> Blocks:
    libraries = list_libraries(path, target)
    fields = []
    for library in libraries:
        seconds = compile_seconds(library.entries)
        compiled = {"compiled": len(library.entries), "seconds": seconds}
        fields.append(record_fields(library, "entries") | compiled)

    yield {"target": target.name, "libraries": fields}

    slowest_first = sorted(libraries, key=lambda row: -compile_seconds(row.entries))
    heads = ("library", "fat binaries", "compiled", "at first use", "")
    yield from table(map(_library_row, slowest_first), heads=heads)

    entries = [entry for library in libraries for entry in library.entries]
    if entries:
        yield note(f"on {target.title}, {first_use_phrase(entries)}")
    elif libraries:
        yield GOOD + f"on {target.title} nothing is compiled at first use"
    else:
        yield "nothing here holds device code"
    if path.is_dir() and any(library.writable for library in libraries):
        yield next_verb(
            "native",
            path,
            "--target",
            target.name,
            "--write",
            where="to compile it now",
        )


def _library_row(library: DeviceLibrary) -> Row:
    entries = library.entries
    return (
        library.name,
        str(library.fat_binaries),
        style(str(len(entries)), fg="yellow" if entries else None),
        f"{compile_seconds(entries):.0f} s" if entries else "-",
        "NVIDIA's" if library.closed else "",
    )


def _write_blocks(path: Path, target: Target, *, offline: bool) -> Blocks:
    """Assemble the PTX of an environment in place."""
    if not path.is_dir():
        raise UsageError(
            f"{path}: --write takes an environment, and changes it in place",
            hint="name the environment where it is installed; or make a wheel: "
            "patchkit repack NAME==X.Y.Z --native",
        )

    with progress() as report:
        assembler = Assembler(offline=offline, progress=report("Fetching the compiler"))
        bar = report("Assembling PTX")
        libraries = make_installed_native(find_site(path), target, assembler, bar)

    yield {"target": target.name, "libraries": libraries}

    for library in libraries:
        yield from _written_lines(library)

    if libraries:
        yield next_verb("native", path, "--revert", where="to take it back")
    else:
        yield "nothing to do: the device compiles nothing here"


def _written_lines(library: NativeLibrary) -> Lines:
    """Yield how much of a library was assembled, and which parts stay PTX."""
    if library.path:
        count = counted_noun(len(library.ptx), "fat binary", "fat binaries")
        yield GOOD + f"{library.name}: {count} assembled"
    for reason in library.refused:
        yield note(f"{reason}; it stays as it is")
