"""Patch the vLLM in an image, in a layer of its own: patchkit goes there, and leaves nothing."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from patchkit.cluster.agent import images
from patchkit.cluster.agent.images import BuiltImage, HeldImage, ImagePython
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.install import Report, send_files
from patchkit.cluster.ssh.node import Remote
from patchkit.cluster.ssh.ssh import HERE
from patchkit.digests import digest, tree_digest
from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.wheel.wheelhouse.kit import CACHE, copy_package, pack_kit
from patchkit.wheel.wheelhouse.resolve import NodePlatform

_PLACE = "/patchkit"  # in the container of the step; docker 20.10 leaves an empty folder
_VARIABLES = {
    "PYTHONPATH": _PLACE,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PATCHKIT_CACHE_DIR": f"{_PLACE}/{CACHE}",
    "SOURCE_DATE_EPOCH": "0",  # the ledger's date
}
_USER = re.compile(r"[A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?")
_ROOT = ("", "0", "root", "0:0", "root:root")


def patch_image(cluster: Cluster, options: Sequence[str], report: Report) -> BuiltImage | None:
    """Patch the pinned image on the head, which has it, with these options of `apply`.

    None for an image that this patchkit has patched so already.
    """
    serve, head = cluster.file.serve, cluster.head
    asked = {"engine": serve.engine, "tag": serve.local_image}
    held = head.call(HeldImage, images.hold_image, engine=serve.engine, names=[serve.local_image])
    with tempfile.TemporaryDirectory() as place, cluster.alone():
        folder = Path(place, "kit")
        copy_package(folder)
        label = digest("\n".join([tree_digest(folder), *options]))
        if held.layer == label:
            return None
        python = head.call(ImagePython, images.find_python, **asked)
        (folder / "Containerfile").write_text(
            layer_text(serve.local_image, python, held.user, options), encoding="utf-8"
        )
        node = NodePlatform(machine=python.machine, python=python.release, glibc=python.glibc)
        bar = report("fetching what patchkit needs in the image")
        kit = pack_kit(folder, node, bar, native="--native" in options)
        room = {"engine": serve.engine, "root": held.root, "size": 2 * kit.stat().st_size}
        target = head.call(str, images.make_image_room, **room)
        bar = report(f"{head.destination}: copying patchkit")
        send_files(Remote(HERE), [kit], head.destination, target, bar)
        bar, build = report(f"{head.destination}: patching"), images.build_layer
        sent = {"engine": serve.engine, "kit": f"{target}/{kit.name}", "label": label}
        return head.follow(BuiltImage, bar, build, **sent)


def layer_text(base: str, python: ImagePython, user: str, options: Sequence[str]) -> str:
    """Return the Containerfile. Raises UsageError for a user that does not fit into a line."""
    if not _USER.fullmatch(user):
        raise UsageError(f"the image's user is {user!r}, which a Containerfile cannot name")
    # What runs there is the image's own Python: a sandbox around its modules would guard nothing.
    words = (python.python, "-m", "patchkit", "apply", "--trust-source", *options, python.vllm)
    line = quoted(*(f"{name}={value}" for name, value in _VARIABLES.items()), *words)
    lines = [f"FROM {base}", f"RUN --mount=type=bind,target={_PLACE},rw {line}"]
    if user not in _ROOT:
        lines = [lines[0], "USER 0", lines[1], f"USER {user}"]
    return "\n".join([*lines, ""])
