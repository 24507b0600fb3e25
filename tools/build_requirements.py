"""Lock what building vLLM takes: recipes/vllm/requirements/torch-X.Y.Z.txt, one for each torch.

    python -m tools.build_requirements PYPROJECT ...

reads the pyproject.toml of a release: what its build requires, torch among it, and for which
Pythons. uv resolves that for the machines that are supported. Versions stay that are locked already
and still fit; what is new comes from the index that pip is configured for.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version
from uv import find_uv_bin

from patchkit.process import run
from patchkit.source.fetch import pip_settings

FOLDER = Path(__file__).parents[1] / "recipes/vllm/requirements"
_CPUS = ("aarch64", "x86_64")
_HEAD = """\
# Everything that building vLLM with torch {torch} takes, for Python {python} on aarch64 and x86-64.
# Made by tools/build_requirements.py.

"""
# Of which only the table of uv counts: where a lock has to work cannot be said in an option.
_PROJECT = """\
[project]
name = "lock"
version = "0"
[tool.uv]
environments = {environments}
"""


def lock(pyproject: Path, folder: Path = FOLDER) -> Path:
    """Write the file of the torch that a release builds with. Raises HostError if uv fails."""
    release = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    wanted = [Requirement(each) for each in release["build-system"]["requires"]]
    python = Requirement(f"python{release['project']['requires-python']}").specifier
    # A universal lock that holds for the oldest Python also holds for the later ones.
    oldest = min(each.version for each in python if each.operator == ">=")
    (torch,) = (
        str(each.specifier).strip("= ") for each in wanted if each.name == "torch"
    )
    path = folder / f"torch-{torch}.txt"
    # What is not torch's stays as it was with the torch before: CMake 4.4.5 finds no Python across.
    earlier = sorted(
        FOLDER.glob("torch-*.txt"), key=lambda each: Version(each.stem[6:])
    )
    if not path.exists() and earlier:
        shutil.copy2(earlier[-1], path)
    # That one alone: of a version that is in several, uv sees the files of one.
    settings = pip_settings()
    index = (
        {"UV_DEFAULT_INDEX": settings["index-url"]} if "index-url" in settings else {}
    )
    with tempfile.TemporaryDirectory() as scratch:
        where = [
            f"sys_platform == 'linux' and platform_machine == '{cpu}'" for cpu in _CPUS
        ]
        Path(scratch, "pyproject.toml").write_text(_PROJECT.format(environments=where))
        run(
            *(find_uv_bin(), "pip", "compile", "-", f"--output-file={path.absolute()}"),
            *("--universal", f"--python-version={oldest}", "--no-python-downloads"),
            *(
                "--generate-hashes",
                "--only-binary=:all:",
                "--no-header",
                "--no-annotate",
            ),
            input="\n".join(map(str, wanted)).encode(),
            cwd=Path(scratch),
            env=os.environ | index,
            timeout=None,
        )
    text = path.read_text(encoding="utf-8")
    path.write_text(_HEAD.format(torch=torch, python=python) + text, encoding="utf-8")
    return path


if __name__ == "__main__":
    for name in sys.argv[1:]:
        lock(Path(name))
