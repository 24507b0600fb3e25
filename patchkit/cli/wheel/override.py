"""Override pins of a wheelhouse: `patchkit wheelhouse override`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from patchkit.cli.next_step import next_step, program
from patchkit.cli.options import as_json
from patchkit.cli.out import Shown, echo, print_json, say, style
from patchkit.cli.render import GOOD, lead_word
from patchkit.errors import UsageError
from patchkit.versions import named_pin
from patchkit.wheel.wheelhouse.contents import load_manifest
from patchkit.wheel.wheelhouse.manifest import Kind, Override
from patchkit.wheel.wheelhouse.overrides import (
    choose_override,
    known_overrides,
    lift_override,
    record_override,
)
from patchkit.wheel.wheelhouse.pins import is_nccl, pins_in

_EPILOG = """\
\b
torch 2.11 pins NCCL 2.28.9; take 2.30.7 beside it:
  patchkit wheelhouse override nvidia-nccl-cu13==2.30.7
  patchkit build nccl && patchkit wheelhouse fill
Which there are, and which known bugs suggest; take one back:
  patchkit wheelhouse override
  patchkit wheelhouse override --remove nvidia-nccl-cu13
"""


@click.command("override", epilog=_EPILOG)
@click.argument("pin", metavar="[PROJECT==VERSION]", required=False)
@click.option("--reason", default="", metavar="TEXT", help="Why, in one line.")
@click.option("--remove", metavar="PROJECT", help="Take the override of a project back.")
@click.option(
    "--dir",
    "house",
    type=click.Path(path_type=Path),
    default=Path("wheelhouse"),
    show_default=True,
    help="The wheelhouse.",
)
@as_json
def command(
    pin: str | None, *, reason: str, remove: str | None, house: Path, as_json: bool
) -> None:
    """Take another version than a wheel pins, on the record; without one, list what is recorded.

    The override stands in the manifest: what is replaced, by what, why, and on whose word. build,
    fill and verify follow it; everything else that does not fit is refused as before. No resolver
    knows it, so the wheels are installed with --no-deps, and `pip check` names it.
    """
    if pin and remove:
        raise UsageError("a pin and --remove exclude each other", hint="say one of them")
    if reason and not pin:
        raise UsageError("--reason is for a pin", hint="name it: PROJECT==VERSION")
    load_manifest(house)  # there is one, and no change of it is unfinished
    if remove:
        _report(house, "lifted", lift_override(house, remove), as_json=as_json)
    elif pin:
        override = choose_override(
            house, named_pin(pin, "for example nvidia-nccl-cu13==2.30.7"), reason
        )
        what = "recorded" if record_override(house, override) else "recorded already"
        _report(house, what, override, as_json=as_json)
    else:
        _list(house, as_json=as_json)


def offer_lines(house: Path, offered: Iterable[Override]) -> Iterator[Shown]:
    """Yield what known bugs suggest, with the commands that do it."""
    for offer in offered:
        yield lead_word("beware") + f"{offer.reason} ({offer.word})"
        words = ("wheelhouse", "override", "--dir", house, str(offer.takes))
        yield next_step(*program(), *words, where="to take another one")


def override_lines(overrides: Iterable[Override]) -> Iterator[Shown]:
    """Yield what is recorded, and what that means for an installation."""
    for override in overrides:
        yield lead_word("override") + str(override)
    if overrides:
        yield style("  install with --no-deps; `pip check` names it", dim=True)


def _report(house: Path, what: str, override: Override, *, as_json: bool) -> None:
    if as_json:
        print_json({"dir": str(house), "state": what, "override": override.fields()})
        return
    say(GOOD + f"{house}: {what}: {override}")
    echo(_next(house, override, taken=what != "lifted"))


def _next(house: Path, override: Override, *, taken: bool) -> Iterator[Shown]:
    """Yield the commands after which the wheelhouse is what the overrides say."""
    listed, project = load_manifest(house).wheels, override.takes.project
    there = [entry for entry in listed if entry.name.project == project]
    # What met the override is not what the pin asks for, and the other way round.
    other = [entry for entry in there if override.is_met_by(entry.name.version) != taken]
    steps: list[tuple[str | Path, ...]] = []
    if any(entry.kind is Kind.BUILT for entry in other):
        steps.append(("wheelhouse", "prune", "--dir", house, "--drop", project))
    if is_nccl(project) and (other or not there):
        steps.append(("build", "nccl", "--dir", house))
    if any(entry.kind is not Kind.BUILT for entry in listed):
        steps.append(("wheelhouse", "fill", "--dir", house))
    for step in steps or [("verify", house)]:
        yield next_step(*program(), *step)


def _list(house: Path, *, as_json: bool) -> None:
    overrides = load_manifest(house).overrides
    offered = known_overrides(pins_in(house), overrides)
    if as_json:
        print_json({"dir": str(house), **override_fields(overrides, offered)})
        return
    echo(override_lines(overrides))
    echo(offer_lines(house, offered))
    if not overrides:
        say(f"{house}: no overrides")


def override_fields(overrides: Iterable[Override], offered: Iterable[Override]) -> dict[str, Any]:
    """Return what is recorded and what is offered, as JSON has it."""
    return {
        "overrides": [override.fields() for override in overrides],
        "offers": [offer.fields() for offer in offered],
    }
