"""Read and write ``cluster.toml``: the machines of a cluster, and the choices for its server."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from patchkit.cluster.ssh.ssh import check_destination
from patchkit.frozen import Fields, Texts, Values, frozen
from patchkit.records import RecordError, matching, one_of
from patchkit.runtime.node.topology import check_ipv4
from patchkit.runtime.rules.rule import CACHES, CHOICES, cache_variables
from patchkit.runtime.rules.secret_texts import secret_flag

FILE = Path("cluster.toml")
VENV = "~/.local/share/patchkit/venv"
MODELS = "~/models"
# It becomes a part of names of units and folders.
_NAME = r"[a-z]([a-z0-9-]{0,29}[a-z0-9])?"
# NAME[:TAG][@sha256:HEX], as in github.com/distribution/reference, regexp.go: HEX is a registry's
# digest, or the id of an image that was built here.
_PART = "[a-z0-9]+(?:(?:[.]|_|__|-+)[a-z0-9]+)*"
_REGISTRY = "[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?/"
IMAGE = (
    f"|(?:{_REGISTRY})?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    "(?:@sha256:[0-9a-f]{64})?"
)
_SOONEST = 30  # seconds of `frozen`: a quarter of them passes between two questions for a token
_DAY = 86_400
_MOST_FLOOR = 64  # GiB: half of a Spark's memory
_PORT = 8000
_UNPRIVILEGED = 1024  # the first port that a user may take
_PORTS = 1 << 16


@frozen
class ClusterNode:
    """A machine: ``ssh`` is its SSH destination from here, ``peer`` that from the head.

    ``peer`` is "" if it is the same. ``address`` is the machine's IPv4 address on the cable, "" for
    the one that patchkit finds there. A worker's address has to be the one that patchkit finds.
    """

    ssh: Annotated[str, check_destination]
    peer: Literal[""] | Annotated[str, check_destination] = ""
    address: Literal[""] | Annotated[str, check_ipv4] = ""

    @property
    def from_head(self) -> str:
        """Return the SSH destination of this machine from the head."""
        return self.peer or self.ssh


@frozen
class ServeChoices:
    """The choices for the server; many are also options of `patchkit env` and `serve-args`.

    ``args`` are added to the words of `vllm serve`; ``set`` are variables of every node. ``image``
    is the container image that has vLLM; if it is "", vLLM is in the environment ``venv``.
    ``frozen`` is the number of seconds without a sign of life after which a server is restarted,
    0 for never. ``memory_floor`` is in GiB: if less memory is left on a node, its rank is ended; 0
    is never, None the device's own floor.
    """

    image: Annotated[str, matching(IMAGE, "an image: NAME[:TAG][@sha256:HEX]")] = ""
    engine: Literal["docker", "podman"] = "docker"
    frozen: int = 120
    memory_floor: float | None = None
    executor: Literal["auto", "mp", "ray"] = "auto"
    topology: Annotated[str, one_of("auto", "roce", "socket", "ring", "hetero")] = (
        "auto"
    )
    listen: Literal["local", "cable", "lan"] = "local"
    host: str = ""
    port: int = _PORT
    target: Annotated[str, one_of("", *CHOICES["target"])] = ""
    preset: str = ""
    wanted: Texts = field(default=(), metadata={"key": "with"})
    unwanted: Texts = field(default=(), metadata={"key": "without"})
    args: Texts = ()
    set: Values = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.port < _PORTS:
            raise RecordError(f"is {self.port}, not a port", "port")
        if self.frozen != 0 and not _SOONEST <= self.frozen <= _DAY:
            what = f"is {self.frozen}: 0, or {_SOONEST} seconds to a day"
            raise RecordError(what, "frozen")
        if self.memory_floor and not 0 < self.memory_floor <= _MOST_FLOOR:
            what = f"is {self.memory_floor}: 0, or up to {_MOST_FLOOR} GiB"
            raise RecordError(what, "memory_floor")

        for word in self.args:
            if flag := secret_flag(word):
                raise RecordError(
                    f"every user of the node would see what follows {flag}; put VLLM_API_KEY or "
                    "HF_TOKEN into ~/.config/patchkit/secrets.env there",
                    "args",
                )

    def ranks_port(self, default: int) -> int:
        """Return a port for the ranks: ``default``, moved as far as ``port`` is moved from 8000.

        Thus clusters whose servers have different ports can share their nodes. A port above the
        last one goes on from the first unprivileged one.
        """
        above = default + self.port - _PORT - _UNPRIVILEGED
        return _UNPRIVILEGED + above % (_PORTS - _UNPRIVILEGED)

    @property
    def local_image(self) -> str:
        """Return the name that `cluster install` gives the pinned image on every node.

        Returns "" if no image is pinned.
        """
        _name, _at, pin = self.image.partition("@sha256:")
        if not pin:
            return ""
        return f"localhost/patchkit:{pin[:12]}"

    @property
    def image_asked(self) -> Fields:
        """Return the keyword arguments of ``look_at_image`` for a node, {} without an image."""
        if not self.image:
            return {}

        name, _at, pin = self.image.partition("@")
        names = [name]
        if pin:
            # The name by patchkit comes last: somebody may have given it to another image.
            names = [pin.removeprefix("sha256:"), self.reference, self.local_image]
        return {"engine": self.engine, "names": names}

    @property
    def reference(self) -> str:
        """Return the pinned image as NAME@sha256:HEX: not every engine takes a tag before that."""
        name, at, pin = self.image.partition("@")
        prefix, slash, repository = name.rpartition("/")
        repository = repository.partition(":")[0]
        return f"{prefix}{slash}{repository}{at}{pin}"


@frozen
class ClusterFile:
    """A cluster: ``members`` are its machines by rank, the head first.

    ``models`` has the pinned commit of each model by its name. ``venv`` and ``model_folder`` are
    the same paths on every node, where ``~`` is the user's home.
    """

    members: tuple[ClusterNode, ...] = field(metadata={"key": "node"})
    name: Annotated[str, matching(_NAME, "a short name: a-z, 0-9, inner -")] = "vllm"
    venv: str = VENV
    model_folder: str = MODELS
    serve: ServeChoices = ServeChoices()
    models: Mapping[str, Annotated[str, matching("[0-9a-f]{40}", "a commit")]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        if not self.members:
            raise RecordError("a cluster has at least one node", "node")

        names = [node.ssh for node in self.members]
        if twice := [name for name in names if names.count(name) > 1]:
            raise RecordError(f"{twice[0]} is named twice", "node")

        for key in ("venv", "model_folder"):
            path = getattr(self, key)
            if not path.startswith(("/", "~/")) or not path.isprintable():
                raise RecordError(f"is {path!r}, not a path from / or ~/", key)

    @property
    def rank_variables(self) -> Values:
        """Return variables of all ranks; ``{vllm}`` in a value stands for the release."""
        return {**cache_variables(f"~/{CACHES}", "{vllm}"), **self.serve.set}

    @property
    def unit(self) -> str:
        """Return the name of the rank's unit, on every node."""
        return f"patchkit-{self.name}.service"

    @property
    def watch_units(self) -> list[str]:
        """Return the names of the units that watch the other ranks, on the head."""
        ranks = range(1, len(self.members))
        return [self.unit_name(f"-worker@{rank}") for rank in ranks]

    @property
    def guard_unit(self) -> str:
        """Return the name of the unit that watches whether the server lives, on the head."""
        return self.unit_name("-alive")

    @property
    def memory_unit(self) -> str:
        """Return the name of the unit that ends a rank before memory is used up, on all nodes."""
        return self.unit_name("-memory")

    def unit_name(self, part: str) -> str:
        """Return the name of the cluster's unit that ``part`` marks, such as "-alive"."""
        return f"patchkit-{self.name}{part}.service"


def new_cluster_text(nodes: Iterable[ClusterNode], choices: Values) -> str:
    """Return the text of a new file; ``choices`` are further keys of ``[serve]``, with values."""
    # TOML takes JSON's form of a text, except halves of surrogate pairs.
    quote = partial(json.dumps, ensure_ascii=False)
    lines = [
        "# The machines of a cluster, by rank: the head first. Yours to edit; every key is in",
        "# docs/cluster.md. `patchkit up MODEL` reads it anew each time.",
        "",
        f"venv = {quote(VENV)}  # made by `patchkit cluster install`",
        f"model_folder = {quote(MODELS)}  # on each node",
        "",
        "[serve]",
        'listen = "local"  # who may ask: local, cable or lan',
        "port = 8000",
    ]

    for key, value in choices.items():
        lines += [f"{key} = {quote(value)}"]

    for node in nodes:
        lines += ["", "[[node]]", f"ssh = {quote(node.ssh)}"]
        if node.peer:
            lines.append(f"peer = {quote(node.peer)}  # from the head")
        if node.address:
            lines.append(f"address = {quote(node.address)}")
    return "\n".join([*lines, "", "[models]", ""])
