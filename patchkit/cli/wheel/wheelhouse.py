"""Keep finished wheels, and check them: `patchkit wheelhouse`, `patchkit verify`."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import (
    FOLDER,
    PATH,
    Shown,
    next_step,
    pip,
    program,
    style,
    table,
    tell,
)
from patchkit.cli.progress import progress
from patchkit.cli.render import (
    GOOD,
    Block,
    ExitCode,
    Record,
    VerbGroup,
    cell_text,
    counted_noun,
    finding_blocks,
    lead_word,
    rendered,
    verbose_option,
)
from patchkit.cli.wheel.build_options import house_option
from patchkit.errors import UsageError
from patchkit.finding import worst
from patchkit.patching.recipe import load_recipe
from patchkit.quoting import quoted
from patchkit.source.releases import ExactPin
from patchkit.wheel.wheelhouse.contents import load_manifest
from patchkit.wheel.wheelhouse.fill import fill_wheelhouse, node_platform
from patchkit.wheel.wheelhouse.overrides import (
    choose_override,
    known_overrides,
    lift_override,
    record_override,
)
from patchkit.wheel.wheelhouse.pins import is_nccl, pins_in
from patchkit.wheel.wheelhouse.resolve import WheelSources
from patchkit.wheel.wheelhouse.storage import REQUIREMENTS, Kind, Override
from patchkit.wheel.wheelhouse.verify import prune_wheelhouse, verify_wheelhouse

_LARGE = 1e9  # bytes; less takes a few seconds


@click.group(cls=VerbGroup)
def wheelhouse_command() -> None:
    """Keep finished wheels with a manifest, hashes, and locked requirements."""


@wheelhouse_command.command("list")
@house_option
@verbose_option
@rendered
def list_wheels(house: Path, *, verbose: bool) -> Iterator[Block]:
    """List the wheels that were made here; -v also what fill brought."""
    listed = load_manifest(house)
    wheels = listed.wheels
    yield Record({"dir": house, "overrides": listed.overrides, "wheels": wheels})
    made = [entry for entry in wheels if entry.kind is Kind.BUILT]
    others = [entry for entry in wheels if entry.kind is not Kind.BUILT]
    rows = [
        (
            style(entry.name.project, bold=entry.kind is Kind.BUILT or None),
            str(entry.name.version),
            "repacked" if entry.facts.get("made") == "repack" else str(entry.kind),
            str(entry.facts.get("target", "-")),
            f"{entry.size / 1e6:.1f}" if entry.held else "-",
            entry.name.tag,
            entry.sha256[:12],
        )
        for entry in (*made, *(others if verbose else ()))
    ]
    yield from table(
        rows, heads=("project", "version", "kind", "target", "MB", "tag", "sha256")
    )
    if others:
        size = f"{sum(entry.size for entry in others) / 1e6:,.0f} MB"
        hint = "" if verbose else "; -v lists them"
        yield f"{len(made)} made here, {len(others)} dependencies, {size}{hint}"
    yield from _override_lines(listed.overrides)
    if not wheels:
        yield f"{house} holds no wheels"
        yield next_step(
            *program(), "repack", f"vllm=={load_recipe().newest}", "--dir", house
        )
    elif not others:
        yield next_step(*program(), "wheelhouse", "fill", "--dir", house)


@wheelhouse_command.command("prune")
@house_option
@click.option(
    "--drop", multiple=True, help="Also a listed wheel: file name, project, or pin."
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--force", is_flag=True, help="Set a damaged journal aside.")
@rendered
def prune_wheels(
    house: Path, *, drop: tuple[str, ...], dry_run: bool, force: bool
) -> Iterator[Block]:
    """Remove what the manifest does not list and what interrupted runs left."""
    done = prune_wheelhouse(house, drop=drop, dry_run=dry_run, force=force)
    yield Record({"dir": house, "dry_run": dry_run, "changes": done})
    for file in done:
        yield style(file.filename, bold=True) + f": {file.reason}"
    if not done:
        yield f"{house}: nothing to remove"
    elif dry_run:
        yield "nothing was changed"


@wheelhouse_command.command("fill")
@house_option
@click.option(
    "--python-version", "python", metavar="X.Y", help="Default: the target's."
)
@click.option(
    "--with", "also", multiple=True, metavar="REQUIREMENT", help='Such as "ray==2.5".'
)
@click.option(
    "--find-links", "folders", multiple=True, type=FOLDER, help="A folder of wheels."
)
@click.option(
    "--offline", is_flag=True, help="Use only --find-links and the wheelhouse itself."
)
@click.option("--lock-only", is_flag=True, help="Lock only; the nodes download.")
@verbose_option
@rendered
def fill_wheels(
    house: Path, *, python: str | None, lock_only: bool, verbose: bool, **given: Any
) -> Iterator[Block]:
    """Lock everything that the wheels need by hash, so that every node installs the same.

    uv resolves it for the nodes' machine, from the index that pip is configured for. A torch for
    CPUs alone is refused. Nothing changes until everything is there; the next run resumes an
    interrupted one.
    """
    node = node_platform(house, python)
    sources = WheelSources(offline=given["offline"], folders=given["folders"])
    with progress() as report:
        how = {
            "also": given["also"],
            "lock_only": lock_only,
            "progress": report("downloading"),
        }
        done = fill_wheelhouse(house, node, sources, tell=tell, **how)
    overrides = done.manifest.overrides
    brought = {"dependencies": done.dependencies, "overrides": overrides}
    changes = {"new": done.new, "gone": done.gone, "torch": done.torch}
    yield Record({"dir": house, **asdict(node), **brought, **changes})
    if verbose:
        yield from (style("+ ", fg="green") + name for name in done.new)
        yield from (style("- ", fg="red") + name for name in done.gone)
    what = "locked" if lock_only else "there and locked"
    size = sum(entry.size for entry in done.dependencies) / 1e6
    changed = f"{len(done.new)} new, {len(done.gone)} gone{'' if verbose else '; -v lists them'}"
    yield f"{len(done.dependencies)} dependencies {what}, {size:,.0f} MB, for {node}: {changed}"
    if done.torch:
        cuda = f"CUDA {done.torch.cuda}" if done.torch.cuda else "CUDA"
        yield f"torch {done.torch.version}: {cuda}, as {done.torch.seen}"
    yield from _override_lines(overrides)
    here = node.machine == platform.machine()
    words = [
        "--find-links",
        str(house),
        "--require-hashes",
        "-r",
        str(house / REQUIREMENTS),
    ]
    install = (
        *(pip() if here else ["pip"]),
        "install",
        *done.manifest.install_options,
        *words,
    )
    yield next_step(*install, where="" if here else f"on a node, {node.machine}")
    if not lock_only:  # nodes take it by --find-links
        words = [
            "-m",
            "http.server",
            "--bind",
            "127.0.0.1",
            "--directory",
            str(house),
            "8000",
        ]
        yield next_step("python3", *words, where="to offer them to every node")


@wheelhouse_command.command("override")
@click.argument("pin", metavar="[PROJECT==VERSION]", required=False)
@click.option("--reason", default="", metavar="TEXT", help="Why, in one line.")
@click.option(
    "--remove", metavar="PROJECT", help="Take the override of a project back."
)
@house_option
@rendered
def override_pin(
    pin: str | None, *, reason: str, remove: str | None, house: Path
) -> Iterator[Block]:
    """Take another version than a wheel pins, on the record.

    Without one: which are recorded, and which known bugs suggest.

    \b
      patchkit wheelhouse override
      patchkit wheelhouse override nvidia-nccl-cu13==2.30.7
      patchkit wheelhouse override --remove nvidia-nccl-cu13

    The override stands in the manifest: what is replaced, by what, why, and on whose word. build,
    fill and verify follow it; everything else that does not fit is refused as before. No resolver
    knows it, so the wheels are installed with --no-deps, and `pip check` names it.
    """
    if pin and remove:
        raise UsageError(
            "a pin and --remove exclude each other", hint="say one of them"
        )
    if reason and not pin:
        raise UsageError("--reason is for a pin", hint="name it: PROJECT==VERSION")
    overrides = load_manifest(
        house
    ).overrides  # there is one, and no change of it is unfinished
    if not pin and not remove:
        offers = known_overrides(pins_in(house), overrides)
        yield Record({"dir": house, "overrides": overrides, "offers": offers})
        yield from _override_lines(overrides)
        yield from _offer_lines(house, offers)
        if not overrides:
            yield f"{house}: no overrides"
        return
    if remove:
        override, state = lift_override(house, remove), "lifted"
    else:
        try:
            exact = ExactPin(pin or "")
        except ValueError:
            what = f"{pin!r} is not a pin, PROJECT==VERSION"
            raise UsageError(
                what, hint="for example nvidia-nccl-cu13==2.30.7"
            ) from None
        override = choose_override(house, exact, reason)
        state = "recorded" if record_override(house, override) else "recorded already"
    yield Record({"dir": house, "state": state, "override": override})
    yield GOOD + f"{house}: {state}: {override}"
    # verify names what has to follow, wheel by wheel.
    builds = is_nccl(override.takes.project) and state == "recorded"
    yield next_step(
        *program(), *(["build", "nccl", "--dir"] if builds else ["verify"]), house
    )


def _offer_lines(house: Path, offered: Iterable[Override]) -> Iterator[Shown]:
    """Yield what known bugs suggest, with the commands that do it."""
    for offer in offered:
        yield lead_word("beware") + f"{offer.reason} ({offer.word})"
        words = ("wheelhouse", "override", "--dir", house, str(offer.takes))
        yield next_step(*program(), *words, where="to take another one")


def _override_lines(overrides: Iterable[Override]) -> Iterator[Shown]:
    """Yield what is recorded, and what that means for an installation."""
    for override in overrides:
        yield lead_word("override") + str(override)
    if overrides:
        yield style("  install with --no-deps; `pip check` names it", dim=True)


@click.command("verify")
@click.argument("house", metavar="[WHEELHOUSE]", default=Path("wheelhouse"), type=PATH)
@rendered
def verify_command(house: Path) -> Iterator[Block]:
    """Check that the wheels of a wheelhouse are whole, load on their device, and fit together.

    It compares files with manifest, hashes and RECORD; device code with the target; vLLM, torch,
    NCCL, triton and CUDA with each other. That is consistency: only a signature
    of SHA256SUMS (ssh-keygen -Y) says who made the wheels.

    Exits with the highest code of what was found, such as 8 for bytes that the manifest does not
    have, and with 2 if no wheel is there.
    """
    tell_hashing(house)
    done = verify_wheelhouse(house)
    wheels = done.entries
    if not wheels and not done.findings:
        raise UsageError(
            f"{house}: holds no wheels",
            why="another folder is meant, or nothing was put there",
            hint="name a wheelhouse; or put a wheel there: "
            + quoted(
                "patchkit", "repack", f"vllm=={load_recipe().newest}", "--dir", house
            ),
        )
    known = {"pins": done.pins, "overrides": done.overrides, "offers": done.offers}
    wrong = {"missing": done.unmet, "findings": done.findings}
    yield Record({"dir": house, "wheels": len(wheels), **known, **wrong})
    if done.pins:
        yield style(cell_text(done.pins), dim=True)
    yield from _override_lines(done.overrides)
    yield from _offer_lines(house, done.offers)
    if not done.findings:
        built = sum(entry.kind is Kind.BUILT for entry in wheels)
        others = len(wheels) - built
        rest = (
            f" and {counted_noun(others, 'dependency', 'dependencies')}"
            if others
            else ""
        )
        yield GOOD + f"{house}: {counted_noun(built, 'wheel')}{rest}, all as listed"
    if done.unmet:
        yield (
            lead_word("note")
            + f"not here, and not checked: {', '.join(done.unmet)} and what those need. pip takes "
            + "them from an index; this locks them for every node: "
            + f"`{quoted(*program(), 'wheelhouse', 'fill', '--dir', house)}`"
        )
    yield from finding_blocks(done.findings)
    yield ExitCode(worst(done.findings))


def tell_hashing(house: Path) -> None:
    """Say what will be read of a wheelhouse, if that takes more than seconds."""
    if (
        size := sum(
            file.stat().st_size for file in house.glob("*.whl") if file.is_file()
        )
    ) > _LARGE:
        tell(f"hashing and reading {size / 1e9:.1f} GB")
