"""Collect everything that determines a vLLM wheel, before anything is compiled.

order → source → patches → external sources → build environment → facts
"""

import platform
import shutil
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from patchkit.apply import apply
from patchkit.digests import sha256_of, tree_digest
from patchkit.durable.staging import ScratchFolder
from patchkit.errors import ProofError, UsageError
from patchkit.frozen import Values, frozen
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, State
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import open_workspace
from patchkit.recipes.vllm.build import (
    Needs,
    Wanted,
    across,
    by_option,
    known_externals,
    locked_requirements,
    read_needs,
    wanted,
)
from patchkit.recipes.vllm.external import externals
from patchkit.recipes.vllm.leave_out import (
    idle_sources,
    leave_out,
    only_extensions,
    take_installed,
)
from patchkit.source.archive import Progress, unpack
from patchkit.source.detect import FORK, detect
from patchkit.source.origin import SourceOrigin
from patchkit.source.releases import (
    foreign_file,
    named_version,
    release_files,
)
from patchkit.source.resolve import Report, SourceOptions, fetch_release
from patchkit.source.tree import Sandboxed, SourceTree
from patchkit.wheel.build.compiled import fix_states, order_facts
from patchkit.wheel.build.machine import WORK
from patchkit.wheel.build.requirements import Environment, make_environment
from patchkit.wheel.build.torch_toolkit import install_torch_stand_in, target_site
from patchkit.wheel.file.labels import CUDA_LICENSE, as_text, digest_label
from patchkit.wheel.file.torch import installed_torch, require_torch
from patchkit.wheel.file.wheelfile import Facts
from patchkit.wheel.vllm.inputs import Gathered, check_given, gather_sources
from patchkit.wheel.vllm.inputs import VllmOrder as VllmOrder


@frozen
class VllmSource(SourceOrigin):
    """A folder or an sdist, and what its build needs of the machine."""

    needs: Needs


def vllm_source(
    version: str | None,
    named: str | None,
    *,
    check: Callable[[SourceTree], object],
    report: Report,
    offline: bool,
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


@frozen
class Prepared:
    """The inputs of a build; ``texts`` go into .dist-info, by their path there.

    ``site`` is the folder with torch and NVIDIA's libraries for the CPU of the wheel.
    """

    facts: Facts
    texts: Values
    gathered: Gathered
    python: Path
    site: Path


def prepare_build(order: VllmOrder, staged: Path, report: Report) -> Prepared:
    """Put the patched source and the sources of other projects below ``staged``.

    Raises BuildError, DriftError, HostError, ProofError, SourceError, StorageError, UsageError.
    """
    source = staged / "source"
    _copy_source(order, source)

    # The build that follows runs the source's own code by design, sandbox or not.
    possible = Sandboxed.IF_POSSIBLE
    request = order.request
    outcome = apply(source, load_recipe("vllm"), request, anew=True, sandboxed=possible)

    workspace = open_workspace(source, "vllm")
    texts = {}
    if workspace.ledger:  # without its date: the wheel is the same on every day
        ledger = replace(workspace.ledger, date="")
        texts["patchkit.ledger.json"] = ledger.to_json().decode()

    # Detected anew, since the tree of the workspace reads upstream's texts.
    tree = detect(source, "vllm")
    reduced = _write_overlay(choose_parts(tree, order.without, order.extensions))
    _require_applied(detect(source, "vllm", sandboxed=possible), request, outcome)

    dest = staged / "external"
    # Also if there is nothing to gather: the build keeps the folder.
    dest.mkdir()
    bar = in_mb(report("sources of other projects, in MB"))
    gathered = gather_sources(_list_externals(reduced), order, dest, bar)
    _write_overlay(take_installed(reduced, gathered.installed))
    environment, site = _make_environment(order, report)

    return Prepared(
        facts=_vllm_facts(order, source, outcome, gathered, environment),
        # With the licences of what is compiled in (PEP 639).
        texts={**texts, **gathered.notices},
        gathered=gathered,
        python=environment.python,
        site=site,
    )


def _copy_source(order: VllmOrder, source: Path) -> None:
    if order.origin.path.is_file():
        unpack(order.origin.path, source)
        return

    # Leftovers of other builds, and the ledger: the fixes are applied to the copy anew.
    aside = shutil.ignore_patterns(".git", "build", ".deps", "*.egg-info", ".patchkit")
    shutil.copytree(order.origin.path, source, symlinks=True, ignore=aside)

    # A checkout: its version came from git, which is left out.
    info = source / "PKG-INFO"
    if not info.exists():
        metadata = (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {order.origin.version}\n"
        )
        origin = open_workspace(order.origin.path, "vllm").tree
        paths = release_files("vllm").get(origin.version.public, ())
        if foreign_file(origin, {path: origin.digest_of(path) for path in paths}):
            metadata += f"Summary: {FORK}\n"
        info.write_text(metadata, "utf-8")


def _require_applied(tree: SourceTree, request: Request, outcome: Applied) -> None:
    """Raise ProofError if leaving parts out has undone a fix."""
    for verdict in outcome.verdicts:
        if verdict.state is not State.APPLIED:
            continue

        finding = verdict.fix.look(tree, request)
        if finding.state is not State.APPLIED:
            raise ProofError(
                f"{verdict.fix.id} is undone: {finding.reason}",
                why="leaving extensions out changed the same lines",
                hint="please report this with the version",
            )


def choose_idle(
    tree: SourceTree,
    request: Request,
    without: Collection[str],
    extensions: Collection[str],
    given: Values,
) -> Values:
    """Return option → reason for each source that the device does not need.

    Raises UsageError or DriftError if the tree cannot be built with these options.
    """
    built = {
        known.option
        for known in known_externals()
        if not set(known.targets).isdisjoint(extensions)
    }
    idle = idle_sources(tree, request, {*given, *without, *built})

    reduced = choose_parts(tree, {*without, *idle}, extensions)
    check_given(_list_externals(reduced), tree.version, given)
    return idle


def _list_externals(tree: SourceTree) -> tuple[Wanted, ...]:
    """Return the sources that a tree fetches."""
    release = load_recipe("vllm").knows(tree.version)
    return tuple(wanted(externals(tree), tree.version, release=release))


def choose_parts(
    tree: SourceTree,
    without: Collection[str],
    extensions: Collection[str],
) -> SourceTree:
    """Return the tree without the sources in ``without``, and only with ``extensions`` if any."""
    reduced = leave_out(tree, by_option(without))
    if extensions:
        return only_extensions(reduced, extensions)
    return reduced


def _make_environment(order: VllmOrder, report: Report) -> tuple[Environment, Path]:
    """Return the environment that runs the build, and the site-packages folder to link with."""
    file = locked_requirements(order.torch, order.requirements)
    parts = across()
    environment = make_environment(
        file,
        WORK,
        leaving=parts.stays if order.toolchain.across else (),
        offline=order.offline,
        progress=report("build environment"),
    )
    library = environment.python.parents[1] / "lib"
    site = next(library.glob("python*/site-packages"))

    if order.toolchain.across:
        machine = order.toolchain.machine
        stand_in_site = site
        site = target_site(
            file,
            WORK,
            machine,
            python=environment.python,
            offline=order.offline,
            progress=report(f"torch and CUDA for {machine} ({parts.download})"),
        )
        install_torch_stand_in(stand_in_site, site)

    torch = installed_torch(environment.python)
    require_torch(torch, order.torch, order.target.cuda)
    return environment, site


def in_mb(bar: Progress) -> Progress:
    """Return a progress of bytes that is shown in megabytes."""
    return lambda done, total: bar(done // 10**6, total // 10**6)


def _write_overlay(tree: SourceTree) -> SourceTree:
    for path, text in tree.overlay.items():
        (tree.root / path).write_text(text, "utf-8")
    return tree


def _vllm_facts(
    order: VllmOrder,
    source: Path,
    outcome: Applied,
    gathered: Gathered,
    environment: Environment,
) -> Facts:
    recipe = load_recipe("vllm")
    torch = installed_torch(environment.python)
    facts = order_facts(order, source) | {
        "made": "build",
        "recipe": recipe.digest,
        "fixes": fix_states(outcome),
        **order.request.patch_facts,
        "archs": order.request.arch_list,
        "tools": {name: environment.packages[name] for name in ("cmake", "ninja")},
        "environment": {
            "python": "{}.{}".format(*sys.version_info),
            "torch": f"{torch.version}, CUDA {torch.cuda}",
            "requirements": f"sha256:{environment.digest}",
        },
        "externals": gathered.identities,
        "without": sorted(order.without),
        "extensions": sorted(order.extensions) or "all",
        "license": {"vllm": "Apache-2.0", "cuda": CUDA_LICENSE},
    }
    label = f"{order.label}.{digest_label(as_text(facts))}"
    # Neither name nor digest depends on where it was built: the bytes of the code do not.
    return facts | {
        "wheel": f"{order.version}+{label}",
        "built_on": platform.machine(),
    }
