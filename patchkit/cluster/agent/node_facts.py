"""Look at a node, from the node: what a plan needs to know, and all that doctor compares.

Of what doctor asks, what cannot be had is an error of that part alone: a node whose systemd is
silent still has a network. ``examine`` asks about the node, ``meet`` about the others as they are
seen from there.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from patchkit.cluster.agent import links, node_state
from patchkit.cluster.agent.health import collect_health, disk_rooms
from patchkit.cluster.agent.image_facts import ImageFacts, look_at_image
from patchkit.cluster.agent.installation import digest_record, environment_of, leads_to
from patchkit.cluster.agent.node_files import config_folder, read_placed, run_for_user
from patchkit.cluster.models.model_check import (
    is_loaded,
    is_safetensors,
    list_files,
    quick_check,
    read_record,
)
from patchkit.cluster.ssh.ssh import error_fields
from patchkit.digests import digest, sha256_if_readable
from patchkit.errors import HostError, PatchkitError
from patchkit.foreign import read_json
from patchkit.process import attempt
from patchkit.reading import read_text
from patchkit.records import RecordError
from patchkit.runtime.host.host import Host, Software
from patchkit.runtime.host.machine_root import LIVE
from patchkit.runtime.host.probe import probe
from patchkit.runtime.host.software import find_ptxas
from patchkit.runtime.python.distributions import (
    LostFile,
    distributions,
    header,
    lost_files,
)
from patchkit.runtime.python.startup import STEM, ask_interpreter
from patchkit.units import BYTES_PER_MIB

_UNLIMITED = 2**64 - 1
# Whose files a rank loads; of all others the version is enough.
_DIGESTED = ("vllm", "torch", "triton", "pytorch_triton", "ray")
_SMALL = BYTES_PER_MIB  # bytes of a file that is read: configuration and templates, not weights
_MOST = 5_000  # files of a folder that is a model's
_CLASSES = 8  # that a config names


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrint:
    """Say what a model's folder holds; ``problem`` is what the quick check finds first, or "".

    ``weights`` and ``size`` are bytes, of safetensors and of all that vLLM loads. ``commit`` is
    what its record says, "" without one; ``digest`` is one over the names and sizes of what vLLM
    loads, and over what small files hold. ``architectures`` are the classes that its config names.
    """

    folder: str
    problem: str
    weights: int = 0
    commit: str = ""
    files: int = 0
    size: int = 0
    digest: str = ""
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node says of itself.

    ``memlock`` is the limit of its user manager in bytes, None for none; ``files`` what an earlier
    `up` left there, by name; ``ptxas`` that of CUDA 13, "" for none; ``models`` what the folders
    that were asked for hold; ``venv`` is the environment's path, "" without one, and
    ``installation`` its name if `install` made it. With an ``image`` there is no environment, and
    software and ptxas are what is in it.
    """

    host: Host
    user: str
    home: str
    venv: str
    linger: bool
    memlock: int | None
    systemd: int
    persistent_journal: bool
    installation: str = ""
    ptxas: str = ""
    has: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    models: dict[str, ModelPrint] = field(default_factory=dict)
    image: ImageFacts | None = None


def look_at_node(
    name: str,
    venv: str,
    models: Sequence[str] = (),
    image: Mapping[str, Any] | None = None,
) -> NodeFacts:
    """Return the facts of this node; ``image`` are the arguments of ``look_at_image``, if any.

    Raises what ``probe`` and ``look_at_image`` raise.
    """
    link = Path(venv).expanduser()
    # By its own name, which stays what it is when another `install` moves the link.
    place = environment_of(link)
    python = place / "bin" / "python"
    there = not image and os.access(python, os.X_OK)
    inside = look_at_image(**image) if image else None
    user = pwd.getpwuid(os.getuid()).pw_name
    version = attempt("systemctl", "--version").output.split()
    asked = ("--property=DefaultLimitMEMLOCK", "--value")
    limit = run_for_user("systemctl", "show", *asked).output.strip()
    memlock = int(limit) if limit.isdigit() else _UNLIMITED
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/bin"
    host = probe(LIVE, python=str(python) if there else None, environment=os.environ)
    return NodeFacts(
        host=replace(host, software=inside.contents.software) if inside else host,
        user=user,
        home=str(Path.home()),
        venv=str(place) if there else "",
        installation=leads_to(link),
        linger=Path("/var/lib/systemd/linger", user).exists(),
        memlock=None if memlock >= _UNLIMITED else memlock,
        systemd=int(version[1]) if len(version) > 1 and version[1].isdigit() else 0,
        persistent_journal=Path("/var/log/journal").is_dir(),
        ptxas=inside.contents.ptxas if inside else find_ptxas(LIVE, os.environ),
        image=inside,
        has=tuple(
            name for name in ("rsync", "systemctl") if shutil.which(name, path=path)
        ),
        files=read_placed(config_folder(name)),
        models={each: model_print(each) for each in models},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonContents:
    """An environment: versions by project, digests over the RECORD of those that ranks load.

    RECORD says what was installed, not what somebody changed since; of libnccl the bytes count:
    ``nccl`` has by who loads it, vllm and torch, its version and digest.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    nccl: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    lost: tuple[LostFile, ...] = ()


def examine(
    name: str,
    venv: str,
    units: Sequence[str],
    ports: Sequence[int],
    folders: Sequence[str] = (),
    image: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return this node's facts, state, processes, listeners, disks and Python.

    ``image`` is as for ``look_at_node``; ``errors`` has the fields of an error for each part that
    is missing.
    """

    def whole() -> dict[str, Any]:
        facts = look_at_node(name, venv, image=image)
        path = (
            ask_interpreter(f"{facts.venv}/bin/python", os.environ).path
            if facts.venv
            else ()
        )
        contents = python_contents(path, None if image else facts.host.software)
        return {"facts": facts, "contents": contents}

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "facts": whole,
        "state": lambda: {"state": node_state.read_node_state(name, units)},
        "processes": lambda: {"processes": list(node_state.group_processes(name))},
        "disks": lambda: {"disks": list(disk_rooms(folders))},
        "listeners": lambda: {"listeners": list(node_state.listeners(ports))},
        "health": lambda: {"health": collect_health(venv, units[0])},
    }
    return _ask_together(parts)


def meet(
    addresses: Sequence[str],
    peers: Sequence[tuple[str, str]],
    models: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the ways to other nodes, for a head its links by ssh, and what models' folders hold.

    ``peers`` are as for ``links``.
    """
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "ways": lambda: {"ways": links.try_ways(addresses)},
        "links": lambda: {"links": links.try_links(peers)},
        "models": lambda: {"models": list(map(model_print, models))},
    }
    return _ask_together(parts)


def _ask_together(parts: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, Any]:
    """Return what the parts say, asked side by side, and the errors of those that say nothing."""
    found: dict[str, Any] = {}
    errors: dict[str, dict[str, str]] = {}
    with ThreadPoolExecutor(max_workers=len(parts)) as pool:
        started = {name: pool.submit(work) for name, work in parts.items()}
        for name, part in started.items():
            try:
                found |= part.result()
            except PatchkitError as error:
                errors[name] = error_fields(error)
            except (OSError, ValueError) as error:
                errors[name] = error_fields(HostError(f"{name}: {error}"))
    return {**found, "errors": errors}


def python_contents(path: Sequence[str], software: Software | None) -> PythonContents:
    """Return what lies on a ``sys.path``; ``software`` says which libnccl is loaded there."""
    homes = {name: found[0] for name, found in distributions(path).items()}
    loaded = (
        {"vllm": software.vllm_nccl, "torch": software.torch_nccl} if software else {}
    )
    return PythonContents(
        versions={
            name: header(home, "Version") for name, home in sorted(homes.items())
        },
        digests={
            name: digest_record(homes[name]) for name in _DIGESTED if name in homes
        },
        nccl={
            name: (its.version, sha256_if_readable(Path(its.path)))
            for name, its in loaded.items()
            if its and its.path
        },
        lost=lost_files(path, STEM),
    )


def model_print(folder: str) -> ModelPrint:
    """Return which files a model's folder holds: no hashes of weights."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        return ModelPrint(folder=str(place), problem="no such folder")
    check = quick_check(place)
    made = None
    with contextlib.suppress(RecordError):
        made = read_record(place)
    sizes, _broken = list_files(place)
    loaded = [
        name for name in sizes if (name in made.files if made else is_loaded(name))
    ]
    rows: list[str] = []
    for name in loaded[:_MOST]:
        small = sizes[name] <= _SMALL
        rows.append(
            f"{name} {sizes[name]} {sha256_if_readable(place / name) if small else ''}"
        )
    return ModelPrint(
        folder=str(place),
        problem=f"{check.errors[0].where} {check.errors[0].what}"
        if check.errors
        else "",
        weights=sum(size for name, size in sizes.items() if is_safetensors(name)),
        commit=made.commit if made else "",
        files=len(rows),
        size=sum(sizes[name] for name in loaded),
        digest=digest("\n".join(rows)),
        architectures=_read_architectures(place),
    )


def _read_architectures(folder: Path) -> tuple[str, ...]:
    """Return the classes that a model's config names, () where nobody can read any there."""
    names = None
    with contextlib.suppress(
        OSError, ValueError, LookupError, TypeError, PatchkitError
    ):
        names = read_json(read_text(folder / "config.json", limit=_SMALL))[
            "architectures"
        ]
    if not isinstance(names, list):
        return ()
    return tuple(name for name in names[:_CLASSES] if isinstance(name, str))
