"""Install the same wheels, or the same image, on every node; all use it once all are equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.agent import images, installation
from patchkit.cluster.agent.images import HeldImage
from patchkit.cluster.agent.installation import InstalledVenv, InstallState, WheelLock
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.node import Remote, all_of, everywhere
from patchkit.cluster.ssh.rsync import Copied
from patchkit.cluster.ssh.ssh import HERE, ssh_words
from patchkit.errors import HostError, UsageError

Progress = Callable[[int, int], None]
Report = Callable[[str], Progress]
"""Takes a task; returns what takes its progress."""

_SHOWN = 12  # digits of a digest in a table


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelCopy:
    """Wheels that went to a node, and how fast."""

    node: str
    wheels: int
    sent: Copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What an installation came to, node by node; ``before`` is what each node had."""

    copies: tuple[WheelCopy, ...]
    before: tuple[InstallState, ...]
    made: tuple[InstalledVenv, ...]


def install_everywhere(
    cluster: Cluster, folder: Path, lock: WheelLock, report: Report
) -> Installed:
    """Copy what nodes lack, make the environment on each, and switch to it once all are equal.

    Raises what stands in the way of any node before a byte is copied; HostError if they differ.
    """
    sent = asdict(lock)

    def copy(entry: tuple[Remote, InstallState]) -> WheelCopy | None:
        node, state = entry
        if not state.lacking:
            return None
        bar = report(f"{node.destination}: copying")
        way = node.destination, state.store
        took = send_files(Remote(HERE), [folder / name for name in state.lacking], *way, bar)
        return WheelCopy(node=node.destination, wheels=len(state.lacking), sent=took)

    def make(node: Remote) -> InstalledVenv:
        progress = report(f"{node.destination}: installing")
        return node.follow(InstalledVenv, progress, installation.install_wheels, lock=sent)

    with cluster.alone():
        look, asked = installation.look_at_installation, {"venv": cluster.file.venv, "lock": sent}
        found = everywhere(cluster.nodes, lambda node: node.call(InstallState, look, **asked))
        states = all_of(found)
        copies = all_of(everywhere(list(zip(cluster.nodes, states, strict=True)), copy))
        made = all_of(everywhere(cluster.nodes, make))
        _check_equal(cluster, [_describe(venv) for venv in made], "patchkit verify")
        switch, place = installation.switch_link, {"venv": cluster.file.venv, "name": lock.id}
        all_of(everywhere(cluster.nodes, lambda node: node.call(str, switch, **place)))
    done = tuple(copy for copy in copies if copy)
    return Installed(copies=done, before=tuple(states), made=tuple(made))


def send_files(
    source: Remote, files: Sequence[Path], destination: str, target: str, progress: Progress
) -> Copied:
    """Send files from one node to a folder of another one, which is reached from there so."""
    if destination == HERE and not source.here:
        what = f"{source.destination} does not reach this machine by the name {HERE}"
        raise UsageError(what, hint='give it another name in cluster.toml: peer = "user@host"')
    words = () if destination == HERE else ssh_words(destination, "-o", "ControlMaster=no")
    return source.follow(
        Copied,
        progress,
        installation.send_wheels,
        folder=str(files[0].parent),
        names=[file.name for file in files],
        ssh=words[:-2],
        destination="" if destination == HERE else destination,
        target=target,
    )


def _describe(venv: InstalledVenv) -> dict[str, str]:
    return {
        "python": venv.python,
        "files": venv.record[:_SHOWN],
        "libnccl": f"{venv.nccl} {venv.nccl_version} {venv.nccl_sha256[:_SHOWN]}",
        **venv.versions,
    }


def _check_equal(cluster: Cluster, found: Sequence[Mapping[str, str]], hint: str) -> None:
    """Raise HostError with a line for each thing that is not the same everywhere."""
    lines = []
    for name in sorted({name for its in found for name in its}):
        values = [its.get(name, "none") for its in found]
        if len(set(values)) > 1:
            nodes = (node.destination for node in cluster.nodes)
            pairs = zip(nodes, values, strict=True)
            lines.append(f"  {name}: " + ", ".join(f"{value} on {node}" for node, value in pairs))
    if lines:
        what = "what is installed differs from node to node, and nothing was switched:"
        raise HostError(
            "\n".join([what, *lines]), why="one rank would not do what the other does", hint=hint
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BroughtImage:
    """An image on a node: whether it was pulled there, or ``sent``; neither if it was there."""

    node: str
    image: HeldImage
    pulled: bool = False
    sent: Copied | None = None


def resolve_image(cluster: Cluster, layers: Report) -> str:
    """Return the cluster's image by a digest; one without is asked for once, on the head.

    It is the registry's, else the id of the image that the head has. Raises what a pull raises.
    """
    serve, head = cluster.file.serve, cluster.head
    if serve.local_image:
        return serve.image
    asked: dict[str, Any] = {"engine": serve.engine, "names": [serve.image]}
    head.call(HeldImage, images.hold_image, **asked)  # whether the engine works
    bar = layers(f"{head.destination}: pulling")
    try:
        held = head.follow(HeldImage, bar, images.pull_image, reference=serve.image, **asked)
    except HostError:
        if not (held := head.call(HeldImage, images.hold_image, **asked)).id:
            raise
    bare = _bare_name(serve.image)
    named = (digest.partition("@sha256:") for digest in held.digests)
    known = {name.removeprefix("docker.io/"): pin for name, _, pin in named}
    pin = known.get(bare.removeprefix("docker.io/")) or known.get(f"library/{bare}") or held.id
    pin = held.id if bare.startswith("localhost/") else pin  # podman gives those a digest, too
    return f"{serve.image}@sha256:{pin}"


def install_image(cluster: Cluster, report: Report, layers: Report) -> list[BroughtImage]:
    """Bring the pinned image to every node, and give it the name by which `up` finds it.

    It is pulled by its digest; where that fails, it is copied from a node that has it. Raises what
    stands in the way of any node; HostError if nodes have different ones.
    """
    serve, nodes = cluster.file.serve, cluster.nodes
    engine, pin = serve.engine, serve.image.partition("@sha256:")[2]
    reference = f"{_bare_name(serve.image)}@sha256:{pin}"
    asked: dict[str, Any] = {"engine": engine}
    asked["names"] = [serve.local_image, reference, f"sha256:{pin}"]

    def pull(number: int) -> BroughtImage:
        name = nodes[number].destination
        if local:
            raise HostError(
                f"{name}: {serve.image} is not there, nor in a registry",
                why="it was built on a node, and is gone there",
                hint="name the one that it was built from in cluster.toml, then install again",
            )
        bar, way = layers(f"{name}: pulling"), images.pull_image
        its = nodes[number].follow(HeldImage, bar, way, reference=reference, **asked)
        return BroughtImage(node=name, image=its, pulled=True)

    def tag(number: int) -> str:
        named = {"image": found[number].image.id, "tag": serve.local_image}
        return nodes[number].call(str, images.tag_image, engine=engine, **named)

    with cluster.alone():
        look = images.hold_image
        held = all_of(everywhere(nodes, lambda node: node.call(HeldImage, look, **asked)))
        local = reference.startswith("localhost/") or pin in {its.id for its in held}
        found = {
            number: BroughtImage(node=nodes[number].destination, image=its)
            for number, its in enumerate(held)
            if its.id
        }
        lacking = [number for number in range(len(nodes)) if number not in found]
        pulled = everywhere(lacking, pull)
        answers = zip(lacking, pulled, strict=True)
        found |= {number: its for number, its in answers if isinstance(its, BroughtImage)}
        if not found:
            all_of(pulled)
        found |= _copy_image(cluster, found, held, report)
        rows = [{"image": found[number].image.content[:_SHOWN]} for number in range(len(nodes))]
        _check_equal(cluster, rows, f"on the one that is wrong: {engine} image rm {reference}")
        all_of(everywhere(range(len(nodes)), tag))
    return [found[number] for number in range(len(nodes))]


def _copy_image(
    cluster: Cluster,
    found: Mapping[int, BroughtImage],
    held: Sequence[HeldImage],
    report: Report,
) -> dict[int, BroughtImage]:
    """Save the image on the first node that has it, send it to those without, and load it there."""
    if not (missing := [number for number in range(len(held)) if number not in found]):
        return {}
    source, image = cluster.nodes[min(found)], found[min(found)].image
    own = {"engine": cluster.file.serve.engine, "image": image.id}
    bar = report(f"{source.destination}: saving")
    archive = Path(source.follow(str, bar, images.save_image, size=image.size, **own))

    def copy(number: int) -> BroughtImage:
        node, peer = cluster.nodes[number], cluster.file.node[number].from_head
        asked = {"engine": own["engine"], "root": held[number].root, "size": image.size}
        target = node.call(str, images.make_image_room, **asked)
        sent = send_files(source, [archive], peer, target, report(f"{node.destination}: copying"))
        bar, place = report(f"{node.destination}: loading"), f"{target}/{archive.name}"
        its = node.follow(HeldImage, bar, images.load_image, archive=place, **own)
        return BroughtImage(node=node.destination, image=its, sent=sent)

    return dict(zip(missing, all_of(everywhere(missing, copy)), strict=True))


def _bare_name(image: str) -> str:
    """Return an image's name without tag and digest, which not every engine takes together."""
    place, slash, name = image.partition("@")[0].rpartition("/")
    return place + slash + name.partition(":")[0]
