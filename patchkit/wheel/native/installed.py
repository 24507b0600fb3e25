"""Make the libraries of installed packages native, recorded in a ledger, and revert that."""

from functools import partial
from operator import attrgetter
from pathlib import Path

from patchkit.apply import commit_libraries, revert_libraries
from patchkit.frozen import Texts
from patchkit.patching.forced_revert import revert_by_force
from patchkit.patching.workspace import Workspace, locked_workspace
from patchkit.source.detect import detect_installed
from patchkit.source.fetch import Progress
from patchkit.source.project import projects
from patchkit.target import Target
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.native.make import (
    NativeLibraries,
    NativeLibrary,
    list_installed,
    make_native,
    package_libraries,
)


def make_installed_native(
    site: Path,
    target: Target,
    assembler: Assembler,
    progress: Progress,
) -> NativeLibraries:
    """Make the libraries of an environment native; return the libraries that had PTX to assemble.

    The changes of one package are made completely or not at all. Raises the errors of
    ``make_native`` and ``commit_libraries``.
    """
    made: list[NativeLibrary] = []
    writable = filter(attrgetter("writable"), list_installed(site, target))
    for project in dict.fromkeys(library.project for library in writable):
        with locked_workspace(partial(detect_installed, site, project)) as workspace:
            libraries = make_package_native(workspace, target, assembler, progress)
            commit_libraries(workspace, new_files(libraries), target)
        made += libraries
    return tuple(made)


def make_package_native(
    workspace: Workspace,
    target: Target,
    assembler: Assembler,
    progress: Progress,
) -> NativeLibraries:
    """Write native libraries of one installed package to a folder; nothing is replaced yet.

    Raises UsageError for a source tree, and the errors of ``make_native``.
    """
    names = package_libraries(workspace.tree, target)
    files = {name: workspace.upstream_library(name) for name in names}
    folder = workspace.make_folder()
    return make_native(files, target, folder, assembler, progress)


def new_files(libraries: NativeLibraries) -> dict[str, Path]:
    """Return path in the environment → the new file to commit there."""
    return {library.name: library.path for library in libraries if library.path}


def revert_installed(site: Path, *, force: bool = False) -> dict[str, Texts]:
    """Restore upstream's libraries in all packages of an environment; return package → their paths.

    Interrupted changes are undone as well. ``force`` also restores damaged packages, but then
    leaves packages of known projects alone, for which `revert` has an option of its own.
    """
    restored = {}
    packages = {project.package: name for name, project in projects().items()}
    for state in sorted(site.glob("*/.patchkit")):
        home = state.parent.name
        name = packages.get(home, home.partition("-")[0])
        if home not in packages and name == home:
            continue

        find = partial(detect_installed, site, name)
        if not force:
            with locked_workspace(find) as workspace:
                restored[workspace.tree.project] = revert_libraries(workspace)
        elif home not in packages:
            restored[find().project] = tuple(revert_by_force(find()).restored)
    return {project: paths for project, paths in restored.items() if paths}
