"""Put the patched sources of a project into a build, and state the facts that they lead to."""

from __future__ import annotations

import shutil
from pathlib import Path

from patchkit import __version__
from patchkit.apply import apply
from patchkit.digests import tree_digest
from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import open_workspace
from patchkit.source.archive import unpack
from patchkit.source.origin import SourceOrigin
from patchkit.source.tree import Sandboxed
from patchkit.target import Target
from patchkit.wheel.build.toolchain import Toolchain
from patchkit.wheel.file.wheelfile import Facts


def patch_sources(
    project: str,
    origin: SourceOrigin,
    target: Target,
    toolchain: Toolchain,
    source: Path,
) -> Facts:
    """Put sources into the folder ``source``, apply the fixes, and return facts of the build."""
    if origin.path.is_dir():
        # Without git's history and earlier objects: the facts have a digest of the whole tree.
        aside = shutil.ignore_patterns(".git", "build")
        shutil.copytree(origin.path, source, symlinks=True, ignore=aside)
    else:
        unpack(origin.path, source)

    # Patches that a user applied to a folder stay in it.
    ledger = open_workspace(source, project).ledger
    patches = ledger.request.patches if ledger else ()
    request = Request(target=target, patches=patches)

    # The build that follows runs the source's own code by design, sandbox or not.
    possible = Sandboxed.IF_POSSIBLE
    recipe = load_recipe(project)
    outcome = apply(source, recipe, request, anew=True, sandboxed=possible)
    facts: Facts = {
        "project": project,
        "version": str(origin.version),
        "patchkit": __version__,
        "source": origin.identity,
        "tree": f"sha256:{tree_digest(source)}",
        "fixes": [f"{v.fix.id}: {v.state.value}" for v in outcome.verdicts],
        "target": target.name,
        "machine": toolchain.machine,
        "cuda": toolchain.cuda,
        "compiler": toolchain.compiler,
    }
    return facts | request.patch_facts
