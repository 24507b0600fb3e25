"""Read the facts of a machine, and put them together as a Host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from patchkit.errors import HostError
from patchkit.runtime.host.gpu import gpus
from patchkit.runtime.host.host import Host
from patchkit.runtime.host.links import read_links
from patchkit.runtime.host.machine_root import LIVE, Reader, RecordingWriter
from patchkit.runtime.host.software import software
from patchkit.runtime.host.system import memory, system


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
    netdevs, rdma = read_links(reader)
    firmware, pool, devices, installed = system(reader), memory(reader), gpus(reader), None
    if reader.live or python:
        try:
            installed = software(python, environment)
        except HostError as error:
            if python:
                raise
            # A Python that the user did not name may fail.
            reader.notes.append(f"no Python tells what is installed: {error.what}")
    if copy:
        copy.finish()
    return Host(
        system=firmware,
        memory=pool,
        gpus=devices,
        netdevs=netdevs,
        rdma=rdma,
        software=installed,
        notes=tuple(reader.notes),
    )
