"""Repack upstream's wheel: `patchkit repack`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from patchkit.cli import complete
from patchkit.cli.options import (
    NOT_SANDBOXED,
    Selection,
    may_run,
    request_options,
    trust_source,
)
from patchkit.cli.out import Shown, record_fields, style, table, tell
from patchkit.cli.patch.archs import STYLES
from patchkit.cli.patch.verdict_view import proof_lines, verdict_fields, verdict_lines
from patchkit.cli.progress import progress
from patchkit.cli.render import GOOD, Block, Record, lead_word, rendered, verbose_option
from patchkit.cli.wheel.build_options import cpu_option, house_option, installing
from patchkit.cli.wheel.inspect_view import for_any_python
from patchkit.patching.fix import State
from patchkit.patching.recipe import load_recipe
from patchkit.target import Load, Target
from patchkit.wheel.device.libraries import Judged, Use
from patchkit.wheel.vllm.repack import Repacked, repack_wheel
from patchkit.wheel.vllm.repack_origin import find_wheel

_EPILOG = """\
\b
For a Spark, on any machine:
  patchkit repack vllm==0.25.1
The same for x86-64, for tests elsewhere:
  patchkit repack vllm==0.25.1 --cpu x86_64
A wheel of your own, vouched for:
  patchkit repack ./vllm-0.25.1-cp38-abi3-linux_aarch64.whl --sha256 HEX
"""
_USES: Mapping[Use, Mapping[str, Any]] = {
    Use.LOST: {"fg": "yellow"},
    Use.ABSENT: {"fg": "yellow"},
    Use.UNKNOWN: {"fg": "yellow"},
    Use.PARTLY: {"fg": "yellow"},
    Use.LOADS: {"fg": "green"},
    Use.JIT: {"fg": "green"},
    Use.OTHER: {"dim": True},
    Use.HOST: {"dim": True},
}


@click.command(epilog=_EPILOG)
@click.argument("wheel", metavar="vllm==X.Y.Z|WHEEL", shell_complete=complete.sources("vllm"))
@cpu_option("the target's", "--platform")
@request_options
@click.option("--sha256", metavar="HEX", help="SHA-256 of a wheel that the lock does not know.")
@click.option("--offline", is_flag=True, help="Use only what is in the cache.")
@trust_source
@house_option
@verbose_option
@rendered
def command(
    wheel: str,
    cpu: str | None,
    selection: Selection,
    sha256: str | None,
    offline: bool,
    trusted: bool,
    house: Path,
    verbose: bool,
) -> Iterator[Block]:
    """Repack upstream's wheel with the fixes that are Python or data, under a version of its own.

    Its kernels stay as they are; whether they load on the device is checked first. If they do not,
    nothing is written, and only a build from source helps.
    """
    began = time.monotonic()
    request = selection.request()
    if trusted:
        tell(NOT_SANDBOXED)
    with (
        progress() as report,
        find_wheel(
            wheel,
            cpu or request.target.cpu,
            sha256=sha256,
            offline=offline,
            report=report,
            check=load_recipe("vllm").check,
        ) as origin,
    ):
        done = repack_wheel(
            origin,
            request,
            house,
            report=report,
            say=tell,
            sandboxed=may_run(locked=origin.locked, trusted=trusted),
        )
    seconds = time.monotonic() - began
    yield Record(_repacked_fields(done, seconds))
    yield from _repacked_lines(done, request.target, seconds, verbose=verbose)


def _repacked_lines(
    done: Repacked, target: Target, seconds: float, *, verbose: bool
) -> Iterator[str]:
    known = "upstream's" if done.source["upstream"] else "not upstream's"
    named = style(f"vllm {done.version}", bold=True)
    yield named + f"  {done.source['file']} ({known})  →  {target.title}"
    yield from _libraries(done.libraries, verbose=verbose)
    applied = [verdict for verdict in done.outcome.verdicts if verdict.state is State.APPLIED]
    yield from verdict_lines(applied, verbose=verbose)
    yield from proof_lines(done.outcome.proofs, verbose=verbose)
    yield from (lead_word("note") + note for note in done.notes)
    what = f"{done.wheel}  {done.size / 1e6:.1f} MB, {seconds:.0f} s"
    yield GOOD + what if done.fresh else (f"nothing to do, it is there already: {what}")
    yield from installing(done.wheel, done.facts)


def _libraries(libraries: Sequence[Judged], *, verbose: bool) -> Sequence[Shown]:
    """Return the libraries by what becomes of them on the device; or a row for each."""
    ordered = [each for use in _USES for each in libraries if each.use is use]
    if verbose:
        heads = ("on the device", "library", "fat binaries")
        return table(((_use(each), _name(each), _loads(each)) for each in ordered), heads=heads)
    groups: dict[Shown, dict[str, None]] = {}
    for each in ordered:
        groups.setdefault(_use(each), {})[for_any_python(_name(each))] = None
    return [use + f": {', '.join(names)}" for use, names in groups.items()]


def _use(library: Judged) -> Shown:
    return style(library.use.value, **_USES[library.use])


def _name(library: Judged) -> str:
    return library.name.removeprefix("vllm/")


def _loads(library: Judged) -> Shown:
    counts = sorted(library.loads.items(), reverse=True)
    parts = [style(f"{count} {load}", **STYLES[load]) for load, count in counts]
    return Shown(", ".join(parts)) if parts else style("-", dim=True)


def _repacked_fields(done: Repacked, seconds: float) -> dict[str, Any]:
    return {
        **record_fields(done, "version", "outcome", "libraries"),
        "libraries": [_library_fields(library) for library in done.libraries],
        "fixes": [verdict_fields(verdict) for verdict in done.outcome.verdicts],
        "proofs": list(done.outcome.proofs),
        "seconds": round(seconds, 1),
    }


def _library_fields(library: Judged) -> dict[str, Any]:
    return {
        **record_fields(library, "known", "loads", "kernels"),
        "told": library.phrase,
        "required": bool(library.known and library.known.required),
        "fat_binaries": {str(load): library.loads[load] for load in sorted(Load, reverse=True)},
        "lost_kernels": dict(library.kernels),
    }
