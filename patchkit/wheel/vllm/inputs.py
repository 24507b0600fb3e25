"""Fetch the sources of other projects that a build of vLLM needs, each into a folder.

Where a source comes from, in this order:

1. ``--source OPTION=WHAT``: a folder; ``git+URL@COMMIT``; or upstream's own wheel of
   the release that is built (``vllm==VERSION``), as it is installed
2. git, which fetches the one commit and the commits of its submodules.

A commit id proves the contents, since git checks every object. A folder is recorded by the
digest of its contents, with the note that it was not compared with the pin.
"""

import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from patchkit.digests import tree_digest
from patchkit.errors import (
    ProofError,
    SourceError,
    StorageError,
    UsageError,
    translated,
)
from patchkit.frozen import Texts, Values, frozen
from patchkit.quoting import quoted
from patchkit.reading import LARGEST_IN_TREE, read_bytes, user_path
from patchkit.recipes.vllm.build import (
    KnownSource,
    Wanted,
    by_option,
)
from patchkit.records import RECIPES
from patchkit.source.archive import unpack
from patchkit.source.fetch import Progress, cache_dir, fetch
from patchkit.source.git import commit_archive, parse_git, submodules
from patchkit.source.releases import read_lock
from patchkit.target import Target
from patchkit.wheel.build.compiled import CompileOrder
from patchkit.wheel.device.inspect import Binaries, inspect_wheel
from patchkit.wheel.device.libraries import Judgements, Use, cuda_major, judge_libraries
from patchkit.wheel.file.wheelfile import WheelFile, record_digest
from patchkit.wheel.native.make import members_of
from patchkit.wheel.repack.repack import upstream_wheels

_NAMES = re.compile(r"(LICEN[CS]E|COPYING|NOTICE)([.-].*)?", re.IGNORECASE)
_UNCOMPARED = " (not compared with the pin)"
_ASIDE = shutil.ignore_patterns(".git", "__pycache__")


@frozen
class VllmOrder(CompileOrder):
    """An order for vLLM, and the release of torch that it is built with.

    ``extensions`` builds these alone (for tests), empty: all; ``without`` are optional extensions
    that are left out; ``given`` names sources of other projects; ``requirements`` lock the
    environment, by default the recipe's.
    """

    project = "vllm"
    package = "vllm"
    pythons = "cp38-abi3"  # as upstream's wheels: one wheel for every later Python

    torch: str
    requirements: Path | None = None
    jobs: int
    given: Values = field(default_factory=dict)
    offline: bool = False
    without: frozenset[str] = frozenset()
    extensions: frozenset[str] = frozenset()

    @property
    def reduced(self) -> str:
        return ".reduced" if self.extensions else ""

    @property
    def released(self) -> bool:
        """True for a release whose sdist and wheel for this CPU are known by their sha256."""
        sdist = read_lock(RECIPES / "vllm" / "lock.toml").get(self.version)
        if sdist is None or self.origin.identity != f"sha256:{sdist.sha256}":
            return False

        return self.version in upstream_wheels("vllm", self.toolchain.machine)

    def source_of(self, known: KnownSource) -> str:
        """Return where a source comes from, as ``--source`` names it; "" for git.

        By default it comes from upstream's wheel of the release, where that is ready, unless the
        request names a fix for the source's own code.
        """
        if spec := self.given.get(known.option):
            return spec

        is_fixed = known.compiled in self.request.also | self.request.only
        if is_fixed or not known.is_ready(self.origin.version) or not self.released:
            return ""
        return f"vllm=={self.version}"


@frozen
class Gathered:
    """The sources that were fetched for a build.

    ``environment`` and ``defines`` (CMake's ``-D``) are the variables that name their folders.
    ``identities`` (option → commit or digest) describe them, ``notices`` (path → text) are their
    licence files. ``installed`` sources are not compiled: their folders hold the files to install.
    """

    environment: Values
    defines: Values
    identities: Values
    notices: Values
    installed: tuple[Wanted, ...] = ()


def parse_given(texts: Sequence[str]) -> Values:
    """Return option → WHAT of texts ``OPTION=WHAT``, the values of ``--source``.

    Raises UsageError for a text of another form, or an option that no source has.
    """
    given = {}
    for text in texts:
        option, _, spec = text.partition("=")
        if not spec:
            raise UsageError(
                f"--source {text}: not OPTION=WHAT",
                hint="for example --source cutlass=FOLDER",
            )
        by_option([option])
        given[option] = spec

    return given


def check_given(
    wanted: Sequence[Wanted],
    version: Version,
    given: Values,
) -> None:
    """Raise UsageError if ``--source`` names a source that the build does not fetch.

    Also raise it if ``--source`` names the wheel of another release of vLLM.
    """
    idle = sorted(set(given) - {external.known.option for external in wanted})
    if idle:
        raise UsageError(
            f"--source {idle[0]}: this build takes no {idle[0]}",
            why=f"vLLM {version} does not fetch it, or it is left out with --without",
        )

    release = version.public
    for option, spec in given.items():
        if is_upstream(spec) and spec.partition("==")[2].strip() != release:
            raise UsageError(
                f"--source {option}={spec}: this build is of vLLM {release}",
                why="parts of another release are made for other Python, and perhaps another torch",
                hint=f"--source {option}=vllm=={release}",
            )


def gather_sources(
    wanted: Sequence[Wanted],
    order: VllmOrder,
    dest: Path,
    progress: Progress | None = None,
) -> Gathered:
    """Fetch every source that a release needs into ``dest``, one folder per option.

    The paths in the result are those of the work folder, where the build will find ``dest``. Raises
    UsageError if the build does not fetch a given source or cannot compile a source for the CPU;
    SourceError, HashMismatchError, StorageError and HostError if a source cannot be fetched.
    """
    check_given(wanted, order.origin.version, order.given)
    home = order.work / "external"
    environment: dict[str, str] = {}
    defines: dict[str, str] = {}
    identities: dict[str, str] = {}
    texts: dict[str, str] = {}
    installed: list[Wanted] = []
    for external in wanted:
        known = external.known
        option = known.option
        spec = order.source_of(known)
        folder = dest / option
        if is_upstream(spec):
            identities[option] = upstream_parts(known, order, folder, progress)
            installed.append(external)
            environment[external.external.variable] = str(home / option)
        else:
            _require_compilable(known, order)
            identities[option] = _write_source(external, spec, order, folder)
            place = str(home / option / known.folder)
            if known.define and known.define.covers(order.origin.version):
                defines[known.define.variable] = place
            else:
                environment[external.external.variable] = place

        for path in sorted(folder.iterdir()):
            if _NAMES.fullmatch(path.name) and path.is_file():
                text = read_bytes(path, limit=LARGEST_IN_TREE).decode(errors="replace")
                texts[f"licenses/{option}/{path.name}"] = text

    return Gathered(
        environment=environment,
        defines=defines,
        identities=identities,
        notices=texts,
        installed=tuple(installed),
    )


def _require_compilable(known: KnownSource, order: VllmOrder) -> None:
    """Raise UsageError for a source that cannot be compiled for another CPU."""
    if known.native and order.toolchain.across:
        upstream = f"--source {known.option}=vllm=={order.version}"
        cpu = order.toolchain.machine
        raise UsageError(
            f"{known.option} cannot be compiled for {cpu} on {platform.machine()}",
            why=known.native,
            hint=f"take upstream's: {upstream}; or --without {known.option}",
        )


def _write_source(wanted: Wanted, spec: str, order: VllmOrder, dest: Path) -> str:
    """Write the source that ``spec`` names to ``dest``; return its commit, or its digest.

    It is a folder, or ``git+URL@COMMIT``; if ``spec`` is "", it is the commit that upstream pins.
    Raises UsageError for any other text, SourceError if the source lacks a file.
    """
    known = wanted.known
    place = user_path(spec).absolute()
    if not spec:
        identity = _write_commit(wanted, wanted.external.url, "", order, dest)
    elif place.is_dir():
        # The user may have named the inner folder that CMake uses.
        is_whole = (place / known.folder).is_dir()
        copy = dest if is_whole else dest / known.folder
        shutil.copytree(place, copy, symlinks=True, ignore=_ASIDE)
        identity = f"folder, tree sha256:{tree_digest(place)}{_UNCOMPARED}"
    elif git := parse_git(spec):
        identity = _write_commit(wanted, git.url, git.commit, order, dest) + _UNCOMPARED
    else:
        raise UsageError(
            f"--source {known.option}={spec}: there is no such folder",
            why="the path is mistyped, or it is an archive, which is to be unpacked first",
        )

    for name in known.files:
        if not (dest / name).is_file():
            raise SourceError(
                f"--source {known.option}: {name} is missing in it",
                why=f"it is not {wanted.external.url}, or its submodules were not checked out",
                hint="git submodule update --init --recursive; in the folder that is named",
            )
    return identity


def _write_commit(
    wanted: Wanted,
    url: str,
    commit: str,
    order: VllmOrder,
    dest: Path,
) -> str:
    """Write the source at ``commit`` to ``dest``, by default at the pinned one; return its name.

    Raises SourceError if only a tag is known.
    """
    known = wanted.known
    external = wanted.external
    chosen = commit or wanted.commit
    if not chosen:
        raise SourceError(
            f"{known.option}: which commit {external.pin} names is not known",
            why="a tag can be moved, so it does not say what would be fetched",
            hint=quoted("--source", f"{known.option}=git+{url}@COMMIT"),
        )

    try:
        _check_out(url, chosen, dest, wanted.submodules, offline=order.offline)
    except (SourceError, StorageError) as error:
        refused = any(row.covers(order.origin.version) for row in known.refused)
        if known.optional and not refused and not commit:
            without = f"--without {known.option}; {known.cost}"
            error.hint += f"; or leave it out: {without}"
        raise

    # It has upstream's URL even if ``url`` is another: the commit id identifies the source.
    return f"{external.url}@{chosen}"


def _check_out(
    url: str,
    commit: str,
    dest: Path,
    paths: Texts | None,
    *,
    offline: bool,
) -> None:
    """Write a commit into ``dest``, with its submodules at ``paths`` and their own submodules.

    ``paths`` None means all submodules. Raises SourceError if the commit has no such submodule.
    """
    cache = cache_dir()
    archive = commit_archive(
        url,
        commit,
        cache=cache,
        prefix=dest.name,
        offline=offline,
    )
    try:
        unpack(archive, dest)
    finally:
        archive.unlink(missing_ok=True)  # the objects stay in the cache

    modules = {module.path: module for module in submodules(url, commit, cache=cache)}
    for path in modules if paths is None else paths:
        if path not in modules:
            raise SourceError(
                f"{url}@{commit} has no submodule {path}",
                why="the release names it, so the commit is not the one that it means",
            )
        module = modules[path]
        _check_out(module.url, module.commit, dest / path, None, offline=offline)


# Parts of upstream's own wheel: Python, headers and libraries as they are installed.
# ``recipes/vllm/build.toml`` says which of its paths belong to which project.


def is_upstream(spec: str) -> bool:
    """Check whether ``PROJECT==VERSION`` names vLLM's own wheel."""
    project, equals, _ = spec.partition("==")
    return bool(equals) and canonicalize_name(project.strip()) == "vllm"


def upstream_parts(
    known: KnownSource,
    order: VllmOrder,
    dest: Path,
    progress: Progress | None,
) -> str:
    """Write the parts of a source from upstream's wheel of a release, which is fetched.

    Raises SourceError if the lock has none, and the errors of ``fetch`` and ``write_parts``.
    """
    cpu = order.toolchain.machine
    entries = upstream_wheels("vllm", cpu)
    release = order.version
    if release not in entries:
        raise SourceError(
            f"upstream's wheel of vLLM {release} for {cpu} is not locked",
            why="that is no release, or one that this patchkit does not know",
            hint="name a folder or git+URL@COMMIT with --source",
        )

    path = fetch("vllm", release, entries, offline=order.offline, progress=progress)
    with WheelFile(path) as wheel:
        return write_parts(wheel, known, order.target, dest)


def write_parts(
    wheel: WheelFile, known: KnownSource, target: Target, dest: Path
) -> str:
    """Write the parts of a source in a wheel of vLLM to ``dest``; return what tells their origin.

    Libraries for other devices stay out. Raises UsageError if there is nothing for the device,
    ProofError for libraries that do not load on it or are linked with another CUDA.
    """
    option = known.option
    version = wheel.name.version
    spec = f"--source {option}=vllm=={version}"
    members = members_of(known, wheel.members)
    if not members:
        raise UsageError(
            f"{spec}: {wheel.path.name} holds nothing of {option}",
            why="upstream builds it into no library or file of its own",
            hint="name a folder or git+URL@COMMIT",
        )

    binaries = {binary.name: binary for binary in inspect_wheel(wheel, only=members)}
    judged = [
        library
        for library in judge_libraries(tuple(binaries.values()), target, wheel.name)
        if library.name in binaries
    ]
    used = [library for library in judged if library.use is not Use.OTHER]
    idle = {library.name for library in judged if library.use is Use.OTHER}
    if idle and not used:
        raise UsageError(
            f"{spec}: its libraries are for other devices than {target.title}",
            why=f"{', '.join(sorted(idle))} alone",
            hint=f"leave it out: --without {option}",
        )

    served = [binaries[library.name] for library in used]
    _require_serving(option, served, used, target)

    with translated("the source is not complete", dest):
        for member in members:
            if member not in idle:
                wheel.copy_member(member, dest / member)

    origin = "as upstream compiled it" if served else "as upstream has it installed"
    return f"vllm=={version}, sha256:{wheel.sha256}; {origin}"


def prove_parts(wheel: WheelFile, folder: Path, option: str) -> str:
    """Prove that a wheel has every file of the folder, with the same bytes, in a sentence.

    Raises ProofError.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        member = path.relative_to(folder).as_posix()
        digest = record_digest([path.read_bytes()])
        is_there = member in wheel.members
        if not is_there or record_digest(wheel.unpacked(member)) != digest:
            raise ProofError(
                f"{member} of {option} is not in the wheel as upstream's wheel has it",
                why="it was not installed, or another source installs a file of that name",
                hint="run again with --fresh",
            )

    return f"{option}: {len(files)} files are those of upstream's wheel"


def _require_serving(
    option: str,
    binaries: Binaries,
    judged: Judgements,
    target: Target,
) -> None:
    """Raise ProofError for libraries that do not load, or are linked with another CUDA."""
    hint = f"build it from its source: --source {option}=FOLDER"
    for library in judged:
        if library.missed:
            raise ProofError(
                f"{library.name} of upstream's wheel has no code that {target.title} loads",
                why="upstream compiled it for other devices",
                hint=hint,
            )
    if not binaries:
        return

    cuda = cuda_major(binaries)
    if cuda != target.cuda.partition(".")[0]:
        raise ProofError(
            f"{binaries[0].name} of upstream's wheel is linked with CUDA {cuda}",
            why=f"upstream compiled that release with it; this build is for CUDA {target.cuda}",
            hint=hint,
        )
