"""Describe what a node is to serve, and check this request and whether the model fits.

A Spark has one memory that CPU and GPU share, and NVML does not tell its size. Other GPUs have
their own memory, and NVML tells its size. If a size is unknown, it is not checked, and a note says
so.

vLLM's `--host` is for the API server only. Nodes find each other by ``--master-addr`` and
``VLLM_HOST_IP``, so every address to listen on works for a model on several nodes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

from patchkit.errors import HostError, UsageError
from patchkit.frozen import Values, frozen
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host
from patchkit.runtime.node.decision import Node
from patchkit.runtime.node.fabric import find_fabric
from patchkit.runtime.node.topology import choose_address, find_lan
from patchkit.runtime.rules.presets import (
    Broken,
    Preset,
    broken_for,
    find_preset,
    find_recipe,
    load_flag_rules,
    model_recipes,
    named_preset,
    suggest_presets,
)
from patchkit.runtime.rules.rule import BY_DEFAULT, Names, RuleChoice
from patchkit.runtime.serve.checkpoint import Checkpoint, download_folder
from patchkit.target import DEFAULT_TARGET, is_unified
from patchkit.units import BYTES_PER_GIB, KIB_PER_GIB, MIB_PER_GIB

LOCAL = "127.0.0.1"
MASTER_PORT = 29501  # vLLM's default
_MOST_NODES = 8  # if more were needed, more Sparks are not advised
_UNCHECKED = "whether it fits was not checked:"

_BITS_PER_BYTE = 8
_UNITS = {"b": 10**9, "t": 10**12}

# 122B in Qwen3.5-122B-A10B. It does not match A10B (the parameters read for a token), nor 8x7B
# (whose experts share layers, so that the product would be too large).
_PARAMETERS = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([bt])(?![a-z0-9])")
_BITS = re.compile(r"(\d+(?:\.\d+)?)(?:bit|bpw)")
_WORDS = re.compile(r"[a-z0-9]+")

LISTEN = ("local", "cable", "lan")

# Addresses that stand for all interfaces → the address for a client on this machine. patchkit never
# chooses such an address, but a user may.
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


@frozen
class Weights:
    """The size of a model's weights; ``source`` says, in words, where it is from.

    ``is_least`` says that the size is a lower bound, ``from_name`` that only the name tells it.
    """

    gib: float
    source: str
    is_least: bool = False
    from_name: bool = False


def find_weights(
    model: str, preset: Preset | None, folder_gib: float | None, quantization: str = ""
) -> Weights | None:
    """Return the size of the weights from the best source, None if no source tells it.

    ``folder_gib`` is the size of local files. ``quantization`` is that of the model, "" if unknown.
    """
    if folder_gib:
        return Weights(gib=folder_gib, source="its files")
    if preset and preset.weights_gib:
        return Weights(gib=preset.weights_gib, source="its preset")

    names = [model, preset.id] if preset else [model]
    for name in names:
        recipe = find_recipe(name)
        if recipe and recipe.weights_gib:
            return Weights(
                gib=recipe.weights_gib, source="upstream's recipe", is_least=True
            )

    return _weigh_name(model, quantization)


def _weigh_name(model: str, quantization: str) -> Weights | None:
    """Return the least size that a model with this name can have, None if the name tells none."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    sizes = [float(number) * _UNITS[unit] for number, unit in _PARAMETERS.findall(name)]
    if not sizes:
        return None

    # Other numbers in a name may be the tokens of its training, or the size of a model that it was
    # distilled from. The smallest number is safe for a lower bound.
    parameters = min(sizes)
    memory = load_flag_rules().memory
    words = [*_WORDS.findall(name), quantization]
    known_bits = [memory.bits[word] for word in words if word in memory.bits]
    known_bits += map(float, _BITS.findall(name))
    bits = min(known_bits, default=memory.least_bits)

    return Weights(
        gib=parameters * bits / _BITS_PER_BYTE / BYTES_PER_GIB,
        source=f"its name: {parameters / 10**9:g} * 10^9 parameters in {bits:g} bits or more",
        is_least=True,
        from_name=True,
    )


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
        architectures = request.checkpoint.config["architectures"]

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


@frozen
class Fit:
    """The GiB of all weights of a model, and the room for weights on each of ``nodes`` nodes.

    ``fitting_nodes`` is the least number of such nodes that can hold the weights, 0 if no number
    can.
    """

    weights_gib: float
    room_gib: float
    nodes: int
    fitting_nodes: int

    @property
    def left_gib(self) -> float:
        """Return the GiB that a node has left beside its part of the weights."""
        return self.room_gib - self.weights_gib / self.nodes


def measure_fit(
    request: ServeRequest, share: float, *, drafts: bool = False
) -> Fit | None:
    """Return how the weights fit into ``share`` of the memory, None if a size is unknown.

    ``drafts`` says that the checkpoint that drafts is also loaded.
    """
    weights = request.weights
    pool = request.memory
    if weights is None or pool.gib is None:
        return None

    drafter_gib = request.drafter_gib or 0
    gib = weights.gib + drafter_gib * drafts

    # The same share must also hold activations and a least KV cache.
    room = pool.gib * share - load_flag_rules().memory.margin_gib
    fitting_nodes = math.ceil(gib / room) if room > 0 else 0

    preset = request.node.preset
    # A lower bound of the size may fit one Spark although the preset says that the model does not.
    if preset and not preset.single and pool.shared and weights.is_least:
        fitting_nodes = max(fitting_nodes, preset.nodes)

    return Fit(
        weights_gib=gib,
        room_gib=room,
        nodes=request.node.nodes,
        fitting_nodes=fitting_nodes,
    )


def check_size(request: ServeRequest, share: float, fit: Fit) -> None:
    """Raise HostError if a node's part of the weights does not fit ``share`` of its memory."""
    if 0 < fit.fitting_nodes <= fit.nodes:
        return

    pool = request.memory
    weights = request.weights
    size = f"{fit.weights_gib / fit.nodes:.0f}"
    source = ""
    if weights and weights.is_least:
        size = f"at least {size}"
        source = f" (by {weights.source})"

    margin = load_flag_rules().memory.margin_gib
    rest = "; the CPU needs the rest of the memory" if pool.shared else ""

    raise HostError(
        f"{request.model} does not fit: {size} GiB of weights per node{source}, and there is room "
        f"for {max(fit.room_gib, 0):.0f}",
        why=f"{share:.2f} of {pool.gib:.1f} GiB ({pool.whose}), less {margin:.0f} for "
        f"activations and the least KV cache{rest}",
        hint="take " + "; or ".join(_ways_out(request, share, fit)),
    )


def _ways_out(request: ServeRequest, share: float, fit: Fit) -> list[str]:
    """Return hints for a model that does not fit, the best first: other nodes, another model."""
    preset = request.node.preset
    instead = (preset.instead if preset else "") or "a checkpoint in fewer bits"

    if not request.memory.shared:
        margin = load_flag_rules().memory.margin_gib
        enough = math.ceil((fit.weights_gib / fit.nodes + margin) / share)
        return [
            instead,
            f"a GPU with {enough} GiB",
            "for a line that a Spark runs: --target gb10",
        ]

    nodes = fit.fitting_nodes
    if 0 < nodes <= _MOST_NODES:
        return [f"{nodes} nodes: --role head --nodes {nodes}", instead]
    return [instead]


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


@frozen
class MemoryPool:
    """The memory that a model must fit into; ``gib`` is None if its size is unknown.

    ``shared`` says that CPU and GPU share it; otherwise it is the GPU's alone. ``whose`` names the
    device. ``note`` tells a user which size was used and why, "" for the host's own size.
    """

    gib: float | None
    shared: bool
    whose: str
    note: str = ""


def memory_pool(host: Host, node: Node) -> MemoryPool:
    """Return the memory of the host, or an assumed one if the node is for another device.

    It is also assumed if the host does not tell the size of its memory or has no GPU.
    """
    if node.target == DEFAULT_TARGET and not host.gpus:
        return _assumed_pool(node.target, "no GPU is found here")
    if node.target != host.target:
        return _assumed_pool(node.target, f"for {node.target}, which this host is not")
    if is_unified(host.target):
        if host.memory is None:
            return _assumed_pool(node.target, "/proc/meminfo cannot be read")
        gib = host.memory.total / KIB_PER_GIB
        return MemoryPool(gib=gib, shared=True, whose="this host")

    gpu = host.gpus[0]
    if gpu.memory is None:
        note = f"{_UNCHECKED} nvidia-smi does not say how much memory {gpu.name} has"
        return MemoryPool(gib=None, shared=False, whose=gpu.name, note=note)

    gib = gpu.memory / MIB_PER_GIB
    note = (
        f"sized for {gpu.name}, with {gib:.1f} GiB of its own: vLLM's share of it, "
        "since that of presets and rules is for memory which CPU and GPU share"
    )
    return MemoryPool(gib=gib, shared=False, whose=gpu.name, note=note)


def _assumed_pool(device: str, reason: str) -> MemoryPool:
    """Return the known size for a Spark, and an unknown size for another device."""
    if device != DEFAULT_TARGET:
        note = f"{_UNCHECKED} {reason}, and {device}'s memory is not known here"
        shared = is_unified(device)
        return MemoryPool(gib=None, shared=shared, whose=device, note=note)

    gib = load_flag_rules().memory.total_gib
    note = f"{reason}: sized for a Spark, with {gib} GiB that CPU and GPU share"
    return MemoryPool(gib=gib, shared=True, whose="a Spark", note=note)


def listen_address(choice: str, node: Node, host: Host) -> str:
    """Return the address for one of LISTEN; a worker always gets the local one.

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
