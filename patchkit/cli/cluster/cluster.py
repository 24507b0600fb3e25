"""Look at the machines of a cluster, and install vLLM on them: `patchkit cluster`."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from patchkit.cli.cluster.cluster_options import (
    cluster_option,
    sent_amount,
)
from patchkit.cli.out import bold, next_hint, next_verb, progress, record_fields
from patchkit.cli.render import (
    GOOD,
    Blocks,
    ExitCode,
    Lines,
    VerbGroup,
    counted_noun,
    finding_blocks,
    note,
    options_of,
    rendered,
)
from patchkit.cli.wheel.wheelhouse import require_wheels, tell_hashing
from patchkit.cluster.agent.image_facts import ImageContents
from patchkit.cluster.agent.installation import InstalledVenv, NodeWheel, WheelLock
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import (
    ClusterNode,
    new_cluster_text,
)
from patchkit.cluster.launch.install import (
    CACHE,
    BroughtVenv,
    install_everywhere,
    install_image,
    patch_image,
    resolve_image,
)
from patchkit.cluster.launch.pinning import pin_image
from patchkit.cluster.launch.ranks import node_addresses
from patchkit.cluster.launch.survey import survey_nodes
from patchkit.cluster.ssh.node import Progress
from patchkit.errors import HostError, UsageError
from patchkit.finding import Finding, Level, finding, worst
from patchkit.frozen import Values
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.runtime.envfile.env_file import write
from patchkit.runtime.host.host import Host
from patchkit.units import KIB_PER_GIB
from patchkit.wheel.file.wheelfile import ANY, WheelFile
from patchkit.wheel.wheelhouse.portable import add_compiler, add_requirements
from patchkit.wheel.wheelhouse.resolve import NodePlatform
from patchkit.wheel.wheelhouse.storage import REQUIREMENTS, Kind, ManifestEntry
from patchkit.wheel.wheelhouse.verify import Verified, verify_wheelhouse

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
    watches the others, and restarts after a crash, at most four times an hour, or a reboot.
    """


@cluster_command.command("init")
@options_of("cluster-init")
@rendered
def init_cluster(
    nodes: Sequence[str],
    file: Path,
    address: str | None,
    force: bool,
    **given: str | None,
) -> Blocks:
    """Look at each machine by ssh, and write cluster.toml; the first is the head.

    \b
      patchkit cluster init spark-1 spark-2
      patchkit cluster init localhost spark-2

    HOST is as for ssh; localhost is this machine, without ssh. A machine needs nothing but Python
    3.11 and systemd. Cables, versions and limits are checked.
    """
    head, *workers = nodes
    members = [ClusterNode(ssh=head, address=address or "")]
    members += [ClusterNode(ssh=worker) for worker in workers]
    cluster = Cluster(members=tuple(members))
    facts = cluster.facts()

    choices = _file_choices(facts, **given)
    members, unreachable = _link_nodes(cluster, facts, choices)
    findings = [*survey_nodes(nodes, facts), *unreachable]

    text = new_cluster_text(members, choices)
    by = "patchkit cluster init"
    outcome = str(write(file, text, force=force, private=False, by=by))
    yield {
        "file": file,
        "outcome": outcome,
        "text": text,
        "findings": findings,
    }

    for name, node_facts in zip(nodes, facts, strict=True):
        yield _node_line(name, node_facts.host)
    yield from finding_blocks(row for row in findings if row.level is not Level.OK)

    yield GOOD + f"{file} {outcome}"

    cures = [row.hint for row in findings if row.level is Level.ERROR and row.hint]
    if cures:
        yield next_hint(cures[0])
    elif all(node.host.versions["vllm"] for node in facts):
        yield next_verb("up", "MODEL")
    else:
        yield next_verb("cluster", "install")
    yield ExitCode(worst(findings))


def _file_choices(
    facts: Sequence[NodeFacts], topology: str | None, target: str | None
) -> Values:
    """Return the topology and the target for cluster.toml; a missing one is decided later."""
    choices = {}
    devices = {node.host.target for node in facts}
    if topology:
        choices["topology"] = topology
    elif len(devices) > 1:
        # Tensor parallelism, the default, does not suit different devices, as a Spark and a Thor.
        choices["topology"] = "hetero"

    if target:
        choices["target"] = target
    return choices


def _node_line(name: str, host: Host) -> str:
    gpu = host.gpus[0].name if host.gpus else "no GPU"
    memory = "? GiB"
    if host.memory:
        memory = f"{host.memory.total / KIB_PER_GIB:.0f} GiB"

    cages = counted_noun(len(host.cabled), "QSFP cage")
    vllm = "no vLLM yet"
    if version := host.versions["vllm"]:
        vllm = f"vLLM {version}"
    return bold(name) + f"  {gpu}, {memory}, {cages} cabled, {vllm}"


def _link_nodes(
    cluster: Cluster, facts: Sequence[NodeFacts], choices: Values
) -> tuple[list[ClusterNode], list[Finding]]:
    """Return the nodes, each with the name by which the head reaches it, and the broken links.

    A name that reaches a worker from here may not reach it from the head. The result then has the
    address of the worker's cable as ``peer``. If that fails, too, the link is broken.
    """
    try:
        addresses = node_addresses(cluster, facts, choices)
    except HostError as error:
        node, _, what = error.what.partition(": ")
        text = f"address: {what}"
        return [*cluster.members], [
            finding(HostError, node, text, error.hint, error.why)
        ]

    head, *workers = cluster.members
    members = [head]
    unreachable: list[Finding] = []
    for worker, address in zip(workers, addresses[1:], strict=True):
        user, at, _host = worker.ssh.rpartition("@")
        by_cable = replace(worker, peer=f"{user}{at}{address}")

        if fault := _link_error(cluster, head, worker, address):
            if _link_error(cluster, head, by_cable, address) is None:
                worker = by_cable
            else:
                text = f"link: {fault.what}"
                row = finding(HostError, worker.ssh, text, fault.hint, fault.why)
                unreachable.append(row)

        members.append(worker)
    return members, unreachable


def _link_error(
    cluster: Cluster, head: ClusterNode, worker: ClusterNode, address: str
) -> HostError | None:
    """Return why the head cannot reach a worker; None if it can."""
    try:
        replace(cluster, members=(head, worker)).links([address])
    except HostError as error:
        return error
    return None


@cluster_command.command("install")
@cluster_option
@options_of("cluster-install")
@rendered
def install_vllm(cluster: Cluster, house: Path, patched: bool, native: bool) -> Blocks:
    """Install the same wheels, or the same image, on every node.

    \b
      patchkit cluster install
      patchkit cluster install --wheelhouse wheelhouse-0.33.0
      patchkit cluster install --apply

    Copies wheels that a node lacks, makes an environment beside the one in use, and lets all nodes
    use it once they are equal; no node needs a network. An image that cluster.toml names is pinned
    there by its digest and pulled; nodes that cannot pull it get a copy.

    A running server keeps the old files until its next start. After an interrupt, run it again.
    """
    lacks_image = patched and not cluster.serve.image
    if lacks_image or (native and not patched):
        raise UsageError(
            "--apply is for an image that cluster.toml names, and --native goes with it",
            hint="wheels are patched before they are installed: patchkit repack vllm==X --native",
        )

    if cluster.serve.image:
        yield from _install_image(cluster, patched=patched, native=native)
    else:
        yield from _install_wheels(cluster, house)
    yield next_verb("up", "MODEL")


def _install_wheels(cluster: Cluster, house: Path) -> Blocks:
    tell_hashing(house)
    lock = read_house_lock(house)
    with progress() as report:
        brought = install_everywhere(cluster, house, lock, report)

    copies = []
    for result in brought:
        if sent := result.sent:
            count = len(result.before.lacking)
            copies.append({"node": result.node, "wheels": count, "sent": sent})
            amount = f"{counted_noun(count, 'wheel')}, {sent_amount(sent)}"
            yield f"{result.node}: {amount}"

    nodes = []
    for result in brought:
        is_changed = result.before.current != result.venv.name
        yield from _venv_lines(result, cluster.venv, is_changed=is_changed)
        change = {
            "node": result.node,
            "changed": is_changed,
            "former": result.before.current,
            "note": result.note,
        }
        nodes.append(change | record_fields(result.venv))

    yield {
        "venv": cluster.venv,
        "copies": copies,
        "nodes": nodes,
    }

    same = "the same on every node: " if len(nodes) > 1 else ""
    yield f"{same}{_contents(brought[0].venv)}"


def _venv_lines(result: BroughtVenv, link: str, *, is_changed: bool) -> Lines:
    """Yield how an environment was brought to a node, and warnings about it."""
    state = "as it is"
    uses = ""
    if is_changed:
        state = "is there"
        uses = f", and {link} uses it"
    if not result.before.installed:
        state = "installed anew"

    yield GOOD + f"{result.node}: {result.venv.name} {state}{uses}"
    for warning in (*result.venv.warnings, result.note):
        if warning:
            yield "  " + note(warning)


def _contents(venv: InstalledVenv) -> str:
    parts = [f"{len(venv.versions)} projects"]
    leading = [name for name in ("vllm", "torch") if name in venv.versions]
    parts += [f"{name} {venv.versions[name]}" for name in leading]
    if venv.nccl:
        parts.append(f"NCCL {venv.nccl_version or '?'} ({venv.nccl_sha256[:12]})")
    return ", ".join(parts)


def _install_image(cluster: Cluster, *, patched: bool, native: bool) -> Blocks:
    file: Path = click.get_current_context().params["file"]
    notes: Sequence[str] = ()
    with progress() as report:
        pinned = resolve_image(cluster, report)
        if pinned != cluster.serve.image:
            pin_image(file, pinned)
            cluster = cluster.with_image(pinned)
            yield f"{file} pins {pinned}"

        if patched:
            head = replace(cluster, members=cluster.members[:1])
            install_image(head, report)
            add_needs = functools.partial(_add_needs, native=native)
            if built := patch_image(head, report, add_needs, native=native):
                notes = built.said
                pinned = f"localhost/patchkit@sha256:{built.id}"
                pin_image(file, pinned, former=True)
                cluster = cluster.with_image(pinned)

        brought = install_image(cluster, report)

    yield from notes
    for result in brought:
        state = "pulled" if result.pulled else "as it is"
        if result.sent:
            yield f"{result.node}: {sent_amount(result.sent)}"
            state = "loaded"
        yield GOOD + f"{result.node}: {cluster.serve.local_image} {state}"

    yield {
        "image": pinned,
        "nodes": brought,
        "said": notes,
    }


def _add_needs(
    folder: Path, contents: ImageContents, bar: Progress, *, native: bool
) -> None:
    """Add patchkit's requirements to an image, and the compiler of PTX if it is ``native``."""
    node = NodePlatform(
        machine=contents.machine, python=contents.release, glibc=contents.glibc
    )
    add_requirements(folder, node, bar)
    if native:
        add_compiler(folder / CACHE, node.machine, bar)


def read_house_lock(house: Path) -> WheelLock:
    """Return the wheels that a wheelhouse installs on a node, with their requirements.

    Raises the wheelhouse's worst finding, or UsageError if it has no wheels or lacks some of them.
    """
    verified = verify_wheelhouse(house)
    _require_whole(house, verified)

    entries = verified.entries
    cpus = {cpu for entry in entries for cpu in entry.name.cpus} - {ANY}
    built = [entry for entry in entries if entry.kind is Kind.BUILT]
    needed = [entry for entry in entries if entry.kind is Kind.DEPENDENCY]
    pythons = _fact_values(needed, "python")
    missing = [entry.name.pinned for entry in entries if not entry.held]
    missing = [*verified.missing, *missing]
    if missing or len(pythons) != 1 or len(cpus) > 1:
        lacks = ", ".join(missing[:3]) or "nothing"
        raise UsageError(
            f"{house}: is not filled, for one CPU and one Python: it lacks {lacks}, and has wheels "
            f"for {', '.join(sorted(cpus))}",
            why="a node without a network installs what the wheelhouse holds, all of it",
            hint=quoted("patchkit", "wheelhouse", "fill", "--dir", house),
        )

    targets = _fact_values(built, "target")
    release = pythons.pop().split(".")
    return WheelLock(
        requirements=read_text(house / REQUIREMENTS, limit=_LARGEST, follow=False),
        cpu="".join(cpus),
        python=".".join(release[:2]),
        wheels=tuple(_node_wheel(house, entry) for entry in entries),
        target=targets.pop() if len(targets) == 1 else "",
        native=tuple(
            f"{entry.facts.get('project')}=={entry.facts.get('version')}"
            for entry in built
            if entry.facts.get("native")
        ),
    )


def _fact_values(entries: Sequence[ManifestEntry], name: str) -> set[str]:
    """Return the different values, without empty ones, of one fact of wheels."""
    return {str(entry.facts[name]) for entry in entries if entry.facts.get(name)}


def _require_whole(house: Path, verified: Verified) -> None:
    """Raise the worst finding of a wheelhouse, or UsageError for an empty one."""
    errors = [row for row in verified.findings if row.level is Level.ERROR]
    if errors:
        worst = max(errors, key=lambda error: error.kind.exit_code)
        hint = quoted("patchkit", "verify", house)
        raise replace(worst, where=f"{house}: {worst.where}", hint=hint).located_error()

    require_wheels(house, verified)


def _node_wheel(house: Path, entry: ManifestEntry) -> NodeWheel:
    with WheelFile(house / entry.name) as wheel:
        unpacked = sum(member.file_size for member in wheel.members.values())

    return NodeWheel(name=entry.name, sha256=entry.sha256, unpacked=unpacked)
