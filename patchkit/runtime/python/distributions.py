"""Find installed distributions by their .dist-info folders; nothing is imported.

Not with importlib.metadata: it takes longer to import than click, and probe is to start quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from patchkit.errors import HostError
from patchkit.process import ask

_SUFFIX = ".dist-info"
_SECONDS = 10.0  # for an interpreter to start; .pth files may do anything


def import_path(venv: str) -> list[str]:
    """Return the folders that an environment imports from; none for ``""``.

    Its own come first, then what its Python adds: folders of .pth files, and those of the system in
    an environment that has them. Without a Python that runs it is its own alone.
    """
    if not venv:
        return []
    own = sorted(map(str, Path(venv).glob("lib/python3*/*-packages")))
    try:
        prefix, path = ask(
            Path(venv, "bin", "python"),
            "import sys; answer = sys.prefix, [each for each in sys.path if each]",
            timeout=_SECONDS,
        )
    except HostError:
        return own
    same = Path(str(prefix)).resolve() == Path(venv).resolve()
    return list(dict.fromkeys([*own, *map(str, path)])) if same else own


def distributions(path: Iterable[str]) -> dict[str, tuple[Path, ...]]:
    """Return project → its folders on ``sys.path``, in this order; the first one counts.

    The project is written as in the folder's name: ``nvidia_nccl_cu13``.
    """
    found: dict[str, tuple[Path, ...]] = {}
    for folder in dict.fromkeys(path):
        for name in _folder_names(folder):
            if name.endswith(_SUFFIX):
                whole = name.removesuffix(_SUFFIX)
                # The version is what follows the last dash; a damaged name may have none.
                project = (whole.rpartition("-")[0] or whole).lower()
                project = project.replace("-", "_").replace(".", "_")
                found[project] = (*found.get(project, ()), Path(folder, name))
    return found


def _folder_names(folder: str) -> list[str]:
    try:
        return sorted(each.name for each in Path(folder).iterdir())
    except OSError:  # sys.path may name archives, and folders that do not exist
        return []


def header(home: Path, name: str) -> str:
    """Return a field of METADATA, "" if there is none."""
    return next(headers(home, name), "")


def headers(home: Path, name: str) -> Iterator[str]:
    """Yield every value of a field of METADATA. After the first empty line comes prose."""
    for line in _file_lines(home / "METADATA"):
        field, _, value = line.partition(":")
        if field.strip().lower() == name.lower():
            yield value.strip()
        if not line.strip():
            break


def holds(home: Path, member: str) -> bool:
    """Return whether RECORD lists a file."""
    return any(line.startswith(f"{member},") for line in _file_lines(home / "RECORD"))


def _file_lines(place: Path) -> list[str]:
    try:
        return place.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
