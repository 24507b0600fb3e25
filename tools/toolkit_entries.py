"""Enter the CUDA of a torch in toolchain.toml: its row is a person's, its wheels the index's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from patchkit.records import read_toml
from patchkit.target import Toolkit
from patchkit.wheel.build.machine import MACHINES, ToolkitWheel
from tools.decisions import Decision
from tools.index_entries import wheel_entries
from tools.remote_wheel import requirements

_WHOLE = re.compile(r"^cuda-toolkit(?:\[.*?\])?==([\d.]+)", re.MULTILINE)
_PIN = re.compile(
    r"^(?P<project>[\w-]+)==(?P<version>[\d.]+?)(?:\.\*)?(?:;|$)", re.MULTILINE
)


def enter_toolkit(
    place: Path, torch: str, cuda: Mapping[str, str], requires: Sequence[str]
) -> Iterator[Decision]:
    """Enter the wheels of the CUDA (by CPU) of a torch, whose wheel ``requires`` say the update.

    Yield what a person has to give first: the row, or a beginning for it.
    """
    rows = read_toml(tuple[Toolkit, ...], place, key="toolkit")
    wheels = read_toml(tuple[ToolkitWheel, ...], place, key="wheel")
    own = [row for row in rows if {row.cuda} == {*cuda.values()}]
    taken = [row for row in rows if _release(row.torch) <= _release(torch)]
    if not own or own != taken[-1:]:
        asked = "the driver that NVIDIA's installer of it names; PTX and codes: ask its nvcc"
        yield Decision(
            file="recipes/toolchain.toml",
            says=f"torch {torch} is for CUDA {', '.join(sorted({*cuda.values()}))}, and its row is "
            f"{taken[-1].cuda if taken else 'none'}: a [[toolkit]] ({asked})",
            line=f'cuda = "{max(cuda.values())}", torch = "{torch}", '
            'nvcc = "…", driver = "…", ptx = […], default_codes = […]',
            needed=True,
        )
    elif not any(wheel.cuda == own[0].cuda for wheel in wheels):
        oldest = dict.fromkeys(
            (it.project, it.role) for it in wheels if it.cuda == rows[0].cuda
        )
        text = place.read_text(encoding="utf-8")
        blocks = _render_wheels(own[0].cuda, [*oldest], "\n".join(requires))
        place.write_text("\n".join([text, *blocks]), encoding="utf-8")


def _render_wheels(
    cuda: str, projects: Sequence[tuple[str, str]], requires: str
) -> Iterator[str]:
    """Yield the entries of the wheels that NVIDIA's ``cuda-toolkit`` of that update names."""
    (update,) = _WHOLE.findall(requires)
    named = "\n".join(requirements("cuda-toolkit", update, MACHINES[0]))
    versions = {match["project"]: match["version"] for match in _PIN.finditer(named)}
    for project, role in projects:
        entries = wheel_entries(project, [versions[project]], MACHINES)
        for machine, entry in zip(MACHINES, entries, strict=True):
            about = {"cuda": cuda, "project": project, "version": entry.version}
            about |= {"role": role, "machine": machine}
            fields = (about | asdict(entry)).items()
            lines = [f"{name} = {json.dumps(value)}\n" for name, value in fields]
            yield "".join(["[[wheel]]\n", *lines])


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
