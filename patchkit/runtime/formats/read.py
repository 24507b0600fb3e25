"""Read what a file says: the one entry for all formats."""

from __future__ import annotations

from patchkit.runtime.files.collected import Collected
from patchkit.runtime.files.content import FileContent, FileKind
from patchkit.runtime.files.value import MappedText, Value, known
from patchkit.runtime.formats.dockerfile import read_dockerfile
from patchkit.runtime.formats.env_lines import read_env_lines
from patchkit.runtime.formats.kind import is_env_file, kind_by_name, kind_of
from patchkit.runtime.formats.python_code import read_python
from patchkit.runtime.formats.unit import read_unit
from patchkit.runtime.formats.yaml_file import read_yaml
from patchkit.runtime.shell.programs import Place
from patchkit.runtime.shell.script import read_shell


def read_content(text: str, where: str) -> FileContent:
    """Return what a file says; ``where`` is its name, which tells formats apart.

    Nothing is run. What cannot be read is among the ``problems``; no text raises anything.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    kind = kind_of(text, where)
    found = Collected()
    try:
        _read(kind, text, found)
    except RecursionError:
        found.problem(1, "what is nested too deeply")
    except TimeoutError:
        found.problem(1, "what takes too long to parse")
    return found.content(kind)


def _read(kind: FileKind, text: str, found: Collected) -> None:
    def files(name: str, written: Value, place: Place) -> None:
        _written(name, written, place, found)

    if kind is FileKind.ENV and is_env_file(text):
        read_env_lines(text, found)
    elif kind in (FileKind.YAML, FileKind.JSON):
        # JSON may be indented with tabs, YAML may not.
        read_yaml(text.replace("\t", " ") if kind is FileKind.JSON else text, found, files)
    elif kind is FileKind.DOCKERFILE:
        read_dockerfile(text, found, files)
    elif kind is FileKind.SYSTEMD:
        read_unit(text, found, files)
    elif kind is FileKind.PYTHON:
        read_python(text, found, files)
    else:
        # What is named as an env file and holds more than lines is sourced, mostly with set -a.
        is_env = kind is FileKind.ENV
        read_shell(known(text, 1), Place(line=1), found, files=files, all_exported=is_env)


def _written(name: str, written: Value, place: Place, found: Collected) -> None:
    """Read what a script writes to a file, if the file's name or the text say what that is."""
    kind = kind_by_name(name)
    if kind is None and written.text.startswith("#!"):
        kind = kind_of(written.text, "")
    if kind is None or place.depth > 2:
        return
    inner = Collected()
    source = MappedText(written)
    _read(kind, written.text, inner)
    found.add(inner, source.lines(), place.block)
