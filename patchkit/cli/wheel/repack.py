"""Repack a released wheel: `patchkit repack`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from patchkit.cli.options import (
    Selection,
    choose_sandbox,
    request_options,
)
from patchkit.cli.out import (
    bold,
    record_fields,
    tell,
)
from patchkit.cli.patch.verdict_view import proof_lines, verdict_fields, verdict_lines
from patchkit.cli.progress import progress
from patchkit.cli.render import (
    GOOD,
    Blocks,
    note,
    options_of,
    rendered,
)
from patchkit.cli.wheel.build import install_steps
from patchkit.frozen import Fields
from patchkit.patching.fix import State
from patchkit.target import Load
from patchkit.wheel.device.libraries import Judged, Use
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.repack.origin import find_wheel
from patchkit.wheel.repack.repack import repack_wheel
from patchkit.wheel.wheelhouse.contents import (
    check_folder,
)


@click.command
@options_of("repack")
@request_options
@options_of("repack-wheel")
@rendered
def repack_command(
    wheel: str,
    selection: Selection,
    house: Path,
    trusted: bool,
    verbose: bool,
    **options: Any,
) -> Blocks:
    """Repack upstream's wheel with the fixes that are Python or data, under a version of its own.

    \b
      patchkit repack vllm==0.33.0
      patchkit repack vllm==0.33.0 --native

    Its libraries stay as they are. If vLLM's kernels do not load on the device, nothing is written,
    and only a build from source helps.
    """
    began = time.monotonic()
    request = selection.request()
    check_folder(house)  # before a wheel is fetched and read
    offline = options["offline"]
    with (
        progress() as report,
        find_wheel(
            wheel,
            options["cpu"] or request.target.cpu,
            sha256=options["sha256"],
            offline=offline,
            report=report,
        ) as origin,
    ):
        assembler = None
        if options["native"]:
            bar = report("Fetching the compiler")
            assembler = Assembler(offline=offline, progress=bar)

        is_locked = origin.locked and not request.patches
        repacked = repack_wheel(
            origin,
            request,
            house,
            report=report,
            say=tell,
            assembler=assembler,
            sandboxed=choose_sandbox(locked=is_locked, trusted=trusted),
        )

    seconds = time.monotonic() - began
    verdicts = repacked.outcome.verdicts
    yield {
        **record_fields(repacked, "outcome", "libraries"),
        "libraries": list(map(_library_fields, repacked.libraries)),
        "fixes": list(map(verdict_fields, verdicts)),
        "proofs": repacked.outcome.proofs,
        "seconds": round(seconds, 1),
    }

    upstream = "upstream's" if repacked.source["upstream"] else "not upstream's"
    release = bold(f"{repacked.facts['project']} {repacked.facts['version']}")
    origin_text = f"{repacked.source['file']} ({upstream})"
    yield release + f"  {origin_text}  →  {request.target.title}"
    yield from _library_lines(repacked.libraries)

    applied = [verdict for verdict in verdicts if verdict.state is State.APPLIED]
    yield from verdict_lines(applied, verbose=verbose)
    yield from proof_lines(repacked.outcome.proofs, verbose=verbose)
    yield from map(note, repacked.notes)

    what = f"{repacked.wheel}  {repacked.size / 1e6:.1f} MB, {seconds:.0f} s"
    yield (GOOD if repacked.fresh else "nothing to do, it is there already: ") + what
    yield from install_steps(repacked.wheel, repacked.facts)


def _library_fields(library: Judged) -> Fields:
    return {
        **record_fields(library, "known", "loads"),
        "told": library.phrase,
        "required": bool(library.known and library.known.required),
        "fat_binaries": {
            str(load): library.loads[load] for load in sorted(Load, reverse=True)
        },
    }


def _library_lines(libraries: Sequence[Judged]) -> Iterator[str]:
    """Yield a line of names for each use on the device, the worst first."""
    for use in Use:
        names = [
            library.name.partition("/")[2]
            for library in libraries
            if library.use is use
        ]
        if names:
            yield f"{use.value}: {', '.join(names)}"
