"""Prove an installation: each step says what held, or raises ProofError."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cross_proof.arm64 import CPU, RootFs
from e2e.cross_proof.operators import Loaded, differences
from e2e.cross_proof.wheels import NEEDS, Lock, read_pip_check
from e2e.proofs.repack_proof import modules, patched_files
from patchkit.errors import ProofError
from patchkit.source.fetch import fetch
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.vllm.repack_origin import upstream_wheels
from support.nccl_wheel import LIBRARY
from support.nccl_wheel import content as libnccl
from support.proving import require

# Folders inside: the checkout, the wheelhouse, upstream's libraries, a stand-in for the driver.
CHECKOUT, HOUSE, UPSTREAM, DRIVER = (
    f"/srv/{name}" for name in ("patchkit", "wheelhouse", "upstream", "driver")
)
PYTHON = "/usr/bin/python3"
INSIDE = f"{CHECKOUT}/tests/e2e/cross_proof/inside.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A wheelhouse in a root file system; ``wheels`` are those that patchkit made, by project."""

    root: RootFs
    lock: Lock
    wheels: Mapping[str, Path]

    def python(self, *words: str, **variables: str) -> str:
        """Return what the other Python says, beside a stand-in for the driver's library."""
        return self.root.run(PYTHON, "-W", "ignore", *words, LD_LIBRARY_PATH=DRIVER, **variables)

    def answers(self, *words: str) -> list[dict[str, Any]]:
        """Return the lines of JSON that a question of ``inside.py`` is answered with."""
        said = self.python(INSIDE, *words)
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def check(place: Installation) -> str:
    """Ask pip which requirements are not met, and which wheels are for another machine."""
    excused, wrong = read_pip_check(place.python("-c", _PIP_CHECK), place.lock)
    require(not wrong, "; ".join(wrong[:3]))
    return "; ".join(["nothing else is missing or wrong", *excused])


# It ends with 1 for whatever it has to say.
_PIP_CHECK = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "check"])
"""


def load(place: Installation) -> str:
    """Load every extension of the vLLM wheel, and compare its operators with upstream's."""
    wheel = place.wheels["vllm"]
    with WheelFile(wheel) as opened:
        facts, paths = opened.facts, extensions(opened, place.root.python)
        digests = {path: _digest(opened, path) for path in paths}
    torch, ours = _loaded(place, paths, place.root.packages)
    require_libnccl(place, torch["nccl"])
    count = sum(len(each.operators) for each in ours)
    told = f"torch {torch['torch']}; {len(ours)} loaded, {count} operators"
    same, theirs = _upstream(place, facts, digests)
    found = list(differences([each for each in ours if each.path not in same], theirs, facts))
    if unexplained := [what for what, why in found if not why]:
        raise ProofError(f"{told}; not as upstream's:\n    " + "\n    ".join(unexplained))
    explained = "".join(f"\n    {what}: {why}" for what, why in found)
    return (
        f"{told}; {len(same)} are upstream's bytes; {len(found)} differences, explained{explained}"
    )


def extensions(wheel: WheelFile, python: str) -> list[str]:
    """Return the extensions of a wheel that a Python can load."""
    tagged = f".cpython-{python.replace('.', '')}-{CPU}-linux-gnu.so"
    return [path for path in wheel.members if path.endswith((".abi3.so", tagged))]


def _digest(wheel: WheelFile, path: str) -> str:
    digest = hashlib.sha256()
    for chunk in wheel.unpacked(path):
        digest.update(chunk)
    return digest.hexdigest()


def _loaded(
    place: Installation, paths: Sequence[str], folder: Path
) -> tuple[dict[str, Any], list[Loaded]]:
    """Load extensions of a folder in one process; return what is said of torch, and of them."""
    prefix = place.root.seen_inside(folder)
    torch, *rest = place.answers("libraries", *(f"{prefix}/{path}" for path in paths))
    loaded = [
        Loaded(
            path=each["path"].removeprefix(f"{prefix}/"),
            operators=each.get("operators", {}),
            names=tuple(each.get("names", ())),
            error=each.get("error", ""),
        )
        for each in rest
    ]
    failed = "; ".join(f"{each.path}: {each.error}" for each in loaded if each.error)
    require(not failed, failed)
    return torch, loaded


def _upstream(
    place: Installation, facts: Mapping[str, Any], digests: Mapping[str, str]
) -> tuple[set[str], list[Loaded]]:
    """Return the paths at which upstream's wheel has the same bytes, and its other libraries.

    Of those, the ones that we have are loaded, too.
    """
    path = fetch("vllm", facts["version"], upstream_wheels()[CPU])
    folder = place.root.path / UPSTREAM.lstrip("/")
    with WheelFile(path) as wheel:
        paths = extensions(wheel, place.root.python)
        same = {path for path in paths if digests.get(path) == _digest(wheel, path)}
        absent = [Loaded(path=path) for path in paths if path not in digests]
        others = [path for path in paths if path in digests and path not in same]
        for path in others:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("wb") as file:
                file.writelines(wheel.unpacked(path))
    return same, [*absent, *(_loaded(place, others, folder)[1] if others else [])]


def require_libnccl(place: Installation, mapped: Sequence[str]) -> None:
    """Raise ProofError unless torch maps one libnccl, the wheelhouse's if there is one in it."""
    require(len(mapped) == 1, f"torch maps {list(mapped) or 'no libnccl'}")
    ours = place.wheels.get("nvidia-nccl-cu13")
    if ours:
        here = place.root.path / mapped[0].lstrip("/")
        require(mapped[0].endswith(LIBRARY), f"torch maps {mapped[0]}")
        require(here.read_bytes() == libnccl(ours), f"{mapped[0]} is not that of {ours.name}")


def imports(place: Installation) -> str:
    """Import vLLM, and every module that fixes changed."""
    wheel = place.wheels["vllm"]
    with WheelFile(wheel) as opened:
        version = opened.facts["wheel"]
    names = modules(path for path in patched_files(wheel) if path.startswith("vllm/"))
    first, *rest = place.answers("modules", "vllm", *names)
    require(first.get("version") == version, f"vllm.__version__ is {first}, not {version}")
    failed = [f"{each['module']}: {each['error']}" for each in rest if "error" in each]
    require(not failed, "; ".join(failed))
    return f"{version}; {len(rest)} patched modules"


def version(place: Installation) -> str:
    """Run `vllm --version`."""
    script = place.root.seen_inside(place.root.packages / "bin" / "vllm")
    # Its first line names the Python of the machine that installed it.
    said = place.python(INSIDE, "run", script, "--version").strip().splitlines()[-1]
    with WheelFile(place.wheels["vllm"]) as opened:
        wanted = opened.facts["wheel"]
    require(said == wanted, f"vllm --version says {said}, not {wanted}")
    return said


def verify(place: Installation) -> str:
    """Run `patchkit verify` on the wheelhouse."""
    words = (PYTHON, "-m", "patchkit", "verify", HOUSE)
    return verdict(place.root.run(*words, PYTHONPATH=f"{CHECKOUT}:{NEEDS}"))


def verdict(said: str) -> str:
    """Return the line of `patchkit verify` that says what held."""
    return next((line for line in said.splitlines() if line.startswith("✓")), said).lstrip("✓ ")
