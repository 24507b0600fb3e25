"""Install a wheelhouse on every node of a cluster: `patchkit cluster install`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from patchkit.cli.cluster.cluster_options import cluster_option
from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import PATH, record_fields, tell
from patchkit.cli.progress import progress
from patchkit.cli.render import GOOD, Block, Record, counted_noun, gigabytes, lead_word, rendered
from patchkit.cluster.agent.installation import NodeWheel, WheelLock
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.install import install_everywhere
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
_LARGEST = 16 << 20  # bytes of requirements.txt


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

    Copies what a node lacks, makes an environment beside the one in use, and lets all nodes use it
    once they are equal. What runs goes on with the old one until the next start. Cut short, the
    same command goes on.
    """
    size = sum(file.stat().st_size for file in house.glob("*.whl") if file.is_file())
    if size > _LARGE:
        tell(f"hashing and reading {size / 1e9:.1f} GB")
    lock = read_house_lock(house)
    with progress() as report:
        done = install_everywhere(cluster, house, lock, report)
    nodes = []
    for copy in done.copies:
        amount = f"{counted_noun(copy.wheels, 'wheel')}, {gigabytes(copy.sent.sent)}"
        yield f"{copy.node}: {amount} in {copy.sent.seconds:,.1f} s"
    for node, state, venv in zip(cluster.nodes, done.before, done.made, strict=True):
        changed = state.current != venv.name
        own = {"node": node.destination, "changed": changed, "former": state.current}
        nodes.append({**own, **record_fields(venv)})
        how = "installed anew" if not state.installed else "is there" if changed else "as it is"
        uses = f", and {cluster.file.venv} uses it" if changed else ""
        yield GOOD + f"{node.destination}: {venv.name} {how}{uses}"
        yield from ("  " + lead_word("note") + warning for warning in venv.warnings)
    yield Record({"venv": cluster.file.venv, "copies": done.copies, "nodes": nodes})
    first = done.made[0]
    parts = [f"{name} {first.versions[name]}" for name in _LEADING if name in first.versions]
    parts += [f"NCCL {first.nccl_version or '?'} ({first.nccl_sha256[:12]})"] if first.nccl else []
    same = "the same on every node: " if len(nodes) > 1 else ""
    yield f"{same}{', '.join([f'{len(first.versions)} projects', *parts])}"
    yield next_step(*program(), "up", "MODEL")


def read_house_lock(house: Path) -> WheelLock:
    """Return what a wheelhouse installs on a node.

    Raises the worst of its findings, UsageError for one that is not filled or not whole.
    """
    done = verify_wheelhouse(house)
    errors = [each for each in done.findings if each.level is Level.ERROR]
    if errors:
        worst = max(errors, key=lambda each: each.kind.exit_code)
        kind: type[PatchkitError] = worst.kind
        hint = quoted("patchkit", "verify", house)
        raise kind(f"{house}: {worst.where}: {worst.what}", why=worst.why, hint=hint)
    lacks = [*done.unmet, *(each.name.pinned for each in done.entries if not each.held)]
    releases = {
        str(e.facts["python"])
        for e in done.entries
        if e.facts.get("python") and e.kind is Kind.DEPENDENCY
    }
    cpus = {cpu for entry in done.entries for cpu in entry.name.cpus} - {ANY}
    if lacks or len(releases) != 1 or len(cpus) > 1:
        raise UsageError(
            f"{house}: is not filled, for one CPU and one Python: it lacks "
            f"{', '.join(lacks[:3]) or 'nothing'}, and has wheels for {', '.join(sorted(cpus))}",
            why="a node without a network installs what the wheelhouse holds, all of it",
            hint=quoted("patchkit", "wheelhouse", "fill", "--dir", house),
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
