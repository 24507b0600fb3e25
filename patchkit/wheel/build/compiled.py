"""Order a compiled wheel, patch its sources, and pack what was compiled."""

import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import ClassVar

from patchkit import __version__
from patchkit.apply import apply
from patchkit.digests import tree_digest
from patchkit.errors import BuildError
from patchkit.frozen import frozen
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, State
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import open_workspace
from patchkit.process import run
from patchkit.records import RECIPES
from patchkit.source.archive import unpack
from patchkit.source.origin import SourceOrigin
from patchkit.source.tree import Sandboxed
from patchkit.target import Target
from patchkit.wheel.build.machine import WORK, emptied
from patchkit.wheel.build.make import BuiltWheel, clean_environment, platform_tag
from patchkit.wheel.build.toolchain import Toolchain
from patchkit.wheel.device.inspect import prove_exact
from patchkit.wheel.device.libraries import require_portable
from patchkit.wheel.file.labels import as_text
from patchkit.wheel.file.wheelfile import FACTS, Facts
from patchkit.wheel.file.write import seal_wheel


@frozen
class CompileOrder:
    """An order for a wheel that is compiled for one device, from verified sources.

    With ``fresh``, nothing of an interrupted build is used.
    """

    project: ClassVar[str]
    package: ClassVar[str]
    pythons: ClassVar[str] = "py3-none"

    origin: SourceOrigin
    request: Request
    toolchain: Toolchain
    fresh: bool

    @property
    def target(self) -> Target:
        return self.request.target

    @property
    def version(self) -> str:
        return self.origin.version.public

    @property
    def reduced(self) -> str:
        """Return ``.reduced`` for a part that is built for tests, else an empty text."""
        return ""

    @property
    def label(self) -> str:
        """Return the beginning of the wheel's local version."""
        return f"{self.target.cuda_tag}.{self.target.name}{self.reduced}"

    @property
    def work(self) -> Path:
        """Return the work folder in which the project is compiled."""
        part = self.reduced.replace(".", "-")
        machine = f"{self.toolchain.machine}{part}"
        return WORK / f"{self.project}-{self.version}-{self.target.name}-{machine}"

    @property
    def expected(self) -> str:
        """Return the file name of the wheel, without the digest that only the build knows."""
        wheel = f"{self.package}-{self.version}+{self.label}-{self.pythons}"
        return f"{wheel}-linux_{self.toolchain.machine}.whl"


def patch_sources(order: CompileOrder, source: Path) -> Facts:
    """Copy or unpack an order's sources to ``source``, apply the fixes, return the build's facts.

    Raises the errors of ``apply``, SourceError, StorageError.
    """
    origin = order.origin
    project = order.project
    if origin.path.is_dir():
        # The facts have a digest of the whole tree, so git's history and objects of an earlier
        # build stay where they are.
        ignored = shutil.ignore_patterns(".git", "build")
        shutil.copytree(origin.path, source, symlinks=True, ignore=ignored)
    else:
        unpack(origin.path, source)

    # The sources are patched anew: with the user's patches that the folder's ledger names, too.
    ledger = open_workspace(source, project).ledger
    patches = ledger.request.patches if ledger else ()
    request = replace(order.request, patches=patches)

    # A lacking sandbox is no obstacle: the build that follows runs the source's code anyway.
    possible = Sandboxed.IF_POSSIBLE
    recipe = load_recipe(project)
    outcome = apply(source, recipe, request, anew=True, sandboxed=possible)
    fixes = {"fixes": fix_states(outcome)}
    return order_facts(order, source) | request.patch_facts | fixes


def fix_states(outcome: Applied) -> list[str]:
    """Return the state of each fix that applies to the release, for the facts."""
    return [
        f"{verdict.fix.id}: {verdict.state.value}"
        for verdict in outcome.verdicts
        if verdict.state is not State.NOT_APPLICABLE
    ]


def order_facts(order: CompileOrder, source: Path) -> Facts:
    """Return the facts of every compiled wheel; ``source`` has the patched sources."""
    tools = order.toolchain
    return {
        "project": order.project,
        "version": order.version,
        "patchkit": __version__,
        "source": order.origin.identity,
        "tree": f"sha256:{tree_digest(source)}",
        "target": order.target.name,
        "machine": tools.machine,
        "cuda": tools.cuda,
        "compiler": tools.compiler,
    }


def fill_template(facts: Facts, name: str, **values: str) -> str:
    """Return a template of the project's recipe with its facts, and some other values, in it."""
    project = facts["project"]
    template = (load_recipe(project).home / f"{name}.template").read_text("utf-8")
    terms = facts["license"][project]
    return Template(template).substitute(facts, terms=terms, **values)


def pack_wheel(
    root: Path,
    order: CompileOrder,
    facts: Facts,
    pyproject: str,
    files: Mapping[str, bytes],
    licenses: Iterable[Path],
) -> BuiltWheel:
    """Pack ``files``, path → content, with scikit-build-core, and seal the wheel.

    Prove that its libraries are portable, and compiled for exactly the order's device. ``root`` is
    the work folder, ``pyproject`` the text of the project's pyproject.toml. Raises BuildError,
    ProofError.
    """
    project = emptied(root / "project")
    shutil.copy(RECIPES / "wheel" / "CMakeLists.txt", project)
    (project / "pyproject.toml").write_text(pyproject, "utf-8")
    for path, content in files.items():
        place = project / "files" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    out = emptied(root / "raw")
    # Without isolation: scikit-build-core comes with the extra ``build``.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command += [f"--outdir={out}", str(project)]
    # By itself a wheel gets the tag of this machine's CPU.
    platform = {"_PYTHON_HOST_PLATFORM": f"linux-{facts['machine']}"}
    run(*command, kind=BuildError, env=clean_environment(root) | platform)
    (raw,) = out.glob("*.whl")

    texts = {
        f"licenses/{path.name}": path.read_text("utf-8")
        for path in licenses
        if path.is_file()
    }
    texts[FACTS] = as_text(facts)
    # The sealed wheel's tag says which glibc its libraries need.
    tag = platform_tag(raw)
    sealed = seal_wheel(raw, emptied(root / "sealed"), tag, texts, {})

    for binary in require_portable(sealed):
        prove_exact(binary, order.target, cpu=order.toolchain.machine)
    log = root / "log.txt"  # of the compilers
    return BuiltWheel(wheel=sealed, facts=facts, log=log)
