"""Write a package index over wheelhouses: `patchkit wheelhouse index`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from packaging.version import Version

from patchkit.cli import show
from patchkit.cli.next_step import next_step, program
from patchkit.cli.options import as_json
from patchkit.cli.out import LaidOut, Shown, echo, print_json, style
from patchkit.cli.progress import progress
from patchkit.wheel.index.write import SIMPLE, WrittenIndex, write_index
from patchkit.wheel.wheelhouse.manifest import REQUIREMENTS

_PORT = "8000"
_URL = f"http://127.0.0.1:{_PORT}/{SIMPLE}/"
_EPILOG = """\
\b
Serve it to this machine, and to a node through ssh:
  patchkit wheelhouse index site
  python3 -m http.server --bind 127.0.0.1 --directory site 8000
  ssh -R 8000:127.0.0.1:8000 NODE \\
    pip install --index-url http://127.0.0.1:8000/simple/ vllm==X
"""


@click.command("index", epilog=_EPILOG)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--dir",
    "houses",
    type=click.Path(path_type=Path),
    multiple=True,
    default=(Path("wheelhouse"),),
    show_default=True,
    help="A wheelhouse; of several, one index is made.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
@show.verbose
@as_json
def command(
    folder: Path, *, houses: tuple[Path, ...], dry_run: bool, verbose: bool, as_json: bool
) -> None:
    """Write a static package index into DIR, for any web server to offer the wheels.

    DIR gets simple/ with pages in HTML and JSON, the wheels (as second names of the wheelhouse's
    files where the file system can) and their metadata, and SHA256SUMS. What a former index had
    there goes. All of it is written, or nothing.
    """
    with progress() as report:
        done = write_index(folder, houses, dry_run=dry_run, progress=report("reading"))
    if as_json:
        print_json(_fields(folder, houses, done, dry_run=dry_run))
    else:
        echo(_lines(folder, houses, done, dry_run=dry_run, verbose=verbose))


def next_index(house: Path) -> LaidOut:
    """Return the line that says how nodes get what a wheelhouse holds, all of it."""
    words = ("wheelhouse", "index", "site", "--dir", house)
    return next_step(*program(), *words, where="to offer them to every node")


def _lines(
    folder: Path, houses: tuple[Path, ...], done: WrittenIndex, *, dry_run: bool, verbose: bool
) -> Iterator[Shown | str]:
    if verbose:
        yield from (style("+ ", fg="green") + path for path in done.new)
        yield from (style("- ", fg="red") + path for path in done.gone)
    wheels = done.offers.wheels
    size = sum(wheel.size for wheel in wheels) / 1e6
    more = "" if verbose or not (done.new or done.gone) else "; -v lists them"
    yield (
        ("" if dry_run else show.GOOD)
        + f"{folder / SIMPLE}: wheels: {len(wheels)}, {size:,.0f} MB; "
        + f"files: {len(done.new)} new, {len(done.gone)} gone{more}"
    )
    lacking = done.offers.lacking
    if lacking:
        some = f"{', '.join(lacking[:3])} …" if len(lacking) > 3 else ", ".join(lacking)
        yield show.word("note") + f"not in it, and required by what is: {some} ({len(lacking)})"
    if dry_run:
        yield "nothing was changed"
        return
    if lacking:
        yield next_step(*program(), "wheelhouse", "fill", "--dir", houses[0])
        return
    serve = ("python3", "-m", "http.server", "--bind", "127.0.0.1", "--directory", folder, _PORT)
    yield next_step(*serve, where="to serve it to this machine")
    forwarded = f"on a node, with ssh -R {_PORT}:127.0.0.1:{_PORT} NODE"
    yield next_step("pip", "install", "--index-url", _URL, *_wanted(done), where=forwarded)


def _wanted(done: WrittenIndex) -> list[str]:
    """Return what pip is asked for: what was built here, or the lock where no resolver takes it."""
    if done.offers.overridden:
        return ["--no-deps", "--require-hashes", "-r", REQUIREMENTS]
    newest: dict[str, Version] = {}
    for entry in done.offers.built:
        version = entry.name.version
        newest[entry.name.project] = max(version, newest.get(entry.name.project, version))
    return [f"{project}=={version.public}" for project, version in sorted(newest.items())]


def _fields(
    folder: Path, houses: tuple[Path, ...], done: WrittenIndex, *, dry_run: bool
) -> dict[str, object]:
    return {
        "index": str(folder),
        "dirs": [*map(str, houses)],
        "dry_run": dry_run,
        "wheels": [
            {
                "filename": wheel.name.filename,
                "project": wheel.name.project,
                "version": str(wheel.name.version),
                "sha256": wheel.sha256,
                "size": wheel.size,
            }
            for wheel in done.offers.wheels
        ],
        "lacking": list(done.offers.lacking),
        "new": list(done.new),
        "gone": list(done.gone),
    }
