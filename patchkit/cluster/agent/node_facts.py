"""Look at a node, on the node: the facts that a plan needs, and all that doctor compares.

``examine`` reads the node itself, ``meet`` tries the other nodes from there: by ssh with the node's
own settings, and on the cable. If a part fails, only that part is missing, with its error: a node
whose systemd is silent still has a network.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from patchkit.cluster.agent import node_state
from patchkit.cluster.agent.health import Parts, collect_health, disk_rooms, run_parts
from patchkit.cluster.agent.image_facts import (
    ImageFacts,
    find_program,
    look_at_image,
    user_entry,
)
from patchkit.cluster.agent.installation import digest_record, environment_of, leads_to
from patchkit.cluster.agent.memory_record import has_unified_groups
from patchkit.cluster.agent.node_files import (
    config_folder,
    read_placed,
    run_for_user,
)
from patchkit.cluster.models.model_files import (
    is_loaded,
    is_safetensors,
    list_files,
    quick_check,
    read_record,
)
from patchkit.cluster.ssh.node import require_all, run_on_all
from patchkit.cluster.ssh.ssh import (
    TOOL_WORDS,
    check_destination,
    error_fields,
    ssh_error,
    ssh_words,
)
from patchkit.digests import digest, sha256_if_readable
from patchkit.errors import HostError, PatchkitError
from patchkit.follow import Completed
from patchkit.foreign import read_json
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.process import attempt
from patchkit.reading import read_text, user_path
from patchkit.records import RecordError, record
from patchkit.runtime.host.host import Host, Software
from patchkit.runtime.host.probe import LIVE, Reader, parse_whole, probe
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
    files: Values = field(default_factory=dict)
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
    link = user_path(venv)
    # Name the environment itself: another `install` moves the link.
    venv_folder = environment_of(link)
    python = venv_folder / "bin/python"
    has_venv = not image and os.access(python, os.X_OK)
    environment = {**os.environ}
    if variables:
        environment |= {"PATH": f"{venv_folder}/bin:{PROGRAMS}", **variables}
    host = probe(python=str(python) if has_venv else None, environment=environment)
    ptxas = find_ptxas(LIVE, os.environ)

    image_facts = None
    if image:
        image_facts = look_at_image(**image)
        ptxas = image_facts.contents.ptxas
        software = image_facts.contents.software
        # The image does not hold what was compiled just in time.
        software = software and replace(software, flashinfer=None)
        host = replace(host, software=software)

    user = user_entry().pw_name

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
        rsync=bool(find_program("rsync")),
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
        "ways": lambda: try_ways(addresses),
        "links": lambda: try_links(peers),
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
    path = user_path(folder)
    if not path.is_dir():
        return ModelPrint(folder=str(path), problem="no such folder")

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


HEADERS = 28
"""Bytes of the headers of IPv4 (20) and ICMP (8); the largest payload of a ping is the MTU less."""

_PLAIN = 56  # bytes of payload: ping's default
_STANDARD_PORT = "22"
# A link shares no connection with other ssh programs: after a cable was out, such a connection may
# hang.
_OWN_CONNECTION = ("ConnectTimeout=5", "ControlMaster=no", "ControlPath=none")


@frozen
class PeerLink:
    """The words of ssh that lead from the head to a worker.

    ``error`` has the fields of the error with which a try ended, {} for none.
    """

    words: Texts
    error: Values


def try_links(peers: Sequence[tuple[str, str]]) -> list[PeerLink]:
    """Try the link to each peer, ``(DESTINATION, ADDRESS ON THE CABLE)``, as a unit would.

    A unit has no SSH agent: the key has to work without one. With the address "" ssh goes its own
    way to the destination. ssh looks up the host key under the destination's name, whatever the
    address is. A link that fails is returned with its error.
    """
    environment = {**os.environ}
    environment.pop("SSH_AUTH_SOCK", None)
    links = []

    for destination, address in peers:
        check_destination(destination)
        settings = [*_OWN_CONNECTION]
        if address:
            settings += _settings_over_cable(destination, address)
        options = [word for setting in settings for word in ("-o", setting)]

        words = ssh_words(destination, *options)
        done = attempt(*words, "true", env=environment, timeout=30)
        error = error_fields(ssh_error(done, destination)) if done.trouble else {}
        links.append(PeerLink(words=words, error=error))
    return links


def _settings_over_cable(destination: str, address: str) -> list[str]:
    """Return the settings with which ssh reaches a destination at its address on the cable.

    Returns [] if ssh uses that address anyway.
    """
    lines = attempt("ssh", "-G", "--", destination).output.split("\n")
    settings = dict(line.partition(" ")[::2] for line in lines)
    host = settings.get("hostname", destination)
    if address == host:
        return []

    port = settings.get("port", _STANDARD_PORT)
    host_key = host if port == _STANDARD_PORT else f"[{host}]:{port}"
    return [
        f"HostName={address}",
        f"HostKeyAlias={settings.get('hostkeyalias') or host_key}",
        "CheckHostIP=no",
        # The cable needs no jump host.
        "ProxyJump=none",
        "ProxyCommand=none",
    ]


CHOSEN_PORT = 47001
"""A port in the range from which the system chooses ports for torch, gloo and NCCL.

No program listens there.
"""

_CONNECT_SECONDS = 4.0  # TCP tries three times in this time


def try_ports(addresses: Sequence[str], port: int) -> list[str]:
    """Return what keeps this node from a TCP port of each address, "" if nothing does.

    No program listens there: the other node refuses the connection at once. Any other answer, or
    none, is a firewall's.
    """
    return require_all(run_on_all(addresses, lambda address: _try_port(address, port)))


def _try_port(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


Echo = Literal["answers", "silent", "unknown"]


@frozen
class Way:
    """The way to an address: the interface that the kernel sends through, and the echoes.

    ``mtu`` is that of the interface, 0 if unknown. ``plain`` is the echo of small frames, ``full``
    that of frames as large as the MTU. ``said`` is what ping or ip wrote about an echo that failed,
    or why none was tried.
    """

    address: str
    netdev: str = ""
    gateway: str = ""
    mtu: int = 0
    plain: Echo = "unknown"
    full: Echo = "unknown"
    said: str = ""


def try_ways(addresses: Sequence[str]) -> list[Way]:
    """Return the way to each address; they are tried at the same time."""
    return require_all(run_on_all(addresses, _try_way))


def _try_way(address: str) -> Way:
    """Return the way to an address; without a route, with what `ip` says instead."""
    done = attempt("ip", "-json", "route", "get", address, timeout=5)
    try:
        (route,) = read_json(done.output)
        netdev = str(route["dev"])
        gateway = str(route.get("gateway", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        silence = done.trouble or "ip says nothing about the route"
        return Way(address=address, said=silence)

    mtu = Reader(LIVE).number(f"sys/class/net/{netdev}/mtu") or 0
    return _ping(Way(address=address, netdev=netdev, gateway=gateway, mtu=mtu))


def _ping(way: Way) -> Way:
    """Return a way with its echoes: of small frames, and of frames that fill the MTU."""
    # Only iputils' ping has `-M do`, which forbids fragments.
    version = attempt("ping", "-V")
    if "iputils" not in version.output:
        problem = version.trouble or "installed here is not that of iputils"
        return replace(way, said=f"ping {problem}")

    words = ("ping", *TOOL_WORDS["ping"], "-I", way.netdev, "-s")
    sizes = (_PLAIN, max(way.mtu - HEADERS, _PLAIN))
    with ThreadPoolExecutor(2) as pool:
        plain, full = pool.map(
            lambda size: attempt(*words, str(size), way.address), sizes
        )

    lines = (full.errors or plain.errors).strip().splitlines()
    return replace(
        way,
        plain=_echo(plain),
        full=_echo(full) if way.mtu else "unknown",
        said=lines[0] if lines else "",
    )


def _echo(ping: Completed) -> Echo:
    """Return the echo that the exit status of iputils' ping stands for."""
    if not ping.trouble:
        return "answers"
    if ping.status == 1:
        return "silent"
    return "unknown"
