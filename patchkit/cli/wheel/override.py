"""Override pins of a wheelhouse: `patchkit wheelhouse override`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import Shown, style
from patchkit.cli.render import GOOD, Block, Record, lead_word, rendered
from patchkit.cli.wheel.build_options import house_option
from patchkit.errors import UsageError
from patchkit.versions import ExactPin
from patchkit.wheel.wheelhouse.contents import load_manifest
from patchkit.wheel.wheelhouse.manifest import Override
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
@house_option
@rendered
def command(pin: str | None, *, reason: str, remove: str | None, house: Path) -> Iterator[Block]:
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
        yield from _changed_blocks(house, "lifted", lift_override(house, remove))
    elif pin:
        try:
            exact = ExactPin(pin)
        except ValueError:
            what = f"{pin!r} is not a pin, PROJECT==VERSION"
            raise UsageError(what, hint="for example nvidia-nccl-cu13==2.30.7") from None
        override = choose_override(house, exact, reason)
        what = "recorded" if record_override(house, override) else "recorded already"
        yield from _changed_blocks(house, what, override)
    else:
        overrides = load_manifest(house).overrides
        offers = known_overrides(pins_in(house), overrides)
        yield Record({"dir": house, **override_fields(overrides, offers)})
        yield from override_lines(overrides)
        yield from offer_lines(house, offers)
        if not overrides:
            yield f"{house}: no overrides"


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


def _changed_blocks(house: Path, state: str, override: Override) -> Iterator[Block]:
    """Yield what was done; verify names what has to follow, wheel by wheel."""
    yield Record({"dir": house, "state": state, "override": override.fields()})
    yield GOOD + f"{house}: {state}: {override}"
    builds = is_nccl(override.takes.project) and state == "recorded"
    words = ["build", "nccl", "--dir", str(house)] if builds else ["verify", str(house)]
    yield next_step(*program(), *words)


def override_fields(overrides: Iterable[Override], offered: Iterable[Override]) -> dict[str, Any]:
    """Return what is recorded and what is offered, as JSON has it."""
    return {
        "overrides": [override.fields() for override in overrides],
        "offers": [offer.fields() for offer in offered],
    }
