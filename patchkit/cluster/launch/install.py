"""Install the same wheels, or the same image, on every node; all use it once all are equal."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType

from patchkit.cluster.agent import image_facts, images, installation
from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.installation import InstalledVenv, InstallState, WheelLock
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.survey import image_finding
from patchkit.cluster.ssh.node import Remote, check_peer, require_all, run_on_all
from patchkit.cluster.ssh.rsync import Copied
from patchkit.cluster.ssh.ssh import HERE, ssh_words
from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted
from patchkit.runtime.host.host import OTHER, Gpu

Progress = Callable[[int, int], None]
Report = Callable[[str], Progress]
"""Takes a task; returns what takes its progress."""

_SHOWN = 12  # digits of a digest in a table
_DIGEST = re.compile("([^@]+)@sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class BroughtVenv:
    """What an installation came to on a node: what it had ``before``, and what was ``sent``.

    ``note`` says that the wheels were made for another device, "" for those of its own.
    """

    node: str
    before: InstallState
    venv: InstalledVenv
    sent: Copied | None
    note: str = ""


def install_everywhere(
    cluster: Cluster, folder: Path, lock: WheelLock, report: Report
) -> list[BroughtVenv]:
    """Copy what nodes lack, make the environment on each, and switch to it once all are equal.

    Raises what stands in the way of any node before a byte is copied; HostError if they differ.
    """
    nodes, wheels = cluster.nodes, {"lock": asdict(lock)}

    def bring(entry: tuple[Remote, InstallState]) -> BroughtVenv:
        node, before = entry
        name, sent = node.destination, None
        if lacking := [folder / wheel for wheel in before.lacking]:
            bar = report(f"{name}: copying")
            sent = send_files(Remote(HERE), lacking, name, before.store, bar)
        bar = report(f"{name}: installing")
        venv = node.follow(InstalledVenv, bar, installation.install_wheels, **wheels)
        note = device_note(lock, before.gpu)
        return BroughtVenv(node=name, before=before, venv=venv, sent=sent, note=note)

    with cluster.alone():
        look, asked = (
            installation.look_at_installation,
            {"venv": cluster.file.venv, **wheels},
        )
        states = require_all(
            run_on_all(nodes, lambda node: node.call(InstallState, look, **asked))
        )
        devices = {
            node.destination: state.gpu
            for node, state in zip(nodes, states, strict=True)
        }
        require_devices(lock, devices)
        brought = require_all(run_on_all(list(zip(nodes, states, strict=True)), bring))
        _check_equal(
            cluster, [_describe(its.venv) for its in brought], "patchkit verify"
        )
        switch, place = (
            installation.switch_link,
            {"venv": cluster.file.venv, "name": lock.id},
        )
        require_all(
            run_on_all(nodes, lambda node: node.call(NoneType, switch, **place))
        )
    return brought


def device_note(lock: WheelLock, gpu: Gpu | None) -> str:
    """Return that wheels were made for another device than a node's; "" if nobody can say so."""
    if gpu is None or not lock.target or gpu.target == lock.target:
        return ""
    return f"{gpu.name} ({gpu.capability}) is no {lock.target}, for which the wheels were made"


def require_devices(lock: WheelLock, devices: Mapping[str, Gpu | None]) -> None:
    """Raise HostError for nodes whose GPU native wheels hold no code for."""
    notes = {node: device_note(lock, gpu) for node, gpu in devices.items()}
    wrong = [f"{node}: {note}" for node, note in notes.items() if note]
    if not (lock.native and wrong):
        return

    raise HostError(
        "\n".join(wrong),
        why="wheels made with --native hold code for their own device alone",
        hint=_repack_hint(lock, {gpu.target for gpu in devices.values() if gpu}),
    )


def _repack_hint(lock: WheelLock, kinds: Collection[str]) -> str:
    """Return what makes a wheelhouse for devices: native for a single kind, else for all."""
    house = "wheelhouse-any"
    options: tuple[str, ...] = ()
    if len(kinds) == 1 and OTHER not in kinds:
        (target,) = kinds
        house = f"wheelhouse-{target}"
        options = ("--native", "--target", target)
    names = [wheel.name.split("-") for wheel in lock.wheels]
    releases = [name[1].partition("+")[0] for name in names if name[0] == "vllm"]
    spec = f"vllm=={releases[0]}" if releases else "vllm==X"
    repack = quoted("patchkit", "repack", spec, *options, "--dir", house)
    fill = quoted("patchkit", "wheelhouse", "fill", "--dir", house)
    return f"{repack} && {fill}, then install with `--wheelhouse {house}`"


def send_files(
    source: Remote,
    files: Sequence[Path],
    destination: str,
    target: str,
    progress: Progress,
) -> Copied:
    """Send files from one node to a folder of another one, which is reached from there so."""
    check_peer(source, destination)
    words = (
        () if destination == HERE else ssh_words(destination, "-o", "ControlMaster=no")
    )
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


def _check_equal(
    cluster: Cluster, found: Sequence[Mapping[str, str]], hint: str
) -> None:
    """Raise HostError with a line for each thing that is not the same everywhere."""
    lines = []
    for name in sorted({name for its in found for name in its}):
        values = [its.get(name, "none") for its in found]
        if len(set(values)) > 1:
            nodes = (node.destination for node in cluster.nodes)
            pairs = zip(nodes, values, strict=True)
            lines.append(
                f"  {name}: " + ", ".join(f"{value} on {node}" for node, value in pairs)
            )
    if lines:
        what = "what is installed differs from node to node, and nothing was switched:"
        raise HostError(
            "\n".join([what, *lines]),
            why="one rank would not do what the other does",
            hint=hint,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BroughtImage:
    """An image on a node: whether it was pulled there, or ``sent``; neither if it was there."""

    node: str
    image: ImageFacts
    pulled: bool = False
    sent: Copied | None = None


def find_images(cluster: Cluster, nodes: Sequence[Remote]) -> list[ImageFacts]:
    """Return what nodes have of the cluster's image. Raises HostError for an engine that fails."""

    def look(node: Remote) -> ImageFacts:
        found = node.call(
            ImageFacts, image_facts.find_image, **cluster.file.serve.image_asked
        )
        return found if found.problem == "image-missing" else well_image(node, found)

    return require_all(run_on_all(nodes, look))


def well_image(node: Remote, image: ImageFacts) -> ImageFacts:
    """Return what a node has. Raises HostError with its problem, if any."""
    if image.problem:
        wrong = image_finding(node.destination, image)
        raise wrong.kind(f"{wrong.where}: {wrong.what}", why=wrong.why, hint=wrong.hint)
    return image


def resolve_image(cluster: Cluster, report: Report) -> str:
    """Return the cluster's image by a digest; one without is asked for once, on the head.

    It is the registry's, else the id of the image that the head has. Raises what a pull raises.
    """
    serve, head = cluster.file.serve, cluster.head
    if serve.local_image:
        return serve.image
    (held,) = find_images(cluster, [head])
    try:
        held = _pull_image(cluster, head, serve.image, report)
    except HostError:
        if not held.id:
            raise
    if serve.image.startswith("localhost/"):  # podman gives those a digest, too
        return f"{serve.image}@sha256:{held.digits}"
    named = (_DIGEST.fullmatch(digest) for digest in held.digests)
    known = {_short_name(its[1]): its[2] for its in named if its}
    return (
        f"{serve.image}@sha256:{known.get(_short_name(serve.reference), held.digits)}"
    )


def _pull_image(
    cluster: Cluster, node: Remote, reference: str, report: Report
) -> ImageFacts:
    asked = {**cluster.file.serve.image_asked, "reference": reference}
    bar = report(f"{node.destination}: pulling")
    return well_image(node, node.follow(ImageFacts, bar, images.pull_image, **asked))


def _short_name(name: str) -> str:
    return name.removeprefix("docker.io/").removeprefix("library/")


def install_image(cluster: Cluster, report: Report) -> list[BroughtImage]:
    """Bring the pinned image to every node, and give it the name by which `up` finds it.

    It is pulled by its digest; where that fails, it is copied from a node that has it. Raises what
    stands in the way of any node; HostError if nodes have different ones.
    """
    serve, nodes = cluster.file.serve, cluster.nodes
    reference, pin = serve.reference, serve.image.partition("@sha256:")[2]

    def bring(pair: tuple[Remote, ImageFacts]) -> BroughtImage:
        node, image = pair
        name = node.destination
        # One that has the tag alone counts unless it is another one than where the pin is known.
        if image.id and (not right or image.content == right):
            return BroughtImage(node=name, image=image)
        if local:
            raise HostError(
                f"{name}: {serve.image} is not there, nor in a registry",
                why="it was built on a node, and is gone there",
                hint="name the one that it was built from in cluster.toml, then install again",
            )
        image = _pull_image(cluster, node, reference, report)
        return BroughtImage(node=name, image=image, pulled=True)

    def tag(its: BroughtImage) -> None:
        named = {"image": its.image.digits, "tag": serve.local_image}
        Remote(its.node).call(NoneType, images.tag_image, engine=serve.engine, **named)

    with cluster.alone():
        held = find_images(cluster, nodes)
        right = next(
            (image.content for image in held if image.id and not image.by_tag), ""
        )
        local = reference.startswith("localhost/") or pin in {
            its.digits for its in held
        }
        found = run_on_all(list(zip(nodes, held, strict=True)), bring)
        if not any(isinstance(its, BroughtImage) for its in found):
            require_all(found)
        brought = _copy_image(cluster, found, held, report)
        rows = [{"image": its.image.content[:_SHOWN]} for its in brought]
        untag = quoted(serve.engine, "image", "rm", serve.local_image)
        _check_equal(
            cluster,
            rows,
            f"on the node with the wrong one `{untag}`, then install again",
        )
        require_all(run_on_all(brought, tag))
    return brought


def _copy_image(
    cluster: Cluster,
    found: Sequence[BroughtImage | PatchkitError],
    held: Sequence[ImageFacts],
    report: Report,
) -> list[BroughtImage]:
    """Send the image of the first node that has it to those without, and load it there."""
    missing = [
        number for number, its in enumerate(found) if isinstance(its, PatchkitError)
    ]
    first = next(its for its in found if isinstance(its, BroughtImage))
    if not missing:
        return require_all(found)
    source, image, size = Remote(first.node), first.image.digits, first.image.size
    own, bar = {"engine": cluster.file.serve.engine}, report(f"{first.node}: saving")
    archive = Path(
        source.follow(str, bar, images.save_image, image=image, size=size, **own)
    )

    def copy(number: int) -> BroughtImage:
        node, peer = cluster.nodes[number], cluster.file.node[number].from_head
        room = {"root": held[number].storage.folder, "size": size, **own}
        target = node.call(str, images.make_image_room, **room)
        sent = send_files(
            source, [archive], peer, target, report(f"{node.destination}: copying")
        )
        bar, place = report(f"{node.destination}: loading"), f"{target}/{archive.name}"
        its = node.follow(
            ImageFacts, bar, images.load_image, archive=place, image=image, **own
        )
        return BroughtImage(
            node=node.destination, image=well_image(node, its), sent=sent
        )

    copies = dict(zip(missing, run_on_all(missing, copy), strict=True))
    return require_all([copies.get(number, its) for number, its in enumerate(found)])
