"""A release that takes the next torch, rehearsed: the newest one's files, with that torch pinned.

    nox -s add-release-proof -- --next

An index on this machine has the release beside what the real one has. On a copy that knows no CUDA
of that torch, `add-release` asks for its row, and enters the rest: the committed row must give the
committed file. Then `apply` labels the release with its CUDA; what `repack` and `build` make of
that torch is tested with small wheels.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from packaging.version import Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT

from patchkit.digests import sha256_of
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.build import recorded_needs
from patchkit.source.archive import unpack
from patchkit.source.fetch import fetch, index_client, pip_settings
from patchkit.source.releases import read_lock
from patchkit.target import toolkit_of
from support.local_server import LocalServer, QuietHandler
from support.proving import require
from tools import run_program
from tools.stage import staged

TORCH, NEWEST = "2.15.0", load_recipe("vllm").newest
RELEASE = Version(f"{NEWEST.major}.{NEWEST.minor + 1}.0")
TAG = f"cu{toolkit_of(TORCH).cuda.replace('.', '')}.gb10."
TOOLCHAIN = "recipes/toolchain.toml"


def main() -> int:
    """Rehearse it all. Raises ProofError for what does not hold."""
    with (
        tempfile.TemporaryDirectory(prefix="patchkit-next-") as name,
        staged() as stage,
    ):
        prove_release(Path(name), stage)
    print("every check held")
    return 0


def prove_release(folder: Path, stage: Path) -> None:
    """Enter the release into the copy, and patch it."""
    tree = with_torch(folder)
    with index_with(tree, folder / "index") as index:
        prove_entry(stage, partial(run, stage, stage, {"PIP_INDEX_URL": index}))
    run(stage, folder, {}, "patchkit", "apply", tree)
    label = re.findall(
        r'VLLM_VERSION_OVERRIDE", "(.*)"\)', (tree / "setup.py").read_text()
    )
    require(f"{RELEASE}+{TAG}" in str(label), f"apply: the label is {label}")


def with_torch(folder: Path) -> Path:
    """Write the newest release's sources, as the next version, which pins the torch."""
    root, torch = folder / f"vllm-{RELEASE}", recorded_needs(NEWEST).torch
    unpack(
        fetch("vllm", str(NEWEST), read_lock(load_recipe("vllm").home / "lock.toml")),
        root,
    )
    pinned = ("pyproject.toml", "CMakeLists.txt", "requirements/cuda.txt")
    own = f"\nVersion: {NEWEST}\n", f"\nVersion: {RELEASE}\n"
    for path, pair in {
        "PKG-INFO": own,
        **dict.fromkeys(pinned, (torch, TORCH)),
    }.items():
        text = (root / path).read_text()
        require(pair[0] in text, f"{path} of {NEWEST} has no {pair[0].strip()}")
        (root / path).write_text(text.replace(*pair))
    return root


@contextmanager
def index_with(tree: Path, folder: Path) -> Iterator[str]:
    """Serve an index that has the release, and leads to the real one for all else."""
    page, sdist = folder / "simple" / "vllm", folder / f"{tree.name}.tar.gz"
    page.mkdir(parents=True)
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tree, tree.name)
    links = {sdist.name: f"/{sdist.name}#sha256={sha256_of(sdist)}"}
    with index_client() as client:
        for it in client.get_project_page("vllm").packages:
            if it.package_type == "wheel" and it.version == str(NEWEST):
                name = it.filename.replace(str(NEWEST), str(RELEASE), 1)
                links[name] = f"{it.url}#sha256={it.digests['sha256']}"
    lines = [f'<a href="{url}">{name}</a>\n' for name, url in links.items()]
    (page / "index.html").write_text("".join(lines))
    real = pip_settings().get("index-url", PYPI_SIMPLE_ENDPOINT).rstrip("/")

    class Handler(QuietHandler, SimpleHTTPRequestHandler):
        def send_head(self):  # type: ignore[no-untyped-def]
            if Path(self.translate_path(self.path)).exists():
                return super().send_head()
            self.send_response(302)
            self.send_header("Location", real + self.path.removeprefix("/simple"))
            return self.end_headers()

    with LocalServer(partial(Handler, directory=str(folder))) as server:
        yield f"{server.url}/simple"


def prove_entry(stage: Path, start: partial[str]) -> None:
    """Add the release to a copy without the wheels of its CUDA; at first without its row, too."""
    cuda, place = toolkit_of(TORCH).cuda, stage / TOOLCHAIN
    whole = place.read_text()
    own = rf'^\[\[{{}}\]\]\ncuda = "{re.escape(cuda)}"\n(?:.+\n)*\n?'
    known = (
        re.sub(own.format("wheel"), "", whole, flags=re.MULTILINE).rstrip("\n") + "\n"
    )
    place.write_text(re.sub(own.format("toolkit"), "", known, flags=re.MULTILINE))
    said = start("tools.add_release", str(RELEASE), code=1)
    asked = f"to decide first: {TOOLCHAIN}: torch {TORCH} is for CUDA {cuda}"
    require(asked in said, "it does not ask for the row")
    place.write_text(known)
    print(said, start("tools.add_release", str(RELEASE)), sep="\n")
    require(place.read_text() == whole, f"{TOOLCHAIN} comes back otherwise")


def run(
    stage: Path,
    cwd: Path,
    more: dict[str, str],
    module: str,
    *words: object,
    code: int = 0,
) -> str:
    """Run a module of the copy, which has to end with a code; return its output."""
    own = {"PYTHONPATH": f"{stage}:{stage / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", module, *map(str, words)]
    environment = os.environ | own | more
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True
    )
    what = " ".join(command[2:4])
    require(
        done.returncode == code, f"{what} ended with {done.returncode}\n{done.stdout}"
    )
    return done.stdout


if __name__ == "__main__":
    run_program(main)
