"""Read the facts of a machine, and put them together as a Host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from patchkit.errors import HostError
from patchkit.runtime.host import rdma
from patchkit.runtime.host.gpu import gpus
from patchkit.runtime.host.host import Host, Software
from patchkit.runtime.host.interfaces import netdevs
from patchkit.runtime.host.machine_root import Reader
from patchkit.runtime.host.recording import RecordingWriter
from patchkit.runtime.host.software import software
from patchkit.runtime.host.system import memory, system

LIVE = Path("/")


def probe(
    root: Path = LIVE,
    *,
    python: str | None = None,
    environment: Mapping[str, str],
    copy: RecordingWriter | None = None,
) -> Host:
    """Read the machine at a root; needs no rights, no GPU and no tool.

    ``environment`` is what libraries would be loaded under. ``copy`` takes all that is read.
    Software is read for the root / alone, or where ``python`` names an interpreter. Raises
    SourceError for a root without sys and proc, HostError for a Python that does not answer.
    """
    reader = Reader(root, copy)
    # Together: only both lists show which halves share a cage.
    cards, devices = rdma.paired(found := netdevs(reader), rdma.rdma(reader, found))
    host = Host(
        system=system(reader),
        memory=memory(reader),
        gpus=gpus(reader),
        netdevs=cards,
        rdma=devices,
        software=_probe_software(python, environment, reader.notes)
        if reader.live or python
        else None,
        notes=tuple(reader.notes),
    )
    if copy:
        copy.finish()
    return host


def _probe_software(
    python: str | None, environment: Mapping[str, str], notes: list[str]
) -> Software | None:
    """Return what is installed. A Python that the user did not name may fail: that is a note."""
    try:
        return software(python, environment)
    except HostError as error:
        if python:
            raise
        notes.append(f"no Python tells what is installed: {error.what}")
        return None
