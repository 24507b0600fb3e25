"""Look at a node, on the node: the facts that a plan needs, and all that doctor compares.

``examine`` reads the node itself, ``meet`` tries the other nodes from there. If a part fails, only
that part is missing, with its error: a node whose systemd is silent still has a network.
"""

import os
import pwd
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from patchkit.cluster.agent import links, node_state
from patchkit.cluster.agent.health import Parts, collect_health, disk_rooms, run_parts
from patchkit.cluster.agent.image_facts import ImageFacts, look_at_image
from patchkit.cluster.agent.installation import digest_record, environment_of, leads_to
from patchkit.cluster.agent.memory_record import has_unified_groups
from patchkit.cluster.agent.node_files import config_folder, read_placed, run_for_user
from patchkit.cluster.models.model_files import (
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
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.process import attempt
from patchkit.reading import read_text
from patchkit.records import RecordError, record
from patchkit.runtime.host.host import Host, Software
from patchkit.runtime.host.probe import LIVE, parse_whole, probe
from patchkit.runtime.host.software import find_ptxas
from patchkit.runtime.memory.checkpoint import Checkpoint, folder_checkpoint
from patchkit.runtime.python.distributions import (
    Owner,
    find_distributions,
    lost_files,
    read_header,
)
from patchkit.runtime.python.startup import STEM, ask_interpreter
from patchkit.units import BYTES_PER_MIB

# Projects whose RECORD is compared, since ranks load their files; of others, only the version is.
_DIGESTED = (
    "vllm",
    "torch",
    "triton",
    "pytorch_triton",
    "ray",
    "flashinfer_python",
)
_SMALL = BYTES_PER_MIB  # bytes: the content of larger files, weights, is not read
_MOST = 5_000  # files of a model's folder that are looked at
_CLASSES = 8  # the most that are taken from a model's config


PROGRAMS = "/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin"
"""The PATH of ranks, after the environment's own programs."""


@frozen
class ModelPrint:
    """The content of a model's folder; ``problem`` is the first of the quick check, "" for none.

    ``weights`` are the bytes of all safetensors. ``files`` and ``size`` are the number and the
    bytes of the files that vLLM loads; ``digest`` is over their names and sizes, and the content of
    small ones. ``commit`` is that in the folder's record, "" without a record. ``architectures``
    are the classes in the model's config. ``checkpoint`` is None if it cannot be read.
    """

    folder: str
    problem: str
    weights: int = 0
    commit: str = ""
    files: int = 0
    size: int = 0
    digest: str = ""
    architectures: Texts = ()
    checkpoint: Checkpoint | None = None


@frozen
class NodeFacts:
    """The facts of a node that a plan needs.

    ``memlock`` is the limit of locked memory for units of its user, in bytes, None for no limit;
    ``files`` are those of an earlier `up`, name to content; ``ptxas`` is the path of CUDA 13's, ""
    for none; ``rsync`` says that it is installed; ``unified_groups`` says that all control groups
    are of version 2; ``models`` are the contents of the requested folders. ``venv`` is the
    environment's path, "" without one, and ``installation`` is its name if `install` made it. With
    an ``image`` there is no environment: software and ptxas are those in the image.
    """

    host: Host
    user: str
    home: str
    venv: str
    linger: bool
    memlock: int | None
    systemd: bool
    persistent_journal: bool
    installation: str = ""
    ptxas: str = ""
    rsync: bool = False
    unified_groups: bool = True
    files: dict[str, str] = field(default_factory=dict)
    models: dict[str, ModelPrint] = field(default_factory=dict)
    image: ImageFacts | None


def look_at_node(
    name: str,
    venv: str,
    models: Sequence[str] = (),
    image: Mapping[str, Any] | None = None,
    variables: Values | None = None,
) -> NodeFacts:
    """Return the facts of this node for the cluster ``name``.

    ``venv`` is the path of the environment or of a link to it, ``models`` are folders, ``image``
    are the arguments of ``look_at_image``, none without an image. ``variables`` are those of ranks
    that decide what FlashInfer has; without them this process's environment decides. Raises what
    ``probe`` and ``look_at_image`` raise.
    """
    link = Path(venv).expanduser()
    # Name the environment itself: another `install` moves the link.
    venv_folder = environment_of(link)
    python = venv_folder / "bin/python"
    has_venv = not image and os.access(python, os.X_OK)
    environment = {**os.environ}
    if variables:
        environment |= {"PATH": f"{venv_folder}/bin:{PROGRAMS}", **variables}
    executable = str(python) if has_venv else None
    host = probe(python=executable, environment=environment)
    ptxas = find_ptxas(LIVE, os.environ)

    image_facts = None
    if image:
        image_facts = look_at_image(**image)
        ptxas = image_facts.contents.ptxas
        software = image_facts.contents.software
        # The image does not hold what was compiled just in time.
        software = software and replace(software, flashinfer=None)
        host = replace(host, software=software)

    user = pwd.getpwuid(os.getuid()).pw_name
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/bin"

    return NodeFacts(
        host=host,
        user=user,
        home=str(Path.home()),
        venv=str(venv_folder) if has_venv else "",
        installation=leads_to(link),
        linger=Path("/var/lib/systemd/linger", user).exists(),
        memlock=_read_memlock(),
        systemd=not attempt("systemctl", "--version").trouble,
        persistent_journal=Path("/var/log/journal").is_dir(),
        ptxas=ptxas,
        image=image_facts,
        rsync=bool(shutil.which("rsync", path=path)),
        unified_groups=has_unified_groups(),
        files=read_placed(config_folder(name)),
        models={folder: model_print(folder) for folder in models},
    )


def _read_memlock() -> int | None:
    """Return how many bytes of memory a unit of this user may lock, None for no limit."""
    words = ("show", "--property=DefaultLimitMEMLOCK", "--value")
    # For no limit systemd says "infinity", or 2**64 - 1, which has 20 digits.
    return parse_whole(run_for_user("systemctl", *words).output.strip())


@frozen
class PythonContents:
    """The content of an environment: versions, and digests over RECORDs, by project.

    RECORD says what was installed, not what somebody changed after that. ``nccl`` has the version
    and the digest of a libnccl, by the project that loads it: "vllm" or "torch". ``lost`` are the
    files that are missing.
    """

    versions: Values
    digests: Values
    nccl: Mapping[str, tuple[str, str]]
    lost: tuple[Owner, ...]


def examine(
    name: str,
    venv: str,
    units: Sequence[str],
    ports: Sequence[int],
    folders: Sequence[str],
    **asked: Any,
) -> Fields:
    """Return this node's facts, state, processes, listeners, disks, health and Python, by name.

    ``asked`` are ``image`` and ``variables`` as for ``look_at_node``. A part that fails is missing:
    then ``errors`` has the fields of its error, by its name.
    """
    parts: Parts = {
        "facts": lambda: _facts_and_contents(name, venv, **asked),
        "state": lambda: node_state.read_node_state(name, units),
        "processes": lambda: list(node_state.group_processes(name)),
        "disks": lambda: list(disk_rooms(folders)),
        "listeners": lambda: node_state.listeners(ports),
        "health": lambda: collect_health(venv, units[0]),
    }
    answer = _ask_together(parts)
    if "facts" in answer:
        answer["facts"], answer["contents"] = answer["facts"]
    return answer


def _facts_and_contents(
    name: str,
    venv: str,
    **asked: Any,
) -> tuple[NodeFacts, PythonContents]:
    """Return the facts of this node, and what is in the environment that they name."""
    # Before the first `up`, somebody may serve with variables of their own.
    if not read_placed(config_folder(name)):
        asked["variables"] = None
    facts = look_at_node(name, venv, **asked)

    path: Sequence[str] = ()
    if facts.venv:
        path = ask_interpreter(f"{facts.venv}/bin/python", os.environ).path

    return facts, python_contents(path, None if facts.image else facts.host.software)


def meet(
    addresses: Sequence[str],
    peers: Sequence[tuple[str, str]],
    models: Sequence[str] = (),
) -> Fields:
    """Return the ways to other nodes, a head's links by ssh, and the contents of models' folders.

    The parts are by name, with ``errors`` as in ``examine``. ``addresses`` are those of the other
    nodes, ``peers`` are as for ``try_links``, ``models`` are folders.
    """
    parts: Parts = {
        "ways": lambda: links.try_ways(addresses),
        "links": lambda: links.try_links(peers),
        "models": lambda: list(map(model_print, models)),
    }
    return _ask_together(parts)


def _ask_together(parts: Parts) -> Fields:
    """Return the values of the parts by name; ``errors`` has the errors of the other parts."""
    answer, failures = run_parts(parts, (PatchkitError, OSError, ValueError))

    errors = {}
    for name, failure in failures.items():
        if not isinstance(failure, PatchkitError):
            failure = HostError(f"{name}: {failure}")
        errors[name] = error_fields(failure)
    return {**answer, "errors": errors}


def python_contents(path: Sequence[str], software: Software | None) -> PythonContents:
    """Return the content of the environment with the ``sys.path`` ``path``.

    ``software`` names the files of libnccl, None if they do not matter.
    """
    installed = find_distributions(path)
    homes = {name: folders[0] for name, folders in installed.items()}
    versions = {name: read_header(homes[name], "Version") for name in sorted(homes)}
    digests = {name: digest_record(homes[name]) for name in _DIGESTED if name in homes}

    nccl = {}
    if software:
        copies = {"vllm": software.vllm_nccl, "torch": software.torch_nccl}
        nccl = {
            name: (copy.version, sha256_if_readable(Path(copy.path)))
            for name, copy in copies.items()
            if copy and copy.path
        }

    return PythonContents(
        versions=versions,
        digests=digests,
        nccl=nccl,
        lost=lost_files(path, STEM),
    )


def model_print(folder: str) -> ModelPrint:
    """Return what a model's folder holds. The weights are not read.

    A folder that does not exist is a ``problem``, no error.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        return ModelPrint(
            folder=str(path),
            problem="no such folder",
        )

    check = quick_check(path)
    problem = ""
    if check.errors:
        problem = f"{check.errors[0].where} {check.errors[0].what}"

    pin = None
    with suppress(RecordError):
        pin = read_record(path)

    sizes, _broken = list_files(path)
    parts = pin.files if pin else set(filter(is_loaded, sizes))
    loaded = {name: size for name, size in sizes.items() if name in parts}

    weights = [size for name, size in sizes.items() if is_safetensors(name)]
    rows = []
    for name, size in list(loaded.items())[:_MOST]:
        content = sha256_if_readable(path / name) if size <= _SMALL else ""
        rows.append(f"{name} {size} {content}")

    return ModelPrint(
        folder=str(path),
        problem=problem,
        weights=sum(weights),
        commit=pin.commit if pin else "",
        files=len(rows),
        size=sum(loaded.values()),
        digest=digest("\n".join(rows)),
        architectures=_read_architectures(path),
        checkpoint=folder_checkpoint(path),
    )


def _read_architectures(folder: Path) -> Texts:
    """Return the classes in a model's config, () if they cannot be read."""
    with suppress(PatchkitError, ValueError, LookupError, TypeError):
        config = read_text(folder / "config.json", limit=_SMALL)
        return record(Texts, read_json(config)["architectures"])[:_CLASSES]
    return ()
