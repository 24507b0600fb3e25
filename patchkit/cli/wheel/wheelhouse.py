"""Keep and check finished wheels: `wheelhouse`, `verify`."""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from patchkit.cli.out import (
    Shown,
    bold,
    dim,
    next_step,
    next_verb,
    pip,
    program,
    progress,
    record_fields,
    table,
    tell,
)
from patchkit.cli.render import (
    GOOD,
    Blocks,
    ExitCode,
    Lines,
    Row,
    VerbGroup,
    cell_text,
    counted_noun,
    finding_blocks,
    lead_word,
    note,
    options_of,
    rendered,
)
from patchkit.errors import UsageError
from patchkit.finding import worst
from patchkit.frozen import Texts
from patchkit.quoting import quoted
from patchkit.source.project import first_example
from patchkit.source.releases import ExactPin
from patchkit.wheel.wheelhouse.fill import fill_wheelhouse, node_platform
from patchkit.wheel.wheelhouse.overrides import (
    choose_override,
    lift_override,
    record_override,
)
from patchkit.wheel.wheelhouse.pins import sources_of
from patchkit.wheel.wheelhouse.resolve import NodePlatform
from patchkit.wheel.wheelhouse.storage import (
    REQUIREMENTS,
    Kind,
    ManifestEntry,
    Override,
    load_manifest,
)
from patchkit.wheel.wheelhouse.verify import (
    Verified,
    prune_wheelhouse,
    verify_wheelhouse,
)

_LARGE = 1e9  # bytes; hashing less takes only a few seconds


@click.group(cls=VerbGroup)
def wheelhouse_command() -> None:
    """Keep finished wheels with a manifest, hashes, and locked requirements."""


@wheelhouse_command.command("list")
@options_of("wheelhouse-list")
@rendered
def list_wheels(house: Path) -> Blocks:
    """List the wheels that were made here; --json also their dependencies."""
    manifest = load_manifest(house)
    wheels = manifest.wheels
    yield {
        "dir": house,
        "overrides": manifest.overrides,
        "wheels": wheels,
    }
    built = manifest.built
    dependencies = manifest.dependencies
    heads = ("project", "version", "kind", "target", "MB", "tag", "sha256")
    yield from table(map(_entry_row, built), heads=heads)

    if dependencies:
        size = f"{sum(entry.size for entry in dependencies) / 1e6:,.0f} MB"
        count = f"{len(dependencies)} dependencies, {size}"
        yield f"{len(built)} made here, {count}; --json lists them"
    yield from _override_lines(manifest.overrides)

    if not wheels:
        yield f"{house} holds no wheels"
        yield next_verb("repack", first_example(), "--dir", house)
    elif not dependencies:
        yield next_verb("wheelhouse", "fill", "--dir", house)


def _entry_row(entry: ManifestEntry) -> Row:
    is_repacked = entry.facts.get("made") == "repack"
    return (
        bold(entry.name.project),
        str(entry.name.version),
        "repacked" if is_repacked else "built",
        str(entry.facts.get("target", "-")),
        f"{entry.size / 1e6:.1f}",
        entry.name.tag,
        entry.sha256[:12],
    )


@wheelhouse_command.command("prune")
@options_of("wheelhouse-prune")
@rendered
def prune_wheels(house: Path, drop: Texts, dry_run: bool) -> Blocks:
    """Remove files that the manifest does not list, and remains of interrupted runs."""
    pruned = prune_wheelhouse(house, drop=drop, dry_run=dry_run)
    yield {
        "dir": house,
        "dry_run": dry_run,
        "changes": pruned,
    }
    for file in pruned:
        yield bold(file.filename) + f": {file.reason}"

    if not pruned:
        yield f"{house}: nothing to remove"
    elif dry_run:
        yield "nothing was changed"


@wheelhouse_command.command("fill")
@options_of("wheelhouse-fill")
@rendered
def fill_wheels(
    house: Path, python: str | None, also: Texts, lock_only: bool
) -> Blocks:
    """Lock everything that the wheels need by hash, so that every node installs the same.

    uv resolves for the nodes' machine, from the index and the folders that pip is configured for
    (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX). A torch for CPUs alone is refused. Nothing
    changes until everything is there; the next run resumes an interrupted one.
    """
    node = node_platform(house, python)
    with progress() as report:
        filled = fill_wheelhouse(
            house,
            node,
            tell=tell,
            also=also,
            lock_only=lock_only,
            progress=report("downloading"),
        )
    dependencies = filled.manifest.dependencies
    overrides = filled.manifest.overrides
    yield {
        "dir": house,
        **asdict(node),
        "dependencies": dependencies,
        "overrides": overrides,
        **record_fields(filled, "manifest"),
    }

    state = "locked" if lock_only else "there and locked"
    size = sum(entry.size for entry in dependencies) / 1e6
    changes = f"{len(filled.new)} new, {len(filled.gone)} gone"
    count = f"{len(dependencies)} dependencies {state}"
    yield f"{count}, {size:,.0f} MB, for {node}: {changes}"

    if torch := filled.torch:
        cuda = f"CUDA {torch.cuda}" if torch.cuda else "CUDA"
        yield f"torch {torch.version}: {cuda}, as {torch.seen}"

    yield from _override_lines(overrides)
    yield _install_step(house, node, filled.manifest.install_options)


def _install_step(house: Path, node: NodePlatform, options: Sequence[str]) -> Shown:
    """Return the command that installs a wheelhouse, here or on a node with another CPU."""
    program = pip()
    where = ""
    if node.machine != platform.machine():
        program = ["pip"]
        where = f"on a node, {node.machine}"

    words = ["--find-links", str(house), "--require-hashes"]
    requirements = str(house / REQUIREMENTS)
    return next_step(
        *program, "install", *options, *words, "-r", requirements, where=where
    )


@wheelhouse_command.command("override")
@options_of("wheelhouse-override")
@rendered
def override_pin(pin: str | None, remove: str | None, house: Path) -> Blocks:
    """Take another version than a wheel pins, on the record.

    \b
      patchkit wheelhouse override nvidia-nccl-cu13==2.30.7
      patchkit wheelhouse override --remove nvidia-nccl-cu13

    The manifest records it: the old pin, the new one, the reason, and who says so. build, fill and
    verify follow it; any other misfit is refused as before. No resolver knows it, so the wheels are
    installed with --no-deps, and `pip check` names it.
    """
    if pin and remove:
        what = "a pin and --remove exclude each other"
        raise UsageError(what, hint="say one of them")

    # This raises first if there is no wheelhouse, or a change of it is unfinished.
    load_manifest(house)
    if pin:
        try:
            exact = ExactPin(pin)
        except ValueError:
            what = f"{pin!r} is not a pin, PROJECT==VERSION"
            hint = "for example nvidia-nccl-cu13==2.30.7"
            raise UsageError(what, hint=hint) from None

        override = choose_override(house, exact)
        is_new = record_override(house, override)
        state = "recorded" if is_new else "recorded already"
    elif remove:
        override = lift_override(house, remove)
        state = "lifted"
    else:
        listing = quoted("patchkit", "verify", house)
        hint = f"`{listing}` lists overrides, and what known bugs suggest"
        raise UsageError("name a pin: PROJECT==VERSION", hint=hint)

    yield {
        "dir": house,
        "state": state,
        "override": override,
    }
    yield GOOD + f"{house}: {state}: {override}"
    # `patchkit verify` names the next step for each wheel.
    if state == "recorded" and sources_of(override.takes.project):
        yield next_verb("build", "nccl", "--dir", house)
    else:
        yield next_verb("verify", house)


def _offer_lines(house: Path, offers: Iterable[Override]) -> Lines:
    """Yield the overrides that known bugs suggest, with the commands that record them."""
    for offer in offers:
        yield lead_word("beware") + f"{offer.reason} ({offer.word})"
        words = ("wheelhouse", "override", "--dir", house, str(offer.takes))
        yield next_verb(*words, where="to take another one")


def _override_lines(overrides: Iterable[Override]) -> Lines:
    """Yield the recorded overrides, and the effect that they have on an installation."""
    for override in overrides:
        yield lead_word("override") + str(override)
    if overrides:
        yield dim("  install with --no-deps; `pip check` names it")


@click.command
@options_of("verify")
@rendered
def verify_command(house: Path) -> Blocks:
    """Check that the wheels of a wheelhouse are whole, load on their device, and fit together.

    It compares files with manifest, hashes and RECORD; device code with the target; vLLM, torch,
    NCCL, triton and CUDA with each other. Only a signature of SHA256SUMS (ssh-keygen -Y) says who
    made the wheels.

    Exits with the highest code of its findings, such as 8 for bytes that the manifest does not
    have, and with 2 if no wheel is there.
    """
    tell_hashing(house)
    verified = verify_wheelhouse(house)
    require_wheels(house, verified)
    yield {
        "dir": house,
        "wheels": len(verified.entries),
        **record_fields(verified, "entries"),
    }

    if verified.pins:
        yield dim(cell_text(verified.pins))
    yield from _override_lines(verified.overrides)
    yield from _offer_lines(house, verified.offers)

    if not verified.findings:
        built = sum(entry.kind is Kind.BUILT for entry in verified.entries)

        count = counted_noun(built, "wheel")
        if others := len(verified.entries) - built:
            count += f" and {counted_noun(others, 'dependency', 'dependencies')}"
        yield GOOD + f"{house}: {count}, all as listed"
    if verified.missing:
        fill = quoted(*program(), "wheelhouse", "fill", "--dir", house)
        yield note(
            f"not here, and not checked: {', '.join(verified.missing)} and what those need. pip "
            f"takes them from an index; this locks them for every node: `{fill}`"
        )

    yield from finding_blocks(verified.findings)
    yield ExitCode(worst(verified.findings))


def require_wheels(house: Path, verified: Verified) -> None:
    """Raise UsageError for a folder without wheels, unless a finding reports that already."""
    if verified.entries or verified.findings:
        return

    repack = quoted("patchkit", "repack", first_example(), "--dir", house)
    fill = quoted("patchkit", "wheelhouse", "fill", "--dir", house)
    raise UsageError(
        f"{house}: holds no wheels",
        why="another folder is meant, or nothing was put there",
        hint=f"{repack} && {fill}",
    )


def tell_hashing(house: Path) -> None:
    """Tell how many bytes of a wheelhouse will be hashed, if that takes more than a few seconds."""
    files = filter(Path.is_file, house.glob("*.whl"))
    size = sum(file.stat().st_size for file in files)
    if size > _LARGE:
        tell(f"hashing and reading {size / 1e9:.1f} GB")
