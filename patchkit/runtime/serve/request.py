"""Describe what a node is to serve, and check this request and whether the model fits.

vLLM's `--host` is for the API server only. Nodes find each other by ``--master-addr`` and
``VLLM_HOST_IP``, so every address to listen on works for a model on several nodes.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import field
from ipaddress import ip_address
from pathlib import Path

from patchkit.errors import HostError, UsageError
from patchkit.frozen import Values, frozen
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host
from patchkit.runtime.memory.checkpoint import Checkpoint, download_folder
from patchkit.runtime.memory.plan import (
    MemoryPlan,
    MemoryRequest,
    plan_memory,
)
from patchkit.runtime.memory.pool import MemoryPool
from patchkit.runtime.memory.weights import Weights, find_weights
from patchkit.runtime.node.decision import Node
from patchkit.runtime.node.topology import choose_address, find_fabric, find_lan
from patchkit.runtime.rules.presets import (
    Broken,
    Preset,
    broken_for,
    find_preset,
    model_recipes,
    named_preset,
    suggest_presets,
)
from patchkit.runtime.rules.rule import BY_DEFAULT, Names, RuleChoice

LOCAL = "127.0.0.1"
MASTER_PORT = 29501  # vLLM's default
_MOST_NODES = 8  # if more were needed, more Sparks are not advised

# Addresses that stand for all interfaces → the address for a client on this machine. patchkit never
# chooses such an address, but a user may.
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


@frozen
class ServeRequest:
    """A model, and the node that serves it or a part of it.

    ``memory``: the memory that the model must fit into.
    ``rank``: the node's number, None if its role decides it.
    ``folder_gib``: the size of the weights in a local folder or download, None if there are none.
    ``checkpoint``: the config and the tensors of these weights.
    ``architectures``: the classes in the config of a checkpoint on another machine.
    ``drafter_gib``: the size of a second checkpoint, which drafts.
    ``stacks``: the folder for stacks of a frozen server, "" for none.
    ``frozen``: the seconds after which a frozen server is restarted, 0 for never.
    ``choice``: the rules about flags that the user turns on and off.
    ``master_port``: the port, at the head's address, where the ranks meet.
    ``given``: the flags that the user adds, which the memory is planned for.
    """

    model: str
    node: Node
    memory: MemoryPool
    rank: int | None = None
    host: str = LOCAL
    port: int = 8000
    folder_gib: float | None = None
    checkpoint: Checkpoint | None = None
    architectures: Names = ()
    drafter_gib: float | None = None
    stacks: str = ""
    frozen: int = 0
    choice: RuleChoice = BY_DEFAULT
    master_port: int = MASTER_PORT
    given: Values = field(default_factory=dict)

    @property
    def weights(self) -> Weights | None:
        """Return the size of the weights, None if it is unknown."""
        return find_weights(
            self.model, self.node.preset, self.folder_gib, self.node.quantization
        )

    @property
    def number(self) -> int:
        """Return the rank. If none is given, it is 1 for a worker and 0 otherwise."""
        return int(self.node.role == "worker") if self.rank is None else self.rank


def check_model(model: str, node: Node) -> None:
    """Raise UsageError if a text cannot be the name of a model, or names a preset ambiguously."""
    # `vllm serve` would take a name that begins with a dash for an option.
    if not model or model.startswith("-") or not model.isprintable():
        raise UsageError(
            f"{model!r} is not a model",
            hint="write OWNER/NAME as at Hugging Face, or a folder",
        )

    preset = node.preset
    is_ambiguous = preset and "/" not in preset.id
    if preset and is_ambiguous and model.lower() == preset.id.lower():
        raise UsageError(
            f"ambiguous preset {preset.id!r}: give OWNER/NAME",
            why="checkpoints of several owners have this name",
            hint=f"write OWNER/{preset.id}, or the folder that it lies in",
        )


def check_rank(request: ServeRequest) -> None:
    """Raise UsageError if the node of a request cannot have its rank."""
    node = request.node
    is_worker = node.role == "worker"

    if is_worker and node.executor.name == "ray":
        command = quoted("ray", "start", f"--address={node.head or 'HEAD'}:6379")
        raise UsageError(
            "a worker under Ray serves nothing",
            why="the head's `vllm serve` starts what runs on it",
            hint=f"on the worker, with its env file loaded: {command}",
        )

    if is_worker and request.rank is None and node.nodes > 2:
        raise UsageError(
            f"missing --node-rank: there are {node.nodes - 1} workers",
            hint="number them from 1: --node-rank 1",
        )

    ranks = range(1, node.nodes) if is_worker else range(1)
    if request.number not in ranks:
        raise UsageError(
            f"rank {request.number} of {node.nodes} nodes cannot be a {node.role}'s",
            hint="the head is 0, each worker has a number of its own: --node-rank 1 …",
        )


def release_faults(request: ServeRequest) -> tuple[Broken, ...]:
    """Return the faults that may affect the model with the node's release of vLLM.

    Raises HostError if a fault is certain, since all packages that cause it are installed.
    """
    node = request.node
    names = [request.model]
    if node.preset:
        # A folder may have any name, but --preset tells which model is in it.
        names.append(node.preset.id)

    architectures = request.architectures
    if request.checkpoint:
        architectures = request.checkpoint.architectures

    faults = broken_for(names, architectures, node.situation)
    for fault in faults:
        # Certain if a version of each package that causes it is known to be installed.
        if fault.installed and all(map(node.situation.get, fault.installed)):
            packages = [f"{name} {node.situation[name]}" for name in fault.installed]
            here = " and ".join(packages)
            raise HostError(
                f"{request.model} on vLLM {node.vllm} {fault.effect}, and {here} is installed here",
                why=fault.cause,
                hint=f"{fault.cure} `{fault.command}`" if fault.command else fault.cure,
            )

    return faults


def memory_request(request: ServeRequest, flags: Values) -> MemoryRequest | None:
    """Return what the memory is planned for, None if nothing tells the size of the weights."""
    if request.weights is None:
        return None

    node = request.node
    return MemoryRequest(
        pool=request.memory,
        weights=request.weights,
        checkpoint=request.checkpoint,
        drafter_gib=request.drafter_gib or 0.0,
        flags={**flags, **request.given},
        nodes=node.nodes,
        ray=node.executor.name == "ray",
        vllm=node.vllm,
    )


@frozen
class NodeCount:
    """The least number of nodes that hold a model, 0 if no number does, and the plan for one."""

    nodes: int
    plan: MemoryPlan | None


def count_nodes(request: ServeRequest, memory: MemoryRequest) -> NodeCount:
    """Return the least number of nodes that hold the model of a request."""
    preset = request.node.preset
    least = 1
    # A lower bound of the size may fit one Spark although the preset says that the model does not.
    if preset and not preset.single and memory.pool.shared and memory.weights.is_least:
        least = preset.nodes

    for nodes in range(1, _MOST_NODES + 1):
        plan = plan_memory(memory.on(nodes))
        if plan and plan.fits:
            return NodeCount(nodes=max(nodes, least), plan=plan)
    return NodeCount(nodes=0, plan=None)


def check_size(request: ServeRequest, plan: MemoryPlan, least: NodeCount) -> None:
    """Raise HostError if the plan of a node does not fit its memory."""
    nodes = request.node.nodes
    if plan.fits and 0 < least.nodes <= nodes:
        return

    pool = request.memory
    weights = request.weights
    size = f"{plan.rows[0].gib:.0f}"
    source = ""
    if weights and weights.is_least and not plan.is_whole:
        size = f"at least {size}"
        source = f" (by {weights.source})"

    beside = sum(row.gib for row in plan.rows[1:]) + plan.given_gib
    rest = "; the CPU needs the rest of the memory" if pool.shared else ""
    raise HostError(
        f"{request.model} does not fit: {size} GiB of weights per node{source}, and there is room "
        f"for {max(plan.room_gib - beside, 0):.0f}",
        why=f"{plan.share:.2f} of {pool.gib:.1f} GiB ({pool.whose}), less {beside:.0f} for "
        f"activations and the least KV cache{rest}",
        hint="take " + "; or ".join(_ways_out(request, plan, least)),
    )


def _ways_out(request: ServeRequest, plan: MemoryPlan, least: NodeCount) -> list[str]:
    """Return hints for a model that does not fit, the best first: other nodes, another model."""
    preset = request.node.preset
    instead = (preset.instead if preset else "") or "a checkpoint in fewer bits"

    if not request.memory.shared:
        enough = math.ceil(plan.rows_gib / plan.share)
        return [
            instead,
            f"a GPU with {enough} GiB",
            "for a line that a Spark runs: --target gb10",
        ]

    if not least.nodes:
        return [instead]
    what = f"{least.nodes} nodes: --role head --nodes {least.nodes}"
    if least.plan and least.plan.longest_context:
        weights = least.plan.rows[0].gib
        tokens = least.plan.longest_context
        what += f" ({weights:.0f} GiB each, at most {tokens:,} tokens)"
    return [what, instead]


def choose_preset(model: str, named: str | None, environment: Values) -> Preset | None:
    """Return the preset for a model, None if it has none.

    ``named`` is the preset that the user names: ``none`` means no preset, None means the model's.
    Raises UsageError for an unknown preset, or if the model is unknown and its name is similar to
    that of a preset.
    """
    if named == "none":
        return None
    if named is not None:
        return named_preset(named)

    preset = find_preset(model)
    is_here = Path(model).is_dir() or os.access(
        download_folder(model, environment), os.R_OK
    )
    if preset or is_here or model.lower() in model_recipes():
        return preset

    similar = suggest_presets(model)
    if not similar:
        return None

    raise UsageError(
        f"no model is known as {model}",
        why="it is neither a preset nor here, and like the name of one",
        hint=f"did you mean {' or '.join(similar)}? If there is such a model, add --preset none",
    )


def listen_address(choice: str, node: Node, host: Host) -> str:
    """Return the address for a choice of --listen; a worker always gets the local one.

    Raises HostError if there is no such address, UsageError if there are several.
    """
    if choice == "local" or node.role == "worker":  # a worker answers no requests
        return LOCAL
    if choice == "cable":
        return _cable_address(node, host)

    return _lan_address(host)


def _cable_address(node: Node, host: Host) -> str:
    # The address of the head may be one on the LAN, although the data goes over the cable.
    is_head_on_cable = node.attachment.data == node.attachment.netdev
    if node.head and is_head_on_cable:
        return node.head

    try:
        fabric = find_fabric(host, node.nodes, node.head)
        return choose_address(host, "roce", "head", "", fabric)[1]
    except HostError as error:
        raise HostError(
            f"--listen cable: {error.what}",
            hint="take --listen lan, or name one: --host ADDRESS",
        ) from None


def _lan_address(host: Host) -> str:
    """Return the only permanent IPv4 address of Ethernet and Wi-Fi interfaces outside QSFP cages.

    Raises HostError if there is none, UsageError if there are several.
    """
    netdev_by_address = {}
    for netdev in find_lan(host):
        if netdev.cage is None:
            for address in netdev.lasting:
                netdev_by_address[str(address.ip)] = netdev.name

    if not netdev_by_address:
        raise HostError(
            "--listen lan: no interface beside the QSFP cages has an IPv4 address",
            hint="take --listen local or cable",
        )

    chosen, *others = netdev_by_address
    if others:
        places = [f"{ip} on {name}" for ip, name in netdev_by_address.items()]
        raise UsageError(
            f"--listen lan: {', '.join(places)}",
            hint="name the address: --host ADDRESS",
        )

    return chosen


def listen_notes(request: ServeRequest) -> Iterator[str]:
    """Yield notes on who can reach the server; none for a worker."""
    node = request.node
    host = request.host
    if node.role == "worker":
        return
    if _is_loopback(host):
        yield f"it listens on {host}, for this machine alone; --listen cable or lan opens it"
        return

    if host in _ANY:
        yield "it listens on every interface"
    else:
        command = quoted("curl", f"localhost:{request.port}")
        yield f"it listens on {host} alone: `{command}` is refused"
    if host != node.head:
        yield (
            f"everybody who reaches {host} can use the model: vLLM asks nobody for a key "
            "unless VLLM_API_KEY or --api-key is set"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def models_url(request: ServeRequest) -> str:
    """Return the URL that lists the served models, "" for a worker."""
    if request.node.role == "worker":
        return ""

    host = _ANY.get(request.host, request.host)
    shown = f"[{host}]" if ":" in host else host

    return f"http://{shown}:{request.port}/v1/models"
