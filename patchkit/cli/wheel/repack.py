"""Repack upstream's wheel: `patchkit repack`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from patchkit.cli import complete
from patchkit.cli.options import (
    Selection,
    choose_sandbox,
    offline_option,
    request_options,
    trust_source,
)
from patchkit.cli.out import Shown, record_fields, style, table, tell
from patchkit.cli.patch.verdict_view import proof_lines, verdict_fields, verdict_lines
from patchkit.cli.progress import progress
from patchkit.cli.render import GOOD, Block, Record, lead_word, rendered, verbose_option
from patchkit.cli.wheel.build_options import cpu_option, house_option, install_steps
from patchkit.cli.wheel.inspect_view import count_loads, for_any_python
from patchkit.errors import UsageError
from patchkit.patching.fix import State
from patchkit.patching.recipe import load_recipe
from patchkit.target import Load
from patchkit.wheel.device.libraries import Judged, Use
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.vllm.repack import repack_wheel
from patchkit.wheel.vllm.repack_origin import find_wheel
from patchkit.wheel.wheelhouse.contents import check_folder

_USES: Mapping[Use, Mapping[str, Any]] = {
    **{
        use: {"fg": "yellow"} for use in (Use.LOST, Use.ABSENT, Use.UNKNOWN, Use.PARTLY)
    },
    **{use: {"fg": "green"} for use in (Use.LOADS, Use.JIT)},
    **{use: {"dim": True} for use in (Use.OTHER, Use.HOST)},
}


@click.command("repack")
@click.argument(
    "wheel", metavar="vllm==X.Y.Z|WHEEL", shell_complete=complete.sources("vllm")
)
@cpu_option
@request_options
@click.option(
    "--native", is_flag=True, help="Assemble what the device compiles at first use."
)
@click.option(
    "--keep-libraries", is_flag=True, help="With --native: those for other devices."
)
@click.option(
    "--sha256", metavar="HEX", help="SHA-256 of a wheel that the lock does not know."
)
@offline_option
@trust_source
@house_option
@verbose_option
@rendered
def repack_command(
    wheel: str,
    selection: Selection,
    house: Path,
    *,
    trusted: bool,
    verbose: bool,
    **given: Any,
) -> Iterator[Block]:
    """Repack upstream's wheel with the fixes that are Python or data, under a version of its own.

    \b
      patchkit repack vllm==0.33.0
      patchkit repack vllm==0.33.0 --native

    Its kernels stay as they are; whether they load on the device is checked first. If they do not,
    nothing is written, and only a build from source helps.
    """
    began = time.monotonic()
    request, offline, keep = (
        selection.request(),
        given["offline"],
        given["keep_libraries"],
    )
    if keep and not given["native"]:
        raise UsageError(
            "--keep-libraries is for --native: without it, all libraries stay"
        )
    check_folder(house)  # before a wheel is fetched and read
    with (
        progress() as report,
        find_wheel(
            wheel,
            given["cpu"] or request.target.cpu,
            sha256=given["sha256"],
            offline=offline,
            report=report,
            check=load_recipe("vllm").check,
        ) as origin,
    ):
        bar = report("Fetching the compiler")
        done = repack_wheel(
            origin,
            request,
            house,
            report=report,
            say=tell,
            assembler=Assembler(offline=offline, progress=bar)
            if given["native"]
            else None,
            keep_libraries=keep,
            sandboxed=choose_sandbox(
                locked=origin.locked and not request.patches, trusted=trusted
            ),
        )
    seconds = time.monotonic() - began
    verdicts, proofs = done.outcome.verdicts, done.outcome.proofs
    libraries = list(map(_library_fields, done.libraries))
    fixes = list(map(verdict_fields, verdicts))
    own = {"fixes": fixes, "proofs": proofs, "seconds": round(seconds, 1)}
    known = record_fields(done, "version", "outcome", "libraries")
    yield Record({**known, "libraries": libraries, **own})
    whose = "upstream's" if done.source["upstream"] else "not upstream's"
    title = style(f"vllm {done.version}", bold=True)
    yield title + f"  {done.source['file']} ({whose})  →  {request.target.title}"
    yield from _library_lines(done.libraries, verbose=verbose)
    applied = [verdict for verdict in verdicts if verdict.state is State.APPLIED]
    yield from verdict_lines(applied, verbose=verbose)
    yield from proof_lines(proofs, verbose=verbose)
    yield from (lead_word("note") + note for note in done.notes)
    what = f"{done.wheel}  {done.size / 1e6:.1f} MB, {seconds:.0f} s"
    yield GOOD + what if done.fresh else f"nothing to do, it is there already: {what}"
    yield from install_steps(done.wheel, done.facts)


def _library_fields(library: Judged) -> dict[str, Any]:
    return {
        **record_fields(library, "known", "loads"),
        "told": library.phrase,
        "required": bool(library.known and library.known.required),
        "fat_binaries": {
            str(load): library.loads[load] for load in sorted(Load, reverse=True)
        },
    }


def _library_lines(libraries: Sequence[Judged], *, verbose: bool) -> Sequence[str]:
    """Return the libraries by what becomes of them on the device; or a row for each."""
    rows: list[tuple[str, ...]] = []
    groups: dict[Shown, dict[str, None]] = {}
    for use, how in _USES.items():
        for library in (library for library in libraries if library.use is use):
            said, name = style(use.value, **how), library.name.removeprefix("vllm/")
            rows.append((said, name, count_loads(library.loads) or "-"))
            groups.setdefault(said, {})[for_any_python(name)] = None
    if verbose:
        return table(rows, heads=("on the device", "library", "fat binaries"))
    return [said + f": {', '.join(names)}" for said, names in groups.items()]
