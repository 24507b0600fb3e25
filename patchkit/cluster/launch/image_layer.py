"""Patch vLLM and FlashInfer of an image in a layer over it, without a file of patchkit."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import patchkit
from patchkit.cluster.agent import images
from patchkit.cluster.agent.image_facts import ImageContents, ImageFacts
from patchkit.cluster.agent.images import BuiltImage
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.install import Report, require_image
from patchkit.cluster.ssh.node import Remote
from patchkit.cluster.ssh.rsync import Progress, send_files
from patchkit.cluster.ssh.ssh import HERE
from patchkit.digests import digest, tree_digest
from patchkit.errors import HostError, UsageError, translated
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Software
from patchkit.target import targets

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
        images.make_image_room,
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
        images.build_layer,
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
