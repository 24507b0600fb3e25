"""Install a wheelhouse on every node of a cluster: `patchkit cluster install`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from patchkit.cli.cluster.cluster_options import BREAK_LOCK, cluster_option
from patchkit.cli.cluster.wheel_lock import wheel_lock
from patchkit.cli.next_step import next_step, program
from patchkit.cli.out import as_json, echo, print_json, say, style, tell
from patchkit.cli.progress import progress
from patchkit.cli.show import GOOD, gigabytes
from patchkit.cluster.agent.installed import InstalledVenv
from patchkit.cluster.agent.venv_link import InstallState
from patchkit.cluster.agent.wheel_store import WheelLock
from patchkit.cluster.launch import install as launch
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.install import WheelCopy
from patchkit.errors import UsageError

_LEADING = ("vllm", "torch")
_LARGE = 1e9  # bytes; less is hashed in a second
_FEW = 1e7  # bytes; a speed of less says nothing


@click.command("install")
@cluster_option
@BREAK_LOCK
@click.option(
    "--wheelhouse",
    "house",
    type=click.Path(path_type=Path),
    default=Path("wheelhouse"),
    show_default=True,
    metavar="DIR",
    help="What is installed: filled, and fit to be verified.",
)
@click.option("--rollback", is_flag=True, help="Go back to the former installation, everywhere.")
@click.option("--prune", is_flag=True, help="Remove environments older than the former one.")
@click.option("--dry-run", is_flag=True, help="Show what would be copied, made and run.")
@as_json
def command(
    *, cluster: Cluster, house: Path, rollback: bool, prune: bool, dry_run: bool, as_json: bool
) -> None:
    """Install the same wheels on every node, checked by hash; no node needs a network.

    \b
      patchkit cluster install
      patchkit cluster install --rollback

    Copies what a node lacks, over the cable where there is one; makes an environment beside the one
    in use, checks every file there, and lets all nodes use it once they are equal. What runs goes
    on with the old one until the next start. Cut short, the same command goes on.
    """
    if rollback:
        if prune:
            raise UsageError("--rollback and --prune exclude each other", hint="one at a time")
        _roll_back(cluster, dry_run=dry_run, as_json=as_json)
        return
    size = sum(each.stat().st_size for each in house.glob("*.whl") if each.is_file())
    if size > _LARGE and not as_json:
        tell(f"hashing and reading {size / 1e9:.1f} GB")
    lock = wheel_lock(house)
    if dry_run:
        _show_plan(cluster, lock, launch.survey_installations(cluster, lock), as_json=as_json)
        return
    with cluster.alone():
        states = launch.survey_installations(cluster, lock)
        with progress() as report:
            copies = launch.copy_wheels(cluster, house, lock, states, report)
        if not as_json:
            echo(map(_copied, copies))
        with progress("wheels") as report:
            made = launch.install_everywhere(cluster, lock, states, report)
        before = launch.switch_links(cluster, [each.name for each in made])
        removed = launch.prune_everywhere(cluster, [each.name for each in made]) if prune else []
    _show_made(cluster, states, copies, made, before, removed, as_json=as_json)


def _roll_back(cluster: Cluster, *, dry_run: bool, as_json: bool) -> None:
    if dry_run:
        names, before = launch.rollback_target(cluster), None
    else:
        with cluster.alone():
            names = launch.rollback_target(cluster)
            before = launch.switch_links(cluster, names, back=True)
    if as_json:
        rows = zip(cluster.nodes, names, strict=True)
        nodes = [{"node": node.destination, "installation": name} for node, name in rows]
        print_json({"dry_run": dry_run, "rollback": True, "nodes": nodes})
        return
    for node, name in zip(cluster.nodes, names, strict=True):
        does = "would use" if dry_run else "uses"
        say(GOOD + f"{node.destination}: {cluster.file.venv} {does} {name}")
    if before:
        say("what runs goes on with the environment that it was started from")
        echo([next_step(*program(), "cluster", "up", "MODEL")])


def _copied(each: WheelCopy) -> str:
    source = f" from {each.source}" if each.source else ""
    fast = f", {each.sent.speed:,.0f} MB/s" if each.sent.sent >= _FEW else ""
    amount = f"{each.wheels} wheel{'s' * (each.wheels != 1)}, {gigabytes(each.sent.sent)}"
    return f"{each.node}: {amount}{source} in {each.sent.seconds:,.1f} s{fast}"


def _show_plan(
    cluster: Cluster, lock: WheelLock, states: Sequence[InstallState], *, as_json: bool
) -> None:
    nodes = [
        {
            "node": node.destination,
            "installation": state.name,
            "installed": state.installed,
            "current": state.current,
            "copies": list(state.lacking),
            "bytes": launch.to_copy(state, lock),
            "unpacks": launch.to_unpack(state, lock),
        }
        for node, state in zip(cluster.nodes, states, strict=True)
    ]
    if as_json:
        print_json({"dry_run": True, "nodes": nodes})
        return
    for node, state in zip(cluster.nodes, states, strict=True):
        say(style(node.destination, bold=True) + f" installation {state.name}")
        if state.lacking:
            size = gigabytes(launch.to_copy(state, lock))
            say(f"  copies  {len(state.lacking)} of {len(lock.on(state.cpu))} wheels, {size}")
        folder = f"{state.store.rpartition('/')[0]}/venvs/{state.name}"
        if not state.installed:
            say(f"  makes   {folder}, {gigabytes(launch.to_unpack(state, lock))}")
        if state.current != state.name:
            say(f"  links   {cluster.file.venv} to {folder}")
        elif state.installed:
            say("  as it is")
    say("nothing was changed")


def _show_made(
    cluster: Cluster,
    states: Sequence[InstallState],
    copies: Sequence[WheelCopy],
    made: Sequence[InstalledVenv],
    before: Sequence[str],
    removed: Sequence[Sequence[str]],
    *,
    as_json: bool,
) -> None:
    if as_json:
        rows = zip(cluster.nodes, states, made, before, removed or [[]] * len(made), strict=True)
        print_json(
            {
                "venv": cluster.file.venv,
                "copies": [
                    {**asdict(each), "megabytes_per_second": round(each.sent.speed, 1)}
                    for each in copies
                ],
                "nodes": [
                    {
                        "node": node.destination,
                        "changed": state.current != venv.name,
                        "former": former,
                        "removed": list(gone),
                        **asdict(venv),
                    }
                    for node, state, venv, former, gone in rows
                ],
            }
        )
        return
    for number, (node, state, venv) in enumerate(zip(cluster.nodes, states, made, strict=True)):
        how = "installed anew" if not state.installed else "is there"
        how = "as it is" if state.installed and state.current == venv.name else how
        if state.current != venv.name:
            how += f", and {cluster.file.venv} uses it"
        say(GOOD + f"{node.destination}: {venv.name} {how}")
        for warning in venv.warnings:
            say(style("  note", fg="yellow") + f" {warning}")
        if removed and removed[number]:
            say(f"  removed {', '.join(removed[number])}")
    first = made[0]
    parts = [f"{name} {first.versions[name]}" for name in _LEADING if name in first.versions]
    parts += [f"NCCL {first.nccl_version or '?'} ({first.nccl_sha256[:12]})"] if first.nccl else []
    same = "the same on every node: " if len(made) > 1 else ""
    say(f"{same}{len(first.versions)} projects{''.join(f', {each}' for each in parts)}")
    echo([next_step(*program(), "cluster", "up", "MODEL")])
