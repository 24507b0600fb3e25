"""Install the same wheels, or the same image, on every node; all use it once all are equal."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import NoneType

from patchkit.cluster.agent import image_facts, images, installation
from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.installation import InstalledVenv, InstallState, WheelLock
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ServeChoices
from patchkit.cluster.launch.survey import image_finding
from patchkit.cluster.ssh.node import Remote, check_peer, require_all, run_on_all
from patchkit.cluster.ssh.rsync import Copied
from patchkit.cluster.ssh.ssh import HERE, ssh_words
from patchkit.errors import HostError, PatchkitError
from patchkit.frozen import frozen
from patchkit.quoting import quoted
from patchkit.runtime.host.host import OTHER, Gpu

Progress = Callable[[int, int], None]
Report = Callable[[str], Progress]
"""Takes the name of a task; returns the function that takes its progress."""

_SHOWN = 12  # digits of a digest in a table
_DIGEST = re.compile("([^@]+)@sha256:([0-9a-f]{64})")


@frozen
class BroughtVenv:
    """The environment that a node has now: its state ``before``, and the files that were ``sent``.

    ``note`` says that the wheels were made for another device, "" for those of its own.
    """

    node: str
    before: InstallState
    venv: InstalledVenv
    sent: Copied | None
    note: str = ""


def install_everywhere(
    cluster: Cluster,
    folder: Path,
    lock: WheelLock,
    report: Report,
) -> list[BroughtVenv]:
    """Copy the wheels that nodes lack, make the environment on each, and switch all to it.

    Raises an obstacle of any node before a byte is copied; HostError if the environments differ.
    """
    venv = cluster.file.venv
    fields = asdict(lock)

    def look(node: Remote) -> InstallState:
        return node.call(
            InstallState,
            installation.look_at_installation,
            venv=venv,
            lock=fields,
        )

    def bring(pair: tuple[Remote, InstallState]) -> BroughtVenv:
        node, before = pair
        name = node.destination
        sent = None
        if before.lacking:
            files = [folder / wheel for wheel in before.lacking]
            bar = report(f"{name}: copying")
            sent = send_files(Remote(HERE), files, name, before.store, bar)

        bar = report(f"{name}: installing")
        installed = node.follow(
            InstalledVenv, bar, installation.install_wheels, lock=fields
        )

        note = device_note(lock, before.gpu)
        return BroughtVenv(
            node=name, before=before, venv=installed, sent=sent, note=note
        )

    def switch(node: Remote) -> None:
        node.call(
            NoneType,
            installation.switch_link,
            venv=venv,
            name=lock.id,
        )

    with cluster.alone():
        states = require_all(run_on_all(cluster.nodes, look))
        pairs = list(zip(cluster.nodes, states, strict=True))
        require_devices(lock, {node.destination: state.gpu for node, state in pairs})
        brought = require_all(run_on_all(pairs, bring))

        contents = [_describe(result.venv) for result in brought]
        _check_equal(cluster, contents, "patchkit verify")
        require_all(run_on_all(cluster.nodes, switch))
    return brought


def device_note(lock: WheelLock, gpu: Gpu | None) -> str:
    """Return that wheels were made for another device than a node's; "" if nobody can say so."""
    if gpu is None or not lock.target or gpu.target == lock.target:
        return ""
    return f"{gpu.name} ({gpu.capability}) is no {lock.target}, for which the wheels were made"


def require_devices(lock: WheelLock, devices: Mapping[str, Gpu | None]) -> None:
    """Raise HostError for nodes with another device than the one of native wheels."""
    notes = {node: device_note(lock, gpu) for node, gpu in devices.items()}
    wrong = [f"{node}: {note}" for node, note in notes.items() if note]
    if not (lock.native and wrong):
        return

    targets = {gpu.target for gpu in devices.values() if gpu}
    raise HostError(
        "\n".join(wrong),
        why="wheels made with --native hold code for their own device alone",
        hint=_repack_hint(lock, targets),
    )


def _repack_hint(lock: WheelLock, targets: Collection[str]) -> str:
    """Return the commands for a new wheelhouse: native for a single device, else for all."""
    house = "wheelhouse-any"
    options: tuple[str, ...] = ()
    if len(targets) == 1 and OTHER not in targets:
        (target,) = targets
        house = f"wheelhouse-{target}"
        options = ("--native", "--target", target)

    release = "X"
    for wheel in lock.wheels:
        parts = wheel.name.split("-")
        if parts[0] == "vllm":
            release = parts[1].partition("+")[0]
            break

    repack = quoted("patchkit", "repack", f"vllm=={release}", *options, "--dir", house)
    fill = quoted("patchkit", "wheelhouse", "fill", "--dir", house)
    return f"{repack} && {fill}, then install with `--wheelhouse {house}`"


def send_files(
    source: Remote,
    files: Sequence[Path],
    destination: str,
    target: str,
    progress: Progress,
) -> Copied:
    """Send files from one node to a folder of another node, by the name that it has there."""
    check_peer(source, destination)
    ssh: tuple[str, ...] = ()
    if destination != HERE:
        ssh = ssh_words(destination, "-o", "ControlMaster=no")[:-2]

    return source.follow(
        Copied,
        progress,
        installation.send_wheels,
        folder=str(files[0].parent),
        names=[file.name for file in files],
        ssh=ssh,
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
    cluster: Cluster,
    contents: Sequence[Mapping[str, str]],
    hint: str,
) -> None:
    """Raise HostError with a line for each part of the contents that differs between nodes."""
    lines = []
    for name in sorted(set[str]().union(*contents)):
        values = [content.get(name, "none") for content in contents]
        if len(set(values)) > 1:
            pairs = zip(values, cluster.nodes, strict=True)
            texts = [f"{value} on {node.destination}" for value, node in pairs]
            lines.append(f"  {name}: {', '.join(texts)}")
    if not lines:
        return

    what = "what is installed differs from node to node, and nothing was switched:"
    raise HostError(
        "\n".join([what, *lines]),
        why="one rank would not do what the other does",
        hint=hint,
    )


@frozen
class BroughtImage:
    """An image on a node: it was ``pulled`` there, or ``sent``, or was there before."""

    node: str
    image: ImageFacts
    pulled: bool = False
    sent: Copied | None = None


def find_images(cluster: Cluster, nodes: Sequence[Remote]) -> list[ImageFacts]:
    """Return the cluster's image on nodes. Raises HostError for an engine that fails."""
    query = cluster.file.serve.image_asked

    def look(node: Remote) -> ImageFacts:
        image = node.call(ImageFacts, image_facts.find_image, **query)
        if image.problem == "image-missing":
            return image
        return require_image(node, image)

    return require_all(run_on_all(nodes, look))


def require_image(node: Remote, image: ImageFacts) -> ImageFacts:
    """Return the image of a node. Raises HostError with its problem, if any."""
    if not image.problem:
        return image

    finding = image_finding(node.destination, image)
    what = f"{finding.where}: {finding.what}"
    raise finding.kind(
        what,
        why=finding.why,
        hint=finding.hint,
    )


def resolve_image(cluster: Cluster, report: Report) -> str:
    """Return the cluster's image by a digest; one without is asked for once, on the head.

    The digest is the registry's, else the id of the image that the head has. Raises what a pull
    raises.
    """
    serve = cluster.file.serve
    if serve.local_image:
        return serve.image

    (image,) = find_images(cluster, [cluster.head])
    try:
        image = _pull_image(cluster, cluster.head, serve.image, report)
    except HostError:
        if not image.id:
            raise

    return f"{serve.image}@sha256:{_find_pin(serve, image)}"


def _find_pin(serve: ServeChoices, image: ImageFacts) -> str:
    """Return the digest of an image in its registry; its id if it has none."""
    # podman gives images of localhost a digest, too, which no registry knows.
    if not serve.image.startswith("localhost/"):
        for digest in reversed(image.digests):
            parts = _DIGEST.fullmatch(digest)
            if parts and _short_name(parts[1]) == _short_name(serve.reference):
                return parts[2]
    return image.digits


def _pull_image(
    cluster: Cluster,
    node: Remote,
    reference: str,
    report: Report,
) -> ImageFacts:

    image = node.follow(
        ImageFacts,
        report(f"{node.destination}: pulling"),
        images.pull_image,
        **cluster.file.serve.image_asked,
        reference=reference,
    )
    return require_image(node, image)


def _short_name(name: str) -> str:
    return name.removeprefix("docker.io/").removeprefix("library/")


def install_image(cluster: Cluster, report: Report) -> list[BroughtImage]:
    """Bring the pinned image to every node, and give it the name by which `up` finds it.

    It is pulled by its digest; where that fails, it is copied from a node that has it. Raises an
    obstacle of any node; HostError if nodes have different images.
    """
    serve = cluster.file.serve
    pin = serve.image.partition("@sha256:")[2]

    def bring(pair: tuple[Remote, ImageFacts]) -> BroughtImage:
        node, image = pair
        name = node.destination

        # An image found by its tag alone counts unless the content of the pin is known and another.
        if image.id and content in ("", image.content):
            return BroughtImage(node=name, image=image)
        if is_local:
            raise HostError(
                f"{name}: {serve.image} is not there, nor in a registry",
                why="it was built on a node, and is gone there",
                hint="name the one that it was built from in cluster.toml, then install again",
            )

        image = _pull_image(cluster, node, serve.reference, report)
        return BroughtImage(
            node=name,
            image=image,
            pulled=True,
        )

    def tag(brought: BroughtImage) -> None:
        Remote(brought.node).call(
            NoneType,
            images.tag_image,
            engine=serve.engine,
            image=brought.image.digits,
            tag=serve.local_image,
        )

    with cluster.alone():
        present = find_images(cluster, cluster.nodes)
        pinned = (image for image in present if image.id and not image.by_tag)
        content = next((image.content for image in pinned), "")
        is_built = pin in {image.digits for image in present}
        is_local = is_built or serve.reference.startswith("localhost/")

        pairs = list(zip(cluster.nodes, present, strict=True))
        results = run_on_all(pairs, bring)
        brought = _copy_image(cluster, results, present, report)

        rows = [{"image": result.image.content[:_SHOWN]} for result in brought]
        untag = quoted(serve.engine, "image", "rm", serve.local_image)
        hint = f"on the node with the wrong one `{untag}`, then install again"
        _check_equal(cluster, rows, hint)
        require_all(run_on_all(brought, tag))
    return brought


def _copy_image(
    cluster: Cluster,
    results: Sequence[BroughtImage | PatchkitError],
    present: Sequence[ImageFacts],
    report: Report,
) -> list[BroughtImage]:
    """Send the image of the first node that has it to those without, and load it there.

    Raises the error of a node if none has it.
    """
    holders = [result for result in results if isinstance(result, BroughtImage)]
    if not holders or len(holders) == len(results):
        return require_all(results)

    source = Remote(holders[0].node)
    image = holders[0].image.digits
    size = holders[0].image.size
    engine = cluster.file.serve.engine

    bar = report(f"{source.destination}: saving")
    archive = Path(
        source.follow(
            str, bar, images.save_image, engine=engine, image=image, size=size
        )
    )

    def copy(number: int) -> BroughtImage:
        node = cluster.nodes[number]
        name = node.destination
        peer = cluster.file.node[number].from_head
        root = present[number].storage.folder
        folder = node.call(
            str,
            images.make_image_room,
            engine=engine,
            root=root,
            size=size,
        )

        bar = report(f"{name}: copying")
        sent = send_files(source, [archive], peer, folder, bar)

        loaded = node.follow(
            ImageFacts,
            report(f"{name}: loading"),
            images.load_image,
            engine=engine,
            archive=f"{folder}/{archive.name}",
            image=image,
        )
        return BroughtImage(
            node=name,
            image=require_image(node, loaded),
            sent=sent,
        )

    missing = [
        number
        for number, result in enumerate(results)
        if isinstance(result, PatchkitError)
    ]

    copies = dict(zip(missing, run_on_all(missing, copy), strict=True))
    return require_all(
        [copies.get(number, result) for number, result in enumerate(results)]
    )
