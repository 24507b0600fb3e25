"""Look at the machines of a cluster, and install vLLM on them: `patchkit cluster`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from patchkit.cli.cluster.cluster_options import (
    FILE_OPTION,
    cluster_option,
    sent_amount,
)
from patchkit.cli.out import PATH, next_step, program, record_fields, spelled, style
from patchkit.cli.progress import progress
from patchkit.cli.render import (
    GOOD,
    Block,
    ExitCode,
    Record,
    VerbGroup,
    counted_noun,
    finding_blocks,
    lead_word,
    rendered,
)
from patchkit.cli.runtime.node_options import TOPOLOGIES
from patchkit.cli.wheel.wheelhouse import tell_hashing
from patchkit.cluster.agent.image_facts import ImageContents
from patchkit.cluster.agent.installation import NodeWheel, WheelLock
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import (
    ClusterFile,
    ClusterNode,
    new_cluster_text,
)
from patchkit.cluster.launch.image_layer import CACHE, patch_image
from patchkit.cluster.launch.install import (
    Progress,
    install_everywhere,
    install_image,
    resolve_image,
)
from patchkit.cluster.launch.pinning import pin_image
from patchkit.cluster.launch.ranks import node_addresses
from patchkit.cluster.launch.survey import survey_nodes
from patchkit.errors import HostError, UsageError
from patchkit.finding import Finding, Level, finding, worst
from patchkit.patching.recipe import load_recipe
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.runtime.envfile.write import write
from patchkit.units import KIB_PER_GIB
from patchkit.wheel.file.wheelfile import ANY, WheelFile
from patchkit.wheel.wheelhouse.portable import add_compiler, add_requirements
from patchkit.wheel.wheelhouse.resolve import NodePlatform
from patchkit.wheel.wheelhouse.storage import REQUIREMENTS, Kind, ManifestEntry
from patchkit.wheel.wheelhouse.verify import verify_wheelhouse

_LARGEST = 16 << 20  # bytes of requirements.txt


@click.group(cls=VerbGroup)
def cluster_command() -> None:
    """Set up several machines to serve a model, by systemd and ssh.

    \b
      patchkit cluster init spark-1 spark-2
      patchkit cluster install
      patchkit up openai/gpt-oss-120b
      patchkit status
      patchkit down

    The first machine is the head. systemd on each keeps the ranks: the head's unit starts and
    watches the others, comes back after a crash, four times an hour at most, and after a reboot.
    """


@cluster_command.command("init")
@click.argument("nodes", nargs=-1, required=True, metavar="HOST...")
@FILE_OPTION
@click.option("--topology", type=click.Choice(TOPOLOGIES))
@click.option(
    "--head-ip", "address", default="", metavar="A", help="The head's IPv4 address."
)
@click.option("--target", default="", metavar="NAME", help="Instead of the probed GPU.")
@click.option("--force", is_flag=True, help="Replace a file that says something else.")
@rendered
def init_cluster(
    nodes: Sequence[str], *, file: Path, address: str, force: bool, **given: str | None
) -> Iterator[Block]:
    """Look at each machine by ssh, and write cluster.toml; the first is the head.

    \b
      patchkit cluster init spark-1 spark-2
      patchkit cluster init localhost spark-2

    HOST is as for ssh; localhost is this machine, without it. Nothing has to be installed there
    but Python 3.11 and systemd. Cables, versions and limits are checked.
    """
    head, *workers = nodes
    members = [
        ClusterNode(ssh=head, address=address),
        *(ClusterNode(ssh=it) for it in workers),
    ]
    cluster = Cluster(ClusterFile(node=tuple(members)))
    facts = cluster.facts()
    # A Spark beside a Thor: tensor parallelism, the default, is not for two kinds.
    kinds = {it.host.target for it in facts}
    default = "hetero" if len(kinds) > 1 else ""
    chosen = {"topology": given["topology"] or default, "target": given["target"]}
    choices = {name: value for name, value in chosen.items() if value}
    members, linked = _link_nodes(cluster.file, facts, choices)
    found = [*survey_nodes(nodes, facts), *linked]
    text = new_cluster_text(members, choices)
    outcome = str(
        write(file, text, force=force, private=False, by="patchkit cluster init")
    )
    yield Record({"file": file, "outcome": outcome, "text": text, "findings": found})
    for name, its in zip(nodes, facts, strict=True):
        host = its.host
        gpu = host.gpus[0].name if host.gpus else "no GPU"
        memory = (
            f"{host.memory.total / KIB_PER_GIB:.0f} GiB" if host.memory else "? GiB"
        )
        vllm = (
            f"vLLM {host.versions['vllm']}" if host.versions["vllm"] else "no vLLM yet"
        )
        cages = counted_noun(len(host.cabled), "QSFP cage")
        yield style(name, bold=True) + f"  {gpu}, {memory}, {cages} cabled, {vllm}"
    yield from finding_blocks(check for check in found if check.level is not Level.OK)
    yield GOOD + f"{file} {outcome}"
    cures = [check.hint for check in found if check.level is Level.ERROR and check.hint]
    if cures:
        yield style("next:", bold=True) + f" {spelled(cures[0])}"
    elif all(it.host.versions["vllm"] for it in facts):
        yield next_step(*program(), "up", "MODEL")
    else:
        yield next_step(*program(), "cluster", "install")
    yield ExitCode(worst(found))


def _link_nodes(
    file: ClusterFile, facts: Sequence[NodeFacts], choices: dict[str, str]
) -> tuple[list[ClusterNode], list[Finding]]:
    """Return the nodes with the names by which the head reaches them, and what is in the way.

    A name that leads to a worker from here may lead nowhere from the head: then the address on the
    cable is taken.
    """
    head, *workers = file.node
    try:
        addresses = node_addresses(file, facts, choices)
    except HostError as error:
        where, _, what = error.what.partition(": ")
        what = f"address: {what}"
        return [*file.node], [finding(HostError, where, what, error.hint, error.why)]
    kept, found = [head], []
    for worker, where in zip(workers, addresses[1:], strict=True):
        user, at, _host = worker.ssh.rpartition("@")
        trouble = None
        for tried in (worker, replace(worker, peer=f"{user}{at}{where}")):
            try:
                Cluster(replace(file, node=(head, tried))).links([where])
                kept.append(tried)
                break
            except HostError as error:
                trouble = trouble or error
        else:
            assert trouble is not None
            kept.append(worker)
            what = f"link: {trouble.what}"
            found.append(
                finding(HostError, worker.ssh, what, trouble.hint, trouble.why)
            )
    return kept, found


@cluster_command.command("install")
@cluster_option
@click.option(
    "--wheelhouse", "house", type=PATH, default="wheelhouse", show_default=True
)
@click.option(
    "--apply", "patched", is_flag=True, help="Patch the image's vLLM in a layer."
)
@click.option("--native", is_flag=True, help="With --apply: assemble its PTX as well.")
@rendered
def install_vllm(
    *, cluster: Cluster, house: Path, patched: bool, native: bool
) -> Iterator[Block]:
    """Install the same wheels, or the same image, on every node.

    \b
      patchkit cluster install
      patchkit cluster install --wheelhouse wheelhouse-0.33.0
      patchkit cluster install --apply

    Copies wheels that a node lacks, makes an environment beside the one in use, and lets all nodes
    use it once they are equal; no node needs a network. An image that cluster.toml names is pinned
    there by its digest and pulled; nodes that cannot pull it get a copy.

    What runs goes on with the old one until the next start. Cut short, the same command goes on.
    """
    if native > patched or patched > bool(cluster.file.serve.image):
        raise UsageError(
            "--apply is for an image that cluster.toml names, and --native goes with it",
            hint="wheels are patched before they are installed: patchkit repack vllm==X --native",
        )
    yield from (
        _install_image(cluster, patched=patched, native=native)
        if cluster.file.serve.image
        else _install_wheels(cluster, house)
    )
    yield next_step(*program(), "up", "MODEL")


def _install_wheels(cluster: Cluster, house: Path) -> Iterator[Block]:
    tell_hashing(house)
    lock = _read_house_lock(house)
    with progress() as report:
        brought = install_everywhere(cluster, house, lock, report)
    nodes, copies = [], []
    for its in brought:
        if its.sent:
            count = len(its.before.lacking)
            copies.append({"node": its.node, "wheels": count, "sent": its.sent})
            yield f"{its.node}: {counted_noun(count, 'wheel')}, {sent_amount(its.sent)}"
    for its in brought:
        state, venv = its.before, its.venv
        changed = state.current != venv.name
        own = {
            "node": its.node,
            "changed": changed,
            "former": state.current,
            "note": its.note,
        }
        nodes.append({**own, **record_fields(venv)})
        how = (
            "installed anew"
            if not state.installed
            else "is there"
            if changed
            else "as it is"
        )
        uses = f", and {cluster.file.venv} uses it" if changed else ""
        yield GOOD + f"{its.node}: {venv.name} {how}{uses}"
        warnings = [*venv.warnings, its.note]
        yield from (
            "  " + lead_word("note") + warning for warning in warnings if warning
        )
    yield Record({"venv": cluster.file.venv, "copies": copies, "nodes": nodes})
    first = brought[0].venv
    leading = (name for name in ("vllm", "torch") if name in first.versions)
    parts = [f"{name} {first.versions[name]}" for name in leading]
    parts += (
        [f"NCCL {first.nccl_version or '?'} ({first.nccl_sha256[:12]})"]
        if first.nccl
        else []
    )
    same = "the same on every node: " if len(nodes) > 1 else ""
    yield f"{same}{', '.join([f'{len(first.versions)} projects', *parts])}"


def _install_image(cluster: Cluster, *, patched: bool, native: bool) -> Iterator[Block]:
    file, serve = click.get_current_context().params["file"], cluster.file.serve
    said: tuple[str, ...] = ()
    with progress() as report:
        if (pinned := resolve_image(cluster, report)) != serve.image:
            pin_image(file, pinned)
            cluster = cluster.with_image(pinned)
            yield f"{file} pins {pinned}"
        if patched:
            head = Cluster(replace(cluster.file, node=cluster.file.node[:1]))
            install_image(head, report)
            add_needs = functools.partial(_add_needs, native=native)
            if built := patch_image(head, report, add_needs, native=native):
                pinned, said = f"localhost/patchkit@sha256:{built.id}", built.said
                pin_image(file, pinned, former=True)
                cluster = cluster.with_image(pinned)
        brought = install_image(cluster, report)
    yield from said
    for its in brought:
        if its.sent:
            yield f"{its.node}: {sent_amount(its.sent)}"
        how = "pulled" if its.pulled else "loaded" if its.sent else "as it is"
        yield GOOD + f"{its.node}: {cluster.file.serve.local_image} {how}"
    yield Record({"image": pinned, "nodes": brought, "said": said})


def _add_needs(
    folder: Path, contents: ImageContents, bar: Progress, *, native: bool
) -> None:
    """Add what patchkit needs in an image, with the compiler of PTX if it is ``native``."""
    node = NodePlatform(
        machine=contents.machine, python=contents.release, glibc=contents.glibc
    )
    add_requirements(folder, node, bar)
    if native:
        add_compiler(folder / CACHE, node.machine, bar)


def _read_house_lock(house: Path) -> WheelLock:
    """Return what a wheelhouse installs on a node.

    Raises the worst of its findings, UsageError for one that is not filled or not whole.
    """
    done = verify_wheelhouse(house)
    if errors := [it for it in done.findings if it.level is Level.ERROR]:
        it = max(errors, key=lambda error: error.kind.exit_code)
        hint = quoted("patchkit", "verify", house)
        raise it.kind(f"{house}: {it.where}: {it.what}", why=it.why, hint=hint)
    if not done.entries:
        raise UsageError(
            f"{house}: holds no wheels",
            why="a node without a network installs what the wheelhouse holds, all of it",
            hint=quoted(
                "patchkit", "repack", f"vllm=={load_recipe().newest}", "--dir", house
            )
            + " && "
            + quoted("patchkit", "wheelhouse", "fill", "--dir", house),
        )

    lacks = [*done.unmet, *(each.name.pinned for each in done.entries if not each.held)]
    brought = [entry.facts for entry in done.entries if entry.kind is Kind.DEPENDENCY]
    releases = {str(facts["python"]) for facts in brought if facts.get("python")}
    cpus = {cpu for entry in done.entries for cpu in entry.name.cpus} - {ANY}
    if lacks or len(releases) != 1 or len(cpus) > 1:
        raise UsageError(
            f"{house}: is not filled, for one CPU and one Python: it lacks "
            f"{', '.join(lacks[:3]) or 'nothing'}, and has wheels for {', '.join(sorted(cpus))}",
            why="a node without a network installs what the wheelhouse holds, all of it",
            hint=quoted("patchkit", "wheelhouse", "fill", "--dir", house),
        )
    target, native = _read_device(done.entries)
    wheels = []
    for entry in done.entries:
        with WheelFile(house / entry.filename) as wheel:
            unpacked = sum(each.file_size for each in wheel.members.values())
        wheels.append(
            NodeWheel(
                name=entry.filename,
                sha256=entry.sha256,
                size=entry.size,
                unpacked=unpacked,
            )
        )
    return WheelLock(
        requirements=read_text(house / REQUIREMENTS, limit=_LARGEST, follow=False),
        cpu="".join(cpus),
        python=".".join(releases.pop().split(".")[:2]),
        wheels=tuple(wheels),
        target=target,
        native=native,
    )


def _read_device(entries: Sequence[ManifestEntry]) -> tuple[str, bool]:
    """Return the target that wheels were made for, "" for several, and whether they are native."""
    built = [entry.facts for entry in entries if entry.kind is Kind.BUILT]
    made_for = {str(facts["target"]) for facts in built if facts.get("target")}
    native = any(facts.get("native") for facts in built)
    return (made_for.pop() if len(made_for) == 1 else "", native)
