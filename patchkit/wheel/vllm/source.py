"""Describe an order of `patchkit build vllm`, and find its sources."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path

from packaging.version import Version

from patchkit.digests import sha256_of, tree_digest
from patchkit.durable.staging import ScratchFolder
from patchkit.errors import UsageError
from patchkit.frozen import frozen
from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.build import KnownSource, Needs, known_externals, read_needs
from patchkit.records import RECIPES
from patchkit.source.archive import unpack
from patchkit.source.detect import detect
from patchkit.source.releases import named_version, read_lock
from patchkit.source.resolve import Report, SourceOptions, fetch_release
from patchkit.source.tree import SourceTree
from patchkit.wheel.build.machine import WORK
from patchkit.wheel.build.toolchain import Toolchain
from patchkit.wheel.vllm.repack_origin import upstream_wheels
from patchkit.wheel.vllm.upstream_parts import is_upstream


@frozen
class VllmOrder:
    """An order for vLLM: sources by their identity, the device, and the release of torch.

    ``extensions`` builds these alone (for tests), empty: all; ``without`` are optional extensions
    that are left out; ``given`` names sources of other projects; ``requirements`` lock the
    environment, by default the recipe's.
    """

    source: Path
    identity: str
    version: Version
    torch: str
    request: Request
    toolchain: Toolchain
    requirements: Path | None = None
    jobs: int
    given: Mapping[str, str] = field(default_factory=dict)
    offline: bool = False
    without: frozenset[str] = frozenset()
    extensions: frozenset[str] = frozenset()
    fresh: bool = False

    @property
    def across(self) -> bool:
        """Return whether the wheel is built for another CPU than that of this machine."""
        return self.toolchain.machine != platform.machine()

    @property
    def label(self) -> str:
        """Return the beginning of the wheel's local version."""
        target = self.request.target
        return f"{target.cuda_tag}.{target.name}{'.reduced' if self.extensions else ''}"

    @property
    def expected(self) -> str:
        """Return the wheel's file name, without the digest that only the build knows."""
        version = f"{self.version.public}+{self.label}"
        # cp38-abi3, as upstream's wheels: one wheel for every later Python.
        return f"vllm-{version}-cp38-abi3-linux_{self.toolchain.machine}.whl"

    @property
    def work(self) -> Path:
        """Return the work folder in which vLLM is compiled."""
        target = self.request.target.name
        name = f"vllm-{self.version.public}-{target}-{self.toolchain.machine}"
        return WORK / (f"{name}-reduced" if self.extensions else name)

    @property
    def released(self) -> bool:
        """True for a release whose sdist and wheel for this CPU are known by their sha256."""
        release = self.version.public
        sdist = read_lock(RECIPES / "vllm" / "lock.toml").get(release)
        if sdist is None or self.identity != f"sha256:{sdist.sha256}":
            return False

        return release in upstream_wheels().get(self.toolchain.machine, {})

    def source_of(self, known: KnownSource) -> str:
        """Return where a source comes from, as ``--source`` names it; "" for git.

        By default it comes from upstream's wheel of the release, where that is ready, unless the
        request names a fix for the source's own code.
        """
        if spec := self.given.get(known.option):
            return spec

        is_fixed = known.compiled in self.request.also | self.request.only
        if is_fixed or not known.is_ready(self.version) or not self.released:
            return ""
        return f"vllm=={self.version.public}"

    @property
    def taken(self) -> tuple[KnownSource, ...]:
        """Return the sources that come from upstream's wheel."""
        return tuple(
            known
            for known in known_externals()
            if known.pin_of(self.version)
            and known.option not in self.without
            and is_upstream(self.source_of(known))
        )

    @property
    def compiling(self) -> Request:
        """Return the request, plus the optional fixes for sources that are compiled here."""
        if self.request.only:
            return self.request

        aside = self.without | {known.option for known in self.taken}
        fixes = {
            known.compiled for known in known_externals() if known.option not in aside
        }
        also = self.request.also | fixes - {""} - self.request.skip
        return replace(self.request, also=also)


@frozen
class VllmSource:
    """A folder or an sdist, with its identity, its version, and its needs of the machine."""

    path: Path
    identity: str
    version: Version
    needs: Needs


def vllm_source(
    version: str | None,
    named: str | None,
    *,
    check: Callable[[SourceTree], object],
    report: Report,
    offline: bool = False,
) -> VllmSource:
    """Return the release of that version (default: the newest), or the source that is ``named``.

    ``check`` raises if this tree cannot be built as it is asked for. Raises UsageError, SourceError
    for a release that is not supported or no tree of vLLM, DriftError for one that was edited, and
    what a fetch raises.
    """
    recipe = load_recipe("vllm")
    if version is not None and named is not None:
        raise UsageError(
            "--version and --src exclude each other: the sources tell their version"
        )

    if named is not None:
        path = Path(named)
    else:
        chosen = named_version(version) if version else recipe.newest
        release = SourceOptions(recipe.project, f"vllm=={chosen}", offline=offline)
        path = fetch_release(release, recipe.check, report)

    with ScratchFolder() as folder:
        root = path if path.is_dir() else unpack(path, Path(folder) / "tree")
        tree = detect(root, "vllm")
        recipe.check(tree.version)
        needs = read_needs(tree)
        check(tree)

    if path.is_file():
        identity = f"sha256:{sha256_of(path)}"
    else:
        # CMake puts what it fetches into .deps, which is not of the sources.
        identity = f"folder:sha256:{tree_digest(path)}"

    return VllmSource(
        path=path.absolute(),
        identity=identity,
        version=tree.version,
        needs=needs,
    )
