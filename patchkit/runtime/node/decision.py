"""Decide what a node is, once for `env` (its env file) and `serve-args` (its command line).

Pure but for the names that an installed vLLM reads: options, facts of the host and an env file in,
one decision or one error out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from patchkit.runtime.envfile.env_file import EnvFile, check_transfer
from patchkit.runtime.host.host import Host, plain
from patchkit.runtime.host.networks import describe_addresses
from patchkit.runtime.node.topology import Attachment, choose_attachment
from patchkit.runtime.rules.presets import Preset, named_preset
from patchkit.runtime.rules.refusals import refusal
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import BY_DEFAULT, RuleChoice, Situation
from patchkit.runtime.rules.variable_rules import Executor, choose_executor
from patchkit.runtime.rules.variables import (
    nccl_variables,
    other_variables,
    vllm_variables,
)
from patchkit.target import DEFAULT_TARGET


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The options of a user about a node; what is empty or ``auto`` is decided.

    ``nccl`` and ``triton`` count instead of what is installed. ``model`` names a preset, "" none,
    None the env file's; ``preset`` is made of a user's recipe. ``choice`` is of rules about
    variables, ``extra`` are variables that the user adds.
    """

    role: str = ""
    nodes: int = 0
    head: str = ""
    topology: str = "auto"
    executor: str = "auto"
    vllm: str = ""
    nccl: str = ""
    triton: str = ""
    target: str = ""
    quantization: str = ""
    model: str | None = None
    preset: Preset | None = None
    choice: RuleChoice = BY_DEFAULT
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The part of a node in its cluster, and what it serves.

    ``head`` is the head's address, empty for a node alone; ``versions`` are those of torch, triton,
    NCCL and transformers, empty where unknown; ``choice`` and ``extra`` include what the head's
    file brings.
    """

    role: str
    nodes: int
    head: str
    vllm: str
    executor: Executor
    attachment: Attachment
    target: str
    versions: Mapping[str, str] = field(default_factory=dict)
    quantization: str = ""
    preset: Preset | None = None
    choice: RuleChoice = BY_DEFAULT
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def situation(self) -> Situation:
        """Return the facts that conditions of rules are about."""
        preset = self.preset
        return {
            "role": self.role,
            "topology": self.attachment.topology,
            "twin": self.attachment.twin,
            "executor": self.executor.name,
            "copies": self.executor.copies,
            "target": self.target,
            "quantization": self.quantization
            or (preset.quantization if preset else ""),
            "moe": "unknown" if preset is None else "yes" if preset.moe else "no",
            "family": preset.family if preset else "",
            "vllm": self.vllm,
            "nodes": str(self.nodes),
            **self.versions,
        }


def decide(
    options: NodeOptions,
    host: Host,
    file: EnvFile | None = None,
    *,
    addressed: bool = True,
) -> Node:
    """Return what a node is.

    ``file`` is the node's own env file, or its head's. ``addressed`` says whether this host must
    have the node's address; a command line can also be written elsewhere. Raises UsageError for
    options that contradict each other or the file, HostError if the hardware or an installed
    version is not what they need, SourceError for a variable that must not be taken over.
    """
    installed = host.versions
    versions = {
        "torch": installed["torch"],
        "triton": options.triton or installed["triton"],
        "nccl": options.nccl or installed["nccl"],
    }
    asked = _with_file(options, file, installed["vllm"]) if file else options
    vllm = asked.vllm or installed["vllm"]
    if not vllm:
        raise refusal("no-vllm")
    # What is beside the vLLM here says nothing of another release.
    if plain(vllm) == plain(installed["vllm"]):
        versions["transformers"] = installed["transformers"]
    role = asked.role or "single"
    nodes = asked.nodes or (1 if role == "single" else 2)
    preset = asked.preset or (named_preset(asked.model) if asked.model else None)
    if file:
        _check_file(options, file, host, vllm, versions["nccl"], addressed=addressed)
    _check_request(role, nodes, asked, vllm, preset)
    target = asked.target or (host.target if host.gpus else DEFAULT_TARGET)
    attachment = Attachment(topology="single" if role == "single" else asked.topology)
    # A command line for another node asks this host only for what is not given.
    if role != "single" and (addressed or asked.topology == "auto" or not asked.head):
        attachment = choose_attachment(
            host,
            role=role,
            topology=asked.topology,
            nodes=nodes,
            head=asked.head,
            target=target,
        )
    executor = choose_executor(vllm, role, asked.executor, asked.choice.wanted)
    return Node(
        role=role,
        nodes=nodes,
        head=asked.head or attachment.address,
        vllm=vllm,
        executor=executor,
        attachment=attachment,
        target=target,
        versions=versions,
        quantization=asked.quantization,
        preset=preset,
        choice=asked.choice,
        extra=asked.extra,
    )


def _with_file(options: NodeOptions, file: EnvFile, installed: str) -> NodeOptions:
    """Return the options, filled in from the file. Raises UsageError, HostError."""
    facts = file.facts
    of_head = (file.role, options.role) == ("head", "worker")
    topology = "" if options.topology == "auto" else options.topology
    executor = "" if options.executor == "auto" else options.executor
    given = {
        # A worker reads the file of its head: their roles differ on purpose.
        "role": "" if of_head else options.role,
        "topology": topology,
        "executor": executor,
        "vllm": options.vllm,
        "head": options.head,
    }
    for fact, value in given.items():
        # Local parts (+cu130, +gb10) may differ: they name a build, not a release.
        if value and plain(value) != plain(facts.get(fact, value)):
            option = f"--{'head-ip' if fact == 'head' else fact} {value}"
            raise refusal(
                "against-file", option=option, file=file.where, says=facts[fact]
            )
    if installed and not options.vllm and plain(installed) != plain(facts["vllm"]):
        raise refusal(
            "other-vllm", here=installed, file=file.where, there=facts["vllm"]
        )
    listed = {
        it: {*filter(None, facts.get(it, "").split(","))} for it in ("with", "without")
    }
    return replace(
        options,
        role=options.role or file.role,
        nodes=options.nodes or int(facts["nodes"]),
        head=options.head or facts.get("head", ""),
        topology=topology or facts["topology"],
        executor=executor or facts["executor"],
        vllm=options.vllm or facts["vllm"],
        target=options.target
        or ("" if of_head else facts.get("target", "")),  # each node its own
        quantization=options.quantization or facts.get("quantization", ""),
        model=facts.get("model", "") if options.model is None else options.model,
        choice=RuleChoice(
            wanted=options.choice.wanted | listed["with"],
            unwanted=options.choice.unwanted | listed["without"],
        ),
        extra={**file.extra, **options.extra},
    )


def _check_file(
    options: NodeOptions,
    file: EnvFile,
    host: Host,
    vllm: str,
    nccl: str,
    *,
    addressed: bool,
) -> None:
    """Raise HostError for a file of another node or NCCL, SourceError for what must not travel."""
    there = plain(file.facts.get("nccl", ""))
    own = file.variables.get("VLLM_HOST_IP", "") or file.facts.get("head", "")
    if (file.role, options.role) == ("head", "worker"):
        if nccl and there and plain(nccl) != there:
            raise refusal("other-nccl", here=plain(nccl), there=there)
        read = {
            *vllm_variables(vllm, host.vllm_home(vllm)),
            *nccl_variables(options.nccl),
        }
        check_transfer(file, {*read, *other_variables()}, options.extra)
        # One of its workers reads it, which may be another host than this one.
        if host.has_address(file.facts["head"]):
            raise refusal("head-here", head=file.facts["head"])
    elif (
        not (
            addressed or options.role or file.role == "single" or host.has_address(own)
        )
        and own
    ):
        words = {"file": file.where, "role": file.role, "address": own}
        raise refusal("file-of-another", **words, has=describe_addresses(host))


def _check_request(
    role: str, nodes: int, asked: NodeOptions, vllm: str, preset: Preset | None
) -> None:
    """Raise UsageError for a role, a number of nodes and a preset that do not go together."""
    if role == "single" and (nodes > 1 or asked.head):
        raise refusal("single-with-head")
    if role != "single" and nodes < 2:
        raise refusal("one-node", role=role)
    if role == "worker" and not asked.head:
        raise refusal("no-head")
    if (
        preset
        and preset.quantization
        and asked.quantization not in ("", preset.quantization)
    ):
        quantizations = {"has": preset.quantization, "asked": asked.quantization}
        raise refusal("other-quantization", model=preset.id, **quantizations)
    if preset and preset.min_vllm and not within(vllm, f">={preset.min_vllm}"):
        words = {"model": preset.id, "oldest": preset.min_vllm, "source": preset.source}
        raise refusal("older-vllm", **words, vllm=vllm)
