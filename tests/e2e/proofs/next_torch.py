"""A release that takes the next torch, rehearsed: the newest one's files, with that torch pinned.

    nox -s add-release-proof -- --next

An index on this machine has the release beside what the real one has. On a copy that knows no CUDA
of that torch, `add-release` asks for its row, and enters the rest: the committed row must give the
committed file. Then `apply`, `repack` of upstream's wheel (if the cache has it), and across for
aarch64 a build of one extension and two CUDA objects, with the libraries of that torch (2 GB).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

from packaging.version import Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT

from e2e.proofs.build_proof import check_objects, index_cutlass
from patchkit.digests import sha256_of
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.build import known_externals, recorded_needs
from patchkit.source.archive import unpack
from patchkit.source.fetch import cache_dir, fetch, index_client, pip_settings
from patchkit.source.releases import read_lock, read_wheel_lock
from patchkit.target import toolkit_of
from patchkit.wheel.build.machine import WORK
from support.local_server import LocalServer
from support.proving import require
from support.wheels import record, write_zip
from tools import run_program
from tools.stage import staged

TORCH, NEWEST = "2.15.0", load_recipe().newest
RELEASE = Version(f"{NEWEST.major}.{NEWEST.minor + 1}.0")
BUILT = Version("0.31.0")  # the newest that takes GCC 12
TAG = f"cu{toolkit_of(TORCH).cuda.replace('.', '')}.gb10."
TOOLCHAIN = "recipes/toolchain.toml"


def main() -> int:
    """Rehearse it all. Raises ProofError for what does not hold."""
    with tempfile.TemporaryDirectory(prefix="patchkit-next-") as name, staged() as stage:
        prove_release(Path(name), stage)
    print("every check held")
    return 0


def prove_release(folder: Path, stage: Path) -> None:
    """Enter the release into the copy, and make what users make of it."""
    tree = with_torch(NEWEST, RELEASE, folder)
    with index_with(tree, folder / "index") as index:
        prove_entry(stage, partial(run, stage, stage, {"PIP_INDEX_URL": index}))
    patchkit = partial(run, stage, folder, {}, "patchkit")
    patched = shutil.copytree(tree, folder / "patched")
    patchkit("apply", patched)
    label = re.findall(r'VLLM_VERSION_OVERRIDE", "(.*)"\)', (patched / "setup.py").read_text())
    require(f"{RELEASE}+{TAG}" in str(label), f"apply: the label is {label}")
    lock = read_wheel_lock(load_recipe().home / "wheels.toml")["aarch64"][str(NEWEST)]
    if (stock := cache_dir() / "sdists" / lock.filename).is_file():
        wheel = renamed_wheel(stock, folder)
        made = json.loads(patchkit("repack", wheel, "--sha256", sha256_of(wheel), "--json"))
        require(made["facts"]["wheel"].startswith(f"{RELEASE}+{TAG}"), str(made["wheel"]))
    else:
        print(f"repack: left out, {lock.filename} is not in the cache")
    without = [it.option for it in known_externals() if it.optional and it.pin_of(BUILT)]
    options = [word for option in without for word in ("--without", option)]
    options += ["--source", f"cutlass={index_cutlass()}", "--extensions", "cumem_allocator"]
    tree = with_torch(BUILT, BUILT, folder)
    told = patchkit(
        "build", "vllm", "--src", tree, "--cpu", "aarch64", "--dir", "built", *options, "--json"
    )
    facts = json.loads(told)["facts"]
    print(f"build: {facts['wheel']}, nvcc {facts['cuda']}, {facts['environment']}")
    require(facts["wheel"].startswith(f"{BUILT}+{TAG}reduced."), "the wheel's label is another")
    require(facts["cuda"] == toolkit_of(TORCH).nvcc, "another nvcc compiled it")
    root = WORK / f"vllm-{BUILT}-gb10-aarch64-reduced"
    check_objects(root, folder, "aarch64-linux-gnu-g++")


def with_torch(release: Version, version: Version, folder: Path) -> Path:
    """Write a release's sources, as another version that pins the torch."""
    root, torch = folder / f"vllm-{version}", recorded_needs(release).torch
    unpack(fetch("vllm", str(release), read_lock(load_recipe().home / "lock.toml")), root)
    pinned = ("pyproject.toml", "CMakeLists.txt", "requirements/cuda.txt")
    own = f"\nVersion: {release}\n", f"\nVersion: {version}\n"
    for path, pair in {"PKG-INFO": own, **dict.fromkeys(pinned, (torch, TORCH))}.items():
        text = (root / path).read_text()
        require(pair[0] in text, f"{path} of {release} has no {pair[0].strip()}")
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

    class Handler(SimpleHTTPRequestHandler):
        def send_head(self):  # type: ignore[no-untyped-def]
            if Path(self.translate_path(self.path)).exists():
                return super().send_head()
            self.send_response(302)
            self.send_header("Location", real + self.path.removeprefix("/simple"))
            return self.end_headers()

        def log_message(self, *_words: object) -> None: ...

    with LocalServer(partial(Handler, directory=str(folder))) as server:
        yield f"{server.url}/simple"


def prove_entry(stage: Path, start: partial[str]) -> None:
    """Add the release to a copy without the wheels of its CUDA; at first without its row, too."""
    cuda, place = toolkit_of(TORCH).cuda, stage / TOOLCHAIN
    whole = place.read_text()
    own = rf'^\[\[{{}}\]\]\ncuda = "{re.escape(cuda)}"\n(?:.+\n)*\n?'
    known = re.sub(own.format("wheel"), "", whole, flags=re.MULTILINE).rstrip("\n") + "\n"
    place.write_text(re.sub(own.format("toolkit"), "", known, flags=re.MULTILINE))
    said = start("tools.add_release", str(RELEASE), code=1)
    asked = f"to decide first: {TOOLCHAIN}: torch {TORCH} is for CUDA {cuda}"
    require(asked in said, "it does not ask for the row")
    place.write_text(known)
    print(said, start("tools.add_release", str(RELEASE)), sep="\n")
    require(place.read_text() == whole, f"{TOOLCHAIN} comes back otherwise")


def renamed_wheel(stock: Path, folder: Path) -> Path:
    """Copy upstream's wheel under the made-up version, its METADATA with the torch."""
    old, new, torch = f"vllm-{NEWEST}", f"vllm-{RELEASE}", recorded_needs(NEWEST).torch
    with zipfile.ZipFile(stock) as source:
        members = {name.replace(old, new): source.read(name) for name in source.namelist()}
    home = f"{new}.dist-info"
    del members[f"{home}/RECORD"]
    for name in (f"{home}/METADATA", "vllm/_version.py"):
        text = members[name].decode().replace(str(NEWEST), str(RELEASE))
        members[name] = text.replace(f"torch=={torch}", f"torch=={TORCH}").encode()
    members[f"{home}/RECORD"] = record(home, members)
    return write_zip(folder / stock.name.replace(old, new), members, zipfile.ZIP_DEFLATED, 1)


def run(
    stage: Path, cwd: Path, more: dict[str, str], module: str, *words: object, code: int = 0
) -> str:
    """Run a module of the copy, which has to end with a code; return its output."""
    own = {"PYTHONPATH": f"{stage}:{stage / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", module, *map(str, words)]
    environment = os.environ | own | more
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    what = " ".join(command[2:4])
    require(done.returncode == code, f"{what} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    run_program(main)
