"""patchkit build vllm"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from packaging.version import Version
from rich.text import Text

from patchkit.cli import show
from patchkit.cli.options import as_json, build_arch, find_target, progress, say, told
from patchkit.errors import UsageError
from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.source.archive import unpack
from patchkit.source.detect import detect
from patchkit.source.lock import read_lock
from patchkit.source.resolve import Options, Report, fetch_release
from patchkit.target import Target
from patchkit.wheel.build_recipe import by_option
from patchkit.wheel.facts import tree_digest
from patchkit.wheel.inputs import parse_given
from patchkit.wheel.jobs import Jobs, jobs_for
from patchkit.wheel.network import can_cut_off
from patchkit.wheel.toolchain import find_toolchain
from patchkit.wheel.vllm import JOB_MEMORY, Built, Order, build_vllm, check_machine
from patchkit.wheel.wheelhouse import add, make_room

_EPILOG = """\
\b
On a Spark:
  patchkit build vllm --version 0.25.1
Without extensions whose sources cannot be had, with CUTLASS from a folder:
  patchkit build vllm --version 0.25.1 --source cutlass=cutlass-4.4.2 \\
    --without flash-attn --without flashmla
For an H200, to test there:
  patchkit build vllm --version 0.25.1 --target h200
"""


@click.command(epilog=_EPILOG)
@click.option("--version", "version", metavar="X.Y.Z", help="[default: the newest that is known]")
@click.option("--src", "source", metavar="SOURCE", help="A folder or an sdist.")
@click.option("--target", default="gb10", show_default=True, metavar="gb10|thor|h200")
@click.option("--arch", metavar="native|family", default="native", show_default=True)
@click.option("--host", metavar="aarch64|x86_64", help="The CPU.  [default: this machine's]")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="[default: cores, memory]")
@click.option(
    "--with", "also", multiple=True, metavar="ID", help="An optional fix, too; `patchkit fixes`."
)
@click.option("--skip", multiple=True, metavar="ID", help="Leave a fix out.")
@click.option("--without", multiple=True, metavar="NAME", help="Leave an extension out.")
@click.option(
    "--source", "given", multiple=True, metavar="NAME=WHAT", help="A source of another project."
)
@click.option(
    "--mirror",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder of such sources.",
)
@click.option("--cuda", metavar="DIR|locked", default="locked", show_default=True)
@click.option(
    "--python",
    type=click.Path(path_type=Path, exists=True),
    help="One with torch and build tools.  [default: a locked environment]",
)
@click.option(
    "--requirements",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="What the environment is made of, with hashes.  [default: the recipe's]",
)
@click.option("--extensions", default="", metavar="A,B", help="Only these: for tests.")
@click.option("--fresh", is_flag=True, help="Do not go on with an interrupted build.")
@click.option("--offline", is_flag=True, help="Use only what is in caches and mirrors.")
@click.option(
    "--dir",
    "house",
    type=click.Path(path_type=Path),
    default=Path("wheelhouse"),
    show_default=True,
    help="Where the wheel goes.",
)
@click.option(
    "--objects", type=click.Path(path_type=Path), help="Write the objects' digests there."
)
@as_json
def command(
    version: str | None,
    source: str | None,
    target: str,
    arch: str,
    host: str | None,
    jobs: int | None,
    also: tuple[str, ...],
    skip: tuple[str, ...],
    without: tuple[str, ...],
    given: tuple[str, ...],
    mirror: Path | None,
    cuda: str,
    python: Path | None,
    requirements: Path | None,
    extensions: str,
    fresh: bool,
    offline: bool,
    house: Path,
    objects: Path | None,
    as_json: bool,
) -> None:
    """vLLM for one device, from its sources: an hour on a Spark, minutes on many cores."""
    began = time.monotonic()
    device = find_target(target)
    _check_host(device, host)
    request = Request(
        target=device, arch=build_arch(arch), also=frozenset(also), skip=frozenset(skip)
    )
    number = Jobs(jobs, "as asked for") if jobs else jobs_for(JOB_MEMORY)
    with progress() as report:
        path, identity, number_of = _source(version, source, offline=offline, report=report)
        for note in check_machine(number_of, python, device.cuda):
            say(note)
        toolchain = find_toolchain(
            platform.machine(),
            cuda=device.cuda,
            toolkit=Path(cuda) if cuda != "locked" else None,
            locked=cuda == "locked",
            offline=offline,
            progress=report("CUDA toolkit"),
        )
    order = Order(
        source=path,
        identity=identity,
        version=number_of,
        request=request,
        toolchain=toolchain,
        python=python and python.absolute(),
        requirements=requirements and requirements.absolute(),
        jobs=number.number,
        without=frozenset(each.option for each in by_option(without)),
        given=parse_given(given),
        mirror=mirror and mirror.absolute(),
        extensions=frozenset(filter(None, extensions.split(","))),
        offline=offline,
        fresh=fresh,
    )
    make_room(house, order.expected)
    _foretell(order, number)
    with progress("steps") as report:
        built = build_vllm(order, lambda task: told(report(task), f"{task}:"))
    placed = add(house, built.wheel, built.facts, say=say)
    if objects:
        objects.write_text(json.dumps(built.objects, indent=1) + "\n", encoding="utf-8")
    _show(order, built, placed, time.monotonic() - began, as_json=as_json)


def _check_host(device: Target, host: str | None) -> None:
    here = platform.machine()
    if host not in (None, here):
        raise UsageError(
            f"vLLM for {host} cannot be built on {here}",
            why="its CMake asks torch through Python, and both are for the CPU that runs them",
            hint=f"build on a machine with {host}, such as the {device.title}; or take upstream's "
            f"kernels: patchkit repack vllm==X.Y.Z --platform {host}",
        )
    if here != device.cpu:
        say(f"for {here}: a wheel for tests; {device.title} has {device.cpu}")


def _source(
    version: str | None, source: str | None, *, offline: bool, report: Report
) -> tuple[Path, str, Version]:
    """What is built: its path, what it is, and its version."""
    if version is not None and source is not None:
        raise UsageError("--version and --src exclude each other: the sources tell their version")
    recipe = load_recipe("vllm")
    if source is None:
        chosen = version or str(recipe.newest)
        lock = read_lock(recipe.home / "lock.toml")
        options = Options(
            project="vllm",
            lock=recipe.home / "lock.toml",
            check=recipe.check,
            report=report,
            offline=offline,
        )
        recipe.check(Version(chosen))
        archive = fetch_release(f"vllm=={chosen}", options)
        return archive, f"sha256:{lock[str(Version(chosen))].sha256}", Version(chosen)
    return _own_source(Path(source))


def _own_source(path: Path) -> tuple[Path, str, Version]:
    if path.is_file():
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        with tempfile.TemporaryDirectory(prefix="patchkit-") as folder:
            tree = detect(unpack(path, Path(folder) / "tree"))
            identity = f"sha256:{digest}"
    else:
        tree = detect(path)
        identity = f"folder:sha256:{tree_digest(path, aside=('.git', 'build', '.deps'))}"
    load_recipe("vllm").check(tree.version)
    return path.absolute(), identity, tree.version


def _foretell(order: Order, jobs: Jobs) -> None:
    """What is going to happen, before it takes long."""
    say(f"compiling in {order.work} with {jobs.number} jobs ({jobs.reason})")
    say(f"what the build says: {order.work}/log.txt")
    for each in by_option(order.without):
        if each.serves(order.request.target.major):
            say(f"without {each.option}: {each.cost}")
    if not can_cut_off():
        say("not cut off from the network: this machine lets nobody make network namespaces")


def _show(order: Order, built: Built, placed: Path, seconds: float, *, as_json: bool) -> None:
    if as_json:
        show.print_json(_fields(built, placed, seconds))
        return
    console, tools = show.console(), order.toolchain
    archs = f"{built.facts['archs']}, {tools.machine}"
    title = (f"vllm {order.version}", "bold")
    console.print(Text.assemble(title, f"  →  {order.request.target.title}, {archs}"))
    lines = [
        f"nvcc {tools.cuda}{' (locked)' if tools.locked else ''}, {tools.compiler}",
        *(f"{name}: {what}" for name, what in built.facts["environment"].items()),
        *(f"{name}: {what}" for name, what in built.facts["externals"].items()),
        *built.proofs,
        f"{placed}  {placed.stat().st_size / 1e6:.1f} MB, {seconds:.0f} s",
    ]
    for line in lines:
        console.print(Text.assemble(("✓ ", "green"), line), soft_wrap=True)
    if order.extensions:
        console.print(Text.assemble(("note ", "yellow"), "reduced: for tests, not for use"))
    console.print(f"  next: pip install {placed}", soft_wrap=True)


def _fields(built: Built, placed: Path, seconds: float) -> Mapping[str, Any]:
    return {
        "wheel": str(placed),
        "facts": dict(built.facts),
        "proofs": list(built.proofs),
        "log": str(built.log),
        "seconds": round(seconds, 1),
    }
