"""Patch the vLLM in an image, in a layer of its own: patchkit goes there, and leaves nothing."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import patchkit
from patchkit.cluster.agent import images
from patchkit.cluster.agent.image_facts import ImageContents, ImageFacts
from patchkit.cluster.agent.images import BuiltImage
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.install import Progress, Report, require_image, send_files
from patchkit.cluster.ssh.node import Remote
from patchkit.cluster.ssh.ssh import HERE
from patchkit.digests import digest, tree_digest
from patchkit.errors import HostError, UsageError, translated
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Software
from patchkit.target import targets

CACHE = "cache"
"""The folder of what is sent that is patchkit's cache in the image."""
AddNeeds = Callable[[Path, ImageContents, Progress], None]
"""Adds to a folder with patchkit what it needs in an image; rooms above this one know it."""

# In the container of the step; docker 20.10 leaves an empty folder.
_PLACE = "/patchkit"
_VARIABLES = {
    "PYTHONPATH": _PLACE,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PATCHKIT_CACHE_DIR": f"{_PLACE}/{CACHE}",
    "SOURCE_DATE_EPOCH": "0",  # the ledger's date
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
    """Patch the pinned image on the only node, which has it, for the node's target.

    None for an image that this patchkit has patched so already.
    """
    head = cluster.head
    (facts,) = cluster.facts()
    image = facts.image or ImageFacts()
    options = _apply_options(cluster.file.serve.target or facts.host.target, native)

    with tempfile.TemporaryDirectory() as place, cluster.alone():
        folder = Path(place, "kit")
        _copy_package(folder)
        label = digest("\n".join([tree_digest(folder), *options]))
        if image.layer == label:
            return None

        contents = require_image(head, image).contents
        software = contents.software

        if not (software and software.vllm_home and contents.glibc):
            what = f"{head.destination}: the image's Python finds no vLLM"
            raise HostError(what, why="it is what is patched")

        base = cluster.file.serve.local_image
        text = layer_text(base, software, image.owner, options)
        (folder / "Containerfile").write_text(text, encoding="utf-8")

        add_needs(folder, contents, report("fetching what patchkit needs in the image"))
        archive = _pack(folder)
        return _build_layer(cluster, image, archive, label, report)


def _apply_options(target: str, native: bool) -> list[str]:
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


def _pack(folder: Path) -> Path:
    archive = folder.with_suffix(".tar")
    with translated(at=folder), tarfile.open(archive, "w") as packed:
        packed.add(folder, ".")
    return archive


def _build_layer(
    cluster: Cluster,
    image: ImageFacts,
    archive: Path,
    label: str,
    report: Report,
) -> BuiltImage:
    """Send the archive to the head, and build the layer there."""
    head = cluster.head
    engine = cluster.file.serve.engine
    folder = head.call(
        str,
        images.make_image_room,
        engine=engine,
        root=image.storage.folder,
        size=2 * archive.stat().st_size,
    )
    bar = report(f"{head.destination}: copying patchkit")
    send_files(Remote(HERE), [archive], head.destination, folder, bar)

    bar = report(f"{head.destination}: patching")
    return head.follow(
        BuiltImage,
        bar,
        images.build_layer,
        engine=engine,
        kit=f"{folder}/{archive.name}",
        label=label,
    )


def layer_text(
    base: str,
    software: Software,
    user: str,
    options: Sequence[str],
) -> str:
    """Return the Containerfile. Raises UsageError for a user that does not fit into a line."""
    if not _USER.fullmatch(user):
        raise UsageError(
            f"the image's user is {user!r}, which a Containerfile cannot name"
        )

    # What runs there is the image's own Python: a sandbox around its modules would guard nothing.
    apply = [software.python, "-m", "patchkit", "apply", "--trust-source"]

    variables = [f"{name}={value}" for name, value in _VARIABLES.items()]
    command = quoted(*variables, *apply, *options, software.vllm_home)

    step = f"RUN --mount=type=bind,target={_PLACE},rw {command}"
    if user in _ROOT:
        return f"FROM {base}\n{step}\n"
    return f"FROM {base}\nUSER 0\n{step}\nUSER {user}\n"
