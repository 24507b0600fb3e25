"""Patch the vLLM in an image, in a layer of its own: patchkit goes there, and leaves nothing."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from patchkit.cluster.agent import images
from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.images import BuiltImage
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.install import Report, send_files, well_image
from patchkit.cluster.ssh.node import Remote
from patchkit.cluster.ssh.ssh import HERE
from patchkit.digests import digest, tree_digest
from patchkit.errors import HostError, UsageError
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Software
from patchkit.target import targets
from patchkit.wheel.wheelhouse.kit import CACHE, copy_package, pack_kit
from patchkit.wheel.wheelhouse.resolve import NodePlatform

_PLACE = (
    "/patchkit"  # in the container of the step; docker 20.10 leaves an empty folder
)
_VARIABLES = {
    "PYTHONPATH": _PLACE,
    "PYTHONDONTWRITEBYTECODE": "1",
    "PATCHKIT_CACHE_DIR": f"{_PLACE}/{CACHE}",
    "SOURCE_DATE_EPOCH": "0",  # the ledger's date
}
_USER = re.compile(r"[A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?")
_ROOT = ("", "0", "root", "0:0", "root:root")


def patch_image(cluster: Cluster, report: Report, *, native: bool) -> BuiltImage | None:
    """Patch the pinned image on the only node, which has it, for the node's target.

    None for an image that this patchkit has patched so already.
    """
    serve, head = cluster.file.serve, cluster.head
    (facts,) = cluster.facts()
    held, target = facts.image or ImageFacts(), serve.target or facts.host.target
    options = [
        *(("--target", target) if target in targets() else ()),
        *native * ("--native",),
    ]
    with tempfile.TemporaryDirectory() as place, cluster.alone():
        folder = Path(place, "kit")
        copy_package(folder)
        label = digest("\n".join([tree_digest(folder), *options]))
        if held.layer == label:
            return None
        has = well_image(head, held).contents
        if not (has.software and has.software.vllm_home and has.glibc):
            what = f"{head.destination}: the image's Python finds no vLLM"
            raise HostError(what, why="it is what is patched")
        text = layer_text(serve.local_image, has.software, held.owner, options)
        (folder / "Containerfile").write_text(text, encoding="utf-8")
        node = NodePlatform(machine=has.machine, python=has.release, glibc=has.glibc)
        bar = report("fetching what patchkit needs in the image")
        kit = pack_kit(folder, node, bar, native=native)
        room = {"root": held.storage.folder, "size": 2 * kit.stat().st_size}
        there = head.call(str, images.make_image_room, engine=serve.engine, **room)
        bar = report(f"{head.destination}: copying patchkit")
        send_files(Remote(HERE), [kit], head.destination, there, bar)
        bar, build = report(f"{head.destination}: patching"), images.build_layer
        sent = {"engine": serve.engine, "kit": f"{there}/{kit.name}", "label": label}
        return head.follow(BuiltImage, bar, build, **sent)


def layer_text(base: str, found: Software, user: str, options: Sequence[str]) -> str:
    """Return the Containerfile. Raises UsageError for a user that does not fit into a line."""
    if not _USER.fullmatch(user):
        raise UsageError(
            f"the image's user is {user!r}, which a Containerfile cannot name"
        )
    # What runs there is the image's own Python: a sandbox around its modules would guard nothing.
    words = (
        found.python,
        "-m",
        "patchkit",
        "apply",
        "--trust-source",
        *options,
        found.vllm_home,
    )
    line = quoted(*(f"{name}={value}" for name, value in _VARIABLES.items()), *words)
    lines = [f"FROM {base}", f"RUN --mount=type=bind,target={_PLACE},rw {line}"]
    if user not in _ROOT:
        lines = [lines[0], "USER 0", lines[1], f"USER {user}"]
    return "\n".join([*lines, ""])
