"""Install the same wheels, or the same image, on every node; switch to it once all are equal.

vLLM and FlashInfer of an image can be patched first, in a layer over it that has no patchkit.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import NoneType

import patchkit
from patchkit.cluster.agent import image_facts, installation
from patchkit.cluster.agent.image_facts import ImageContents, ImageFacts
from patchkit.cluster.agent.installation import (
    BuiltImage,
    InstalledVenv,
    InstallState,
    WheelLock,
)
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterNode, ServeChoices
from patchkit.cluster.launch.survey import image_finding
from patchkit.cluster.ssh.node import (
    Copied,
    Progress,
    Remote,
    require_all,
    run_on_all,
    send_files,
)
from patchkit.cluster.ssh.ssh import HERE
from patchkit.digests import digest, tree_digest
from patchkit.errors import HostError, PatchkitError, UsageError, translated
from patchkit.frozen import Values, frozen
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Gpu, Software
from patchkit.target import targets

Report = Callable[[str], Progress]
"""A function that gets the name of a task and returns the callback for its progress."""

_SHOWN = 12  # digits of a digest in a table
_DIGEST = re.compile("([^@]+)@sha256:([0-9a-f]{64})")


@frozen
class BroughtVenv:
    """The environment that a node has now; ``before`` is the node's state before that.

    ``sent`` is what was copied there, None if no wheel was missing. ``note`` says that the wheels
    were made for another device than the node's, "" if they were not.
    """

    node: str
    before: InstallState
    venv: InstalledVenv
    sent: Copied | None
    note: str


def install_everywhere(
    cluster: Cluster,
    folder: Path,
    lock: WheelLock,
    report: Report,
) -> list[BroughtVenv]:
    """Copy the wheels that nodes lack, make the environment on each, and switch all to it.

    ``folder`` has the wheels of the lock, here. An obstacle on any node is raised before a byte is
    copied. Raises BusyError while another patchkit changes the cluster; HostError, before any node
    is switched, if the environments differ.
    """
    venv = cluster.venv
    fields = asdict(lock)

    def look(node: Remote) -> InstallState:
        return node.call(
            InstallState,
            installation.look_at_installation,
            venv=venv,
            lock=fields,
        )

    def bring(node: Remote, before: InstallState) -> BroughtVenv:
        name = node.destination
        sent = None
        if before.lacking:
            bar = report(f"{name}: copying")
            sent = send_files(
                Remote(HERE), str(folder), before.lacking, name, before.store, bar
            )

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
        names = [node.destination for node in cluster.nodes]
        gpus = [state.gpu for state in states]
        require_devices(lock, dict(zip(names, gpus, strict=True)))
        brought = require_all(run_on_all(cluster.nodes, bring, states))

        contents = [_describe(result.venv) for result in brought]
        _check_equal(cluster, contents, "patchkit verify")
        require_all(run_on_all(cluster.nodes, switch))
    return brought


def device_note(lock: WheelLock, gpu: Gpu | None) -> str:
    """Return the words for wheels that were made for another device than a node's.

    Returns "" if they were made for it, or if the device or that of the wheels is not known.
    """
    if gpu is None or not lock.target or gpu.target == lock.target:
        return ""
    return f"{gpu.name} ({gpu.capability}) is no {lock.target}, for which the wheels were made"


def require_devices(lock: WheelLock, devices: Mapping[str, Gpu | None]) -> None:
    """Raise HostError if the wheels are native, and a node has another device than they are for.

    ``devices`` has each node's GPU by the node's name, None if it is not known.
    """
    notes = {node: device_note(lock, gpu) for node, gpu in devices.items()}
    wrong = [f"{node}: {note}" for node, note in notes.items() if note]
    if not (lock.native and wrong):
        return

    house = "wheelhouse-any"
    words = [("repack", release) for release in lock.native]
    words.append(("wheelhouse", "fill"))
    commands = [quoted("patchkit", *verb, "--dir", house) for verb in words]
    raise HostError(
        "\n".join(wrong),
        why="wheels made with --native hold code for their own device alone",
        hint=f"{' && '.join(commands)}, then install with `--wheelhouse {house}`",
    )


def _describe(venv: InstalledVenv) -> Values:
    """Return the values that must be equal on all nodes, by name."""
    return {
        "python": venv.python,
        "files": venv.record[:_SHOWN],
        "libnccl": f"{venv.nccl} {venv.nccl_version} {venv.nccl_sha256[:_SHOWN]}",
        **venv.versions,
    }


def _check_equal(
    cluster: Cluster,
    contents: Sequence[Values],
    hint: str,
) -> None:
    """Raise HostError with a line for each value that differs between nodes.

    ``contents`` has the values of each node, by name, in the order of the nodes.
    """
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
    """The image that a node has now: ``pulled`` by it, ``sent`` to it, or neither: it was there."""

    node: str
    image: ImageFacts
    pulled: bool = False
    sent: Copied | None = None


def find_images(cluster: Cluster, nodes: Sequence[Remote]) -> list[ImageFacts]:
    """Return the facts of the cluster's image on each of the nodes, also where it is missing.

    Raises HostError for any other problem of an engine or an image.
    """
    arguments = cluster.serve.image_asked

    def look(node: Remote) -> ImageFacts:
        image = node.call(ImageFacts, image_facts.find_image, **arguments)
        if image.problem == "image-missing":
            return image
        return require_image(node, image)

    return require_all(run_on_all(nodes, look))


def require_image(node: Remote, image: ImageFacts) -> ImageFacts:
    """Return ``image``, the facts of a node's image, if they name no problem.

    Raises StorageError for a full disk, HostError for any other problem.
    """
    if not image.problem:
        return image

    raise image_finding(node.destination, image).located_error()


def resolve_image(cluster: Cluster, report: Report) -> str:
    """Return the cluster's image as NAME@sha256:HEX.

    An image that cluster.toml does not pin is pulled on the head, and pinned by its digest in the
    registry. If the pull fails, an image that the head has is pinned by its id. Raises the error
    of the pull if the head has none.
    """
    serve = cluster.serve
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
    """Return the hex digits that pin an image: its digest in its registry, else its id."""
    # podman gives images of localhost a digest as well, which no registry knows.
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
    """Pull an image on a node; return its facts. Raises HostError."""
    image = node.follow(
        ImageFacts,
        report(f"{node.destination}: pulling"),
        installation.pull_image,
        **cluster.serve.image_asked,
        reference=reference,
    )
    return require_image(node, image)


def _short_name(name: str) -> str:
    """Return an image's name without what Docker adds to it by default."""
    return name.removeprefix("docker.io/").removeprefix("library/")


def install_image(cluster: Cluster, report: Report) -> list[BroughtImage]:
    """Bring the pinned image to every node, and give it the name by which `up` finds it.

    A node without the image pulls it by its digest; if that fails, the image is copied from a node
    that has it. Raises BusyError while another patchkit changes the cluster, HostError if an
    engine fails, if no node has or gets the image, or if nodes have different images.
    """
    serve = cluster.serve
    pin = serve.image.partition("@sha256:")[2]

    def bring(node: Remote, image: ImageFacts) -> BroughtImage:
        name = node.destination

        # ``content`` is "" if no node has the image by its pin. Then an image that was found by
        # its tag alone is taken for the pinned one.
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
            installation.tag_image,
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

        results = run_on_all(cluster.nodes, bring, present)
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
    """Send the image from the first node that has it to the nodes without, and load it there.

    ``results`` has for each node its image, or the error of its pull; ``present`` are the facts
    before. Returns the images of all nodes. Raises the first error if no node has the image.
    """
    holders = [result for result in results if isinstance(result, BroughtImage)]
    if not holders or len(holders) == len(results):
        return require_all(results)

    source = Remote(holders[0].node)
    image = holders[0].image.digits
    size = holders[0].image.size
    engine = cluster.serve.engine

    bar = report(f"{source.destination}: saving")
    archive = Path(
        source.follow(
            str, bar, installation.save_image, engine=engine, image=image, size=size
        )
    )

    def copy(
        member: ClusterNode,
        result: BroughtImage | PatchkitError,
        before: ImageFacts,
    ) -> BroughtImage:
        if isinstance(result, BroughtImage):
            return result

        node = Remote(member.ssh)
        folder = node.call(
            str,
            installation.make_image_room,
            engine=engine,
            root=before.storage.folder,
            size=size,
        )

        bar = report(f"{member.ssh}: copying")
        sent = send_files(
            source,
            str(archive.parent),
            [archive.name],
            member.from_head,
            folder,
            bar,
        )

        loaded = node.follow(
            ImageFacts,
            report(f"{member.ssh}: loading"),
            installation.load_image,
            engine=engine,
            archive=f"{folder}/{archive.name}",
            image=image,
        )
        return BroughtImage(
            node=member.ssh,
            image=require_image(node, loaded),
            sent=sent,
        )

    return require_all(run_on_all(cluster.members, copy, results, present))


CACHE = "cache"
"""The name of the folder, in the folder sent to a node, that is patchkit's cache in the build."""
AddNeeds = Callable[[Path, ImageContents, Progress], None]
"""A function that adds to the folder to send what patchkit needs in the image.

It is a parameter, since only a room above this one can build that.
"""

# Where the build step mounts the sent folder; docker 20.10 leaves an empty folder there.
_MOUNT_POINT = "/patchkit"
_VARIABLES = {
    "PYTHONPATH": _MOUNT_POINT,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PATCHKIT_CACHE_DIR": f"{_MOUNT_POINT}/{CACHE}",
    "SOURCE_DATE_EPOCH": "0",  # seconds: the date that the ledger gets
}
_USER = re.compile(r"[A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?")
_ROOT = ("", "0", "root", "0:0", "root:root")


def patch_image(
    cluster: Cluster,
    report: Report,
    add_needs: AddNeeds,
    *,
    native: bool,
) -> BuiltImage | None:
    """Build a patched layer over the cluster's image; return None if the image has it already.

    The cluster has one node, and the image is on it. vLLM is patched for the `target` of
    cluster.toml, else for the node's device; with ``native`` it gets native code for that device.
    Raises HostError if the image is not there or has no vLLM, UsageError for a default user that a
    Containerfile cannot name, BuildError if `apply` fails in the image.
    """
    head = cluster.head
    (facts,) = cluster.facts()
    image = facts.image or ImageFacts()
    options = _apply_options(cluster.serve.target or facts.host.target, native)

    with tempfile.TemporaryDirectory() as scratch, cluster.alone():
        folder = Path(scratch, "kit")
        _copy_package(folder)
        # The same patchkit with the same options makes the same layer.
        layer_id = digest("\n".join([tree_digest(folder), *options]))
        if image.layer == layer_id:
            return None

        contents = require_image(head, image).contents
        software = contents.software

        if not (software and software.vllm_home and contents.glibc):
            what = f"{head.destination}: the image's Python finds no vLLM, or no glibc"
            raise HostError(what, why="vLLM is what is patched; its wheels need glibc")

        base = cluster.serve.local_image
        text = layer_text(base, software, image.owner, options)
        (folder / "Containerfile").write_text(text, encoding="utf-8")

        add_needs(folder, contents, report("fetching what patchkit needs in the image"))
        with translated(at=folder):
            archive = shutil.make_archive(str(folder), "tar", folder)
        return _build_layer(cluster, image, Path(archive), layer_id, report)


def _apply_options(target: str, native: bool) -> list[str]:
    """Return the options of `apply`; without --target it looks for the device itself."""
    options = []
    if target in targets():
        options += ["--target", target]
    if native:
        options.append("--native")
    return options


def _copy_package(folder: Path) -> None:
    package = Path(patchkit.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")

    with translated(at=folder):
        shutil.copytree(package, folder / "patchkit", ignore=ignored)


def _build_layer(
    cluster: Cluster,
    image: ImageFacts,
    archive: Path,
    layer_id: str,
    report: Report,
) -> BuiltImage:
    """Send the archive to the head, and build the layer there. Raises BuildError if that fails."""
    head = cluster.head
    engine = cluster.serve.engine
    folder = head.call(
        str,
        installation.make_image_room,
        engine=engine,
        root=image.storage.folder,
        size=2 * archive.stat().st_size,
    )
    bar = report(f"{head.destination}: copying patchkit")
    send_files(
        Remote(HERE),
        str(archive.parent),
        [archive.name],
        head.destination,
        folder,
        bar,
    )

    bar = report(f"{head.destination}: patching")
    return head.follow(
        BuiltImage,
        bar,
        installation.build_layer,
        engine=engine,
        kit=f"{folder}/{archive.name}",
        label=layer_id,
    )


def layer_text(
    base: str,
    software: Software,
    user: str,
    options: Sequence[str],
) -> str:
    """Return the text of the Containerfile that patches vLLM and FlashInfer of the image ``base``.

    ``user`` is the image's default user: the step runs as root, and the layer keeps the user.
    Raises UsageError for a name of a user that a Containerfile cannot have.
    """
    if not _USER.fullmatch(user):
        raise UsageError(
            f"the image's user is {user!r}, which a Containerfile cannot name"
        )

    # `apply` runs on the image's own Python: a sandbox around its modules would guard nothing.
    apply = [software.python, "-m", "patchkit", "apply", "--trust-source"]

    variables = [f"{name}={value}" for name, value in _VARIABLES.items()]
    kernels = software.flashinfer
    packages = [software.vllm_home, kernels.home if kernels else ""]

    command = " && ".join(
        quoted(*variables, *apply, *options, package)
        for package in filter(None, packages)
    )
    step = f"RUN --mount=type=bind,target={_MOUNT_POINT},rw {command}"
    if user in _ROOT:
        return f"FROM {base}\n{step}\n"
    return f"FROM {base}\nUSER 0\n{step}\nUSER {user}\n"
