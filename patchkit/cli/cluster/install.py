"""Install a wheelhouse on every node of a cluster: `patchkit cluster install`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from patchkit.cli.cluster.cluster_options import cluster_option
from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import PATH, record_fields, tell
from patchkit.cli.progress import progress
from patchkit.cli.render import (
    GOOD,
    Block,
    Record,
    counted_noun,
    gigabytes,
    lead_word,
    rendered,
)
from patchkit.cluster.agent.venv_install import InstalledVenv
from patchkit.cluster.agent.venv_link import InstallState
from patchkit.cluster.agent.wheel_store import NodeWheel, WheelLock
from patchkit.cluster.launch import install as launch
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.install import WheelCopy
from patchkit.errors import PatchkitError, UsageError
from patchkit.finding import Level
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.wheel.file.name import ANY
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.wheelhouse.manifest import REQUIREMENTS, Kind
from patchkit.wheel.wheelhouse.verify import verify_wheelhouse

_LEADING = ("vllm", "torch")
_LARGE = 1e9  # bytes; less is hashed in a second
_FEW = 1e7  # bytes; a speed of less says nothing


@click.command("install")
@cluster_option
@click.option(
    "--wheelhouse",
    "house",
    type=PATH,
    default=Path("wheelhouse"),
    show_default=True,
    metavar="DIR",
    help="What is installed: filled, and fit to be verified.",
)
@rendered
def command(*, cluster: Cluster, house: Path) -> Iterator[Block]:
    """Install the same wheels on every node, checked by hash; no node needs a network.

    \b
      patchkit cluster install
      patchkit cluster install --wheelhouse wheelhouse-0.33.0

    Copies what a node lacks, over the cable where there is one; makes an environment beside the one
    in use, checks every file there, and lets all nodes use it once they are equal. What runs goes
    on with the old one until the next start. Cut short, the same command goes on.
    """
    size = sum(file.stat().st_size for file in house.glob("*.whl") if file.is_file())
    if size > _LARGE:
        tell(f"hashing and reading {size / 1e9:.1f} GB")
    lock = read_house_lock(house)
    with cluster.alone():
        states = launch.survey_installations(cluster, lock)
        with progress() as report:
            copies = launch.copy_wheels(cluster, house, lock, states, report)
        yield from map(_copied_line, copies)
        with progress("wheels") as report:
            made = launch.install_everywhere(cluster, lock, states, report)
        before = launch.switch_links(cluster, lock.id)
    yield from _made_blocks(cluster, states, copies, made, before)


def _copied_line(copy: WheelCopy) -> str:
    source = f" from {copy.source}" if copy.source else ""
    fast = f", {copy.sent.speed:,.0f} MB/s" if copy.sent.sent >= _FEW else ""
    amount = f"{counted_noun(copy.wheels, 'wheel')}, {gigabytes(copy.sent.sent)}"
    return f"{copy.node}: {amount}{source} in {copy.sent.seconds:,.1f} s{fast}"


def _made_blocks(
    cluster: Cluster,
    states: Sequence[InstallState],
    copies: Sequence[WheelCopy],
    made: Sequence[InstalledVenv],
    before: Sequence[str],
) -> Iterator[Block]:
    sent = [
        {**record_fields(copy), "megabytes_per_second": round(copy.sent.speed, 1)}
        for copy in copies
    ]
    nodes = []
    lines: list[Block] = []
    for node, state, venv, former in zip(cluster.nodes, states, made, before, strict=True):
        changed = state.current != venv.name
        own = {"node": node.destination, "changed": changed, "former": former}
        nodes.append({**own, **record_fields(venv)})
        how = "installed anew" if not state.installed else "is there" if changed else "as it is"
        uses = f", and {cluster.file.venv} uses it" if changed else ""
        lines.append(GOOD + f"{node.destination}: {venv.name} {how}{uses}")
        lines += ["  " + lead_word("note") + warning for warning in venv.warnings]
    yield Record({"venv": cluster.file.venv, "copies": sent, "nodes": nodes})
    yield from lines
    first = made[0]
    parts = [f"{name} {first.versions[name]}" for name in _LEADING if name in first.versions]
    parts += [f"NCCL {first.nccl_version or '?'} ({first.nccl_sha256[:12]})"] if first.nccl else []
    same = "the same on every node: " if len(made) > 1 else ""
    yield f"{same}{', '.join([f'{len(first.versions)} projects', *parts])}"
    yield next_step(*program(), "up", "MODEL")


_LARGEST = 16 << 20  # bytes of requirements.txt


def read_house_lock(house: Path) -> WheelLock:
    """Return what a wheelhouse installs on a node.

    Raises the worst of its findings, UsageError for one that is not filled or not whole.
    """
    done = verify_wheelhouse(house)
    errors = [each for each in done.findings if each.level is Level.ERROR]
    if errors:
        worst = max(errors, key=lambda each: each.kind.exit_code)
        more = f" ({len(errors)} findings)" if len(errors) > 1 else ""
        kind: type[PatchkitError] = worst.kind
        hint = quoted("patchkit", "verify", house)
        raise kind(f"{house}: {worst.where}: {worst.what}{more}", why=worst.why, hint=hint)
    apart = [entry.name.pinned for entry in done.entries if not entry.held]
    releases = {
        str(e.facts["python"])
        for e in done.entries
        if e.facts.get("python") and e.kind is Kind.DEPENDENCY
    }
    if not done.entries or done.unmet or apart or len(releases) != 1:
        lacks = [*done.unmet, *apart]
        raise UsageError(
            f"{house}: is not filled" + (f": {', '.join(lacks[:3])} is not in it" if lacks else ""),
            why="a node without a network installs what the wheelhouse holds, all of it",
            hint=quoted("patchkit", "wheelhouse", "fill", "--dir", house),
        )
    cpus = {cpu for entry in done.entries for cpu in entry.name.cpus} - {ANY}
    if len(cpus) > 1:
        raise UsageError(
            f"{house}: has wheels for {' and for '.join(sorted(cpus))}",
            why="what is installed on all nodes is the same",
            hint="fill one of its own for each: patchkit wheelhouse fill --dir DIR",
        )
    wheels = []
    for entry in done.entries:
        with WheelFile(house / entry.filename) as wheel:
            unpacked = sum(each.file_size for each in wheel.members.values())
        wheels.append(
            NodeWheel(name=entry.filename, sha256=entry.sha256, size=entry.size, unpacked=unpacked)
        )
    return WheelLock(
        requirements=read_text(house / REQUIREMENTS, limit=_LARGEST, follow=False),
        cpu="".join(cpus),
        python=".".join(releases.pop().split(".")[:2]),
        wheels=tuple(wheels),
    )
