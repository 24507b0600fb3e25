"""Build vLLM for one device, from a release to a sealed wheel.

order → prepare → CUDA → backend, cut off → prove → assemble PTX → seal

vLLM's own setup.py and CMake do the work; everything that they would fetch is fetched before.

What determines a wheel is collected in this order:
order → source → patches → external sources → build environment → facts
"""

import platform
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
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
from patchkit.recipes.vllm.archs import evaluate
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
    asked_targets,
    idle_sources,
    leave_out,
    only_extensions,
    take_installed,
)
from patchkit.source.archive import Progress, unpack
from patchkit.source.detect import FORK, detect
from patchkit.source.releases import (
    foreign_file,
    named_version,
    release_files,
)
from patchkit.source.resolve import Report, SourceOptions, SourceOrigin, fetch_release
from patchkit.source.tree import Sandboxed, SourceTree
from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.build.compiled import (
    BuiltWheel,
    clean_environment,
    fix_states,
    order_facts,
    platform_tag,
    run_build,
)
from patchkit.wheel.build.machine import (
    WORK,
    check_toolchain,
    emptied,
    namespace_words,
    network,
    staging,
    work_folder,
)
from patchkit.wheel.build.requirements import Environment, make_environment
from patchkit.wheel.build.torch_toolkit import (
    build_toolkit,
    cross_variables,
    install_torch_stand_in,
    target_site,
)
from patchkit.wheel.device.inspect import Binaries
from patchkit.wheel.device.libraries import (
    compiled_sources,
    prove_compiled,
    prove_groups,
    require_loading,
    require_portable,
)
from patchkit.wheel.file.torch import installed_torch, require_torch
from patchkit.wheel.file.wheelfile import FACTS, Facts, WheelFile
from patchkit.wheel.file.write import CUDA_LICENSE, as_text, digest_label, seal_wheel
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.make import native_parts, read_kernels
from patchkit.wheel.vllm.inputs import (
    Gathered,
    check_given,
    gather_sources,
    prove_parts,
)
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


# Issue trackers report 3 to 5 GB per compiler; the largest files of CUTLASS take 9.
JOB_MEMORY = 4 * BYTES_PER_GIB
# Bytes of disk: 0.25.1 for one arch leaves 2 GB, and compilers write temporary files.
_FREE = 8 * BYTES_PER_GIB


def build_vllm(order: VllmOrder, report: Report) -> BuiltWheel:
    """Patch, compile, prove and pack vLLM. ``report(task)`` returns the progress of a long task.

    Raises BuildError, DriftError, HostError, ProofError, StorageError, UsageError.
    """
    with staging() as staged:
        target = order.target
        arch = target.gencode_flags(target.arch_list(order.request.arch))
        environment = clean_environment(staged)
        check_toolchain(order.toolchain, arch, staged, environment)

        assembler = Assembler(offline=order.offline)
        prepared = prepare_build(order, staged, report)
        folders = [staged / name for name in ("source", "external", "cuda")]
        build_toolkit(
            order.toolchain,
            prepared.site,
            prepared.python,
            folders[2],
            root=order.work / "cuda",
        )
        facts = as_text(prepared.facts)
        with work_folder(
            order.work,
            folders,
            facts,
            fresh=order.fresh,
            free=_FREE,
        ) as root:
            variables = build_variables(root, order, prepared)
            bar = report("compiling")
            raw = compile_wheel(root, prepared.python, variables, bar)
            return _make_vllm_wheel(root, raw, order, prepared, assembler, report)


def _make_vllm_wheel(
    root: Path,
    raw: Path,
    order: VllmOrder,
    prepared: Prepared,
    assembler: Assembler,
    report: Report,
) -> BuiltWheel:
    target = order.target
    with WheelFile(raw) as wheel:
        kernels = read_kernels(wheel, target)
        if not order.extensions:
            require_loading(kernels.judged, target, wheel.name)
        proofs = list(_prove_compiled(root, order, kernels.binaries))
        for part in prepared.gathered.installed:
            known = part.known
            if not order.extensions or order.extensions & set(known.targets):
                folder = root / "external" / known.option
                proofs.append(prove_parts(wheel, folder, known.option))

        # Libraries that were compiled here, too: upstream's CMake asks for only PTX in some places.
        folder = emptied(root / "native")
        bar = in_mb(report("assembling PTX, in MB"))
        native = native_parts(wheel, kernels, target, folder, assembler, bar)

    if native.count:
        ptxas = f"ptxas {assembler.version}"
        proofs.append(f"{native.count} fat binaries are assembled from PTX, by {ptxas}")

    facts = {**prepared.facts, "native": native.facts}
    texts = {
        **prepared.texts,
        FACTS: as_text(facts),
    }
    tag = platform_tag(raw)
    sealed = seal_wheel(raw, emptied(root / "sealed"), tag, texts, native.members)
    require_portable(sealed)
    return BuiltWheel(
        wheel=sealed,
        facts=facts,
        proofs=tuple(proofs),
        circumstances=(network(),),
        notes=tuple(native.refused_notes),
        log=root / "log.txt",
    )


def _prove_compiled(
    root: Path,
    order: VllmOrder,
    binaries: Binaries,
) -> Iterator[str]:
    """Prove that CMake compiled for the wanted archs and that the libraries hold this code.

    Yield a sentence for each proof. Raises ProofError.
    """
    source = root / "source"
    compiled = compiled_sources(source / "build", source)

    target = order.target
    archs = target.arch_list(order.request.arch)
    tree = detect(source, "vllm", sandboxed=Sandboxed.IF_POSSIBLE)  # it has been built
    groups = evaluate(tree, target, archs, order.toolchain.cuda)
    yield prove_groups(groups, compiled)

    libraries = asked_targets(tree)
    linked = [source for source in compiled if source.library in libraries]
    yield from prove_compiled(linked, binaries, target)


_ABI = "--py-limited-api=cp38"  # as upstream's wheels have it


def compile_wheel(
    root: Path,
    python: Path,
    variables: Values,
    progress: Progress,
) -> Path:
    """Compile the wheel with the release's own build backend; return its path, in ``root/raw``.

    The output is written to ``root/log.txt``. Raises BuildError with the lines of the output that
    tell the reason, HostError.
    """
    out = emptied(root / "raw")
    command = [
        *namespace_words(), str(python), "-m", "pip", "wheel", "--isolated", "--verbose",
        "--use-pep517", "--no-build-isolation", "--no-index", "--no-deps",
        f"--config-settings=--build-option={_ABI}", f"--wheel-dir={out}", str(root / "source"),
    ]  # fmt: skip
    run_build(command, root, variables, progress)
    (wheel,) = out.glob("*.whl")
    return wheel


def build_variables(root: Path, order: VllmOrder, prepared: Prepared) -> Values:
    """Return the environment of vLLM's setup.py, CMake and the compilers."""
    variables = clean_environment(root)
    path = variables["PATH"]
    cuda = root / "cuda"
    cxx = str(order.toolchain.cxx)
    archs = load_recipe("vllm").facts.build
    defines = prepared.gathered.defines
    if order.toolchain.across:
        variables |= cross_variables(order.toolchain, cuda)
    return variables | {
        "PATH": f"{prepared.python.parent}:{cuda / 'bin'}:{path}",
        "CUDA_HOME": str(cuda),
        "CXX": cxx,
        "CUDAHOSTCXX": cxx,  # nvcc's host compiler, as CMake takes it
        archs.variable: archs.value_for(order.target, order.request.arch),
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_VERSION_OVERRIDE": prepared.facts["wheel"],
        "MAX_JOBS": str(order.jobs),
        # The number of jobs was chosen by the memory of one compiler each.
        "NVCC_THREADS": "1",
        "CMAKE_ARGS": " ".join(f"-D{name}={path}" for name, path in defines.items()),
        # prove_compiled reads from it what was compiled for which archs.
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "FETCHCONTENT_BASE_DIR": str(root / "deps"),
        # Stripped; the build id is a digest of the contents, and so the same in every build.
        "LDFLAGS": "-Wl,-s -Wl,--build-id=sha1",
        # The Rust front end is optional, and its crates are nowhere in the release.
        "CARGO": "/nonexistent/cargo",
        "RUSTC": "/nonexistent/rustc",
        "PIP_NO_INDEX": "1",
        # sccache compiles in a server, which cannot be reached from a namespace without a network.
        "VLLM_DISABLE_SCCACHE": "1",
        **prepared.gathered.environment,
    }
