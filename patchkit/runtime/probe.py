"""The facts of a machine: read, paired, and put together as a Host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from patchkit.errors import HostError
from patchkit.runtime import rdma
from patchkit.runtime.gpu import gpus
from patchkit.runtime.host import Host, Software
from patchkit.runtime.netdevs import netdevs
from patchkit.runtime.recorded import Copy
from patchkit.runtime.sysfs import Reader
from patchkit.runtime.system import memory, system

LIVE = Path("/")


def probe(
    root: Path = LIVE,
    *,
    python: str | None = None,
    environment: Mapping[str, str],
    copy: Copy | None = None,
) -> Host:
    """Read the machine at a root; needs no rights, no GPU and no tool.

    ``environment`` is what libraries would be loaded under. ``copy`` takes all that is read. Of
    another root than / no software is told, unless ``python`` names an interpreter. Raises
    SourceError for a root that is no machine, HostError for a ``python`` that is none.
    """
    reader = Reader(root, copy)
    cards, devices = rdma.paired(found := netdevs(reader), rdma.rdma(reader, found))
    wanted = reader.live or python
    host = Host(
        system=system(reader),
        memory=memory(reader),
        gpus=gpus(reader),
        netdevs=cards,
        rdma=devices,
        software=_software(reader, python, environment) if wanted else None,
        notes=tuple(reader.notes),
    )
    if copy:
        copy.finish()
    return host


def _software(
    reader: Reader, python: str | None, environment: Mapping[str, str]
) -> Software | None:
    """Only an interpreter that was asked for has to be there."""
    from patchkit.runtime.software import software  # not for a recording

    try:
        return software(python, environment)
    except HostError as error:
        if python:
            raise
        reader.note(f"no software: {error.what}")
        return None
