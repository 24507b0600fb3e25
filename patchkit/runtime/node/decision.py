"""Decide the role, cluster, versions and model of a node: a ``Node``.

`env` (the env file) and `serve-args` (the command line) share this decision. It depends on the
options, the facts of the host and an env file. The only files that are read are those of an
installed vLLM, for the names of its variables.
"""

from dataclasses import field, replace

from patchkit.frozen import Fields, Values, frozen
from patchkit.runtime.envfile.env_file import EnvFile, check_transfer
from patchkit.runtime.host.host import (
    FlashInfer,
    Host,
    describe_addresses,
    plain_version,
)
from patchkit.runtime.node.topology import Attachment, choose_attachment
from patchkit.runtime.rules.presets import Preset, named_preset
from patchkit.runtime.rules.releases import (
    nccl_variables,
    other_variables,
    refusal,
    vllm_variables,
    within,
)
from patchkit.runtime.rules.rule import (
    BY_DEFAULT,
    Executor,
    RuleChoice,
    Situation,
    choose_executor,
)
from patchkit.target import DEFAULT_TARGET

# Field of the options, and fact of an env file → the option that must not contradict the file, ""
# for one that may.
_OPTIONS = {
    "role": "--role",
    "topology": "--topology",
    "executor": "--executor",
    "vllm": "--vllm",
    "head": "--head-ip",
    "quantization": "",
    "target": "",
}
_OF_NODE = (
    "role",
    "target",
)  # the facts of a head's file that do not hold for a worker


@frozen
class NodeOptions:
    """The options of a user about a node. Empty options, and ``auto``, are decided in this module.

    ``head`` is the head's IPv4 address. ``vllm``, ``nccl`` and ``triton`` replace the installed
    versions. ``model`` is the id of a preset: "" means none, None means the one in the env file.
    ``choice`` turns rules of
    variables on and off, and ``extra`` are variables that the user adds.
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
    choice: RuleChoice = BY_DEFAULT
    extra: Values = field(default_factory=dict)


@frozen
class Node:
    """The part of a node in its cluster, and the model that it serves.

    ``head`` is the head's IPv4 address, "" for a node alone. ``versions`` maps torch, triton, nccl
    and transformers to their versions, "" if unknown; transformers is missing if it belongs to
    another vLLM. ``kernels`` is the node's FlashInfer, None if the node has another GPU or vLLM
    than this host. ``choice`` and ``extra`` include those of the env file.
    """

    role: str
    nodes: int
    head: str
    vllm: str
    executor: Executor
    attachment: Attachment
    target: str
    versions: Values
    kernels: FlashInfer | None
    quantization: str
    preset: Preset | None
    choice: RuleChoice
    extra: Values

    @property
    def situation(self) -> Situation:
        """Return the facts that the conditions of rules test, by name."""
        quantization = self.quantization
        family = ""
        moe = "unknown"
        if self.preset:
            quantization = quantization or self.preset.quantization
            family = self.preset.family
            moe = "yes" if self.preset.moe else "no"

        return {
            "role": self.role,
            "topology": self.attachment.topology,
            "twin": self.attachment.twin,
            "executor": self.executor.name,
            "copies": self.executor.copies,
            "target": self.target,
            "quantization": quantization,
            "moe": moe,
            "family": family,
            "vllm": self.vllm,
            "nodes": str(self.nodes),
            **self.versions,
            **(self.kernels.facts if self.kernels else {}),
        }


def decide_node(
    options: NodeOptions,
    host: Host,
    file: EnvFile | None = None,
    *,
    addressed: bool = True,
) -> Node:
    """Return the part of a node in its cluster.

    ``file`` is the node's own env file, or its head's. With ``addressed`` this host must have the
    node's address; without it, the node may be another machine, as when a command line is written
    for it. Raises UsageError for options that contradict each other or the file, HostError if the
    hardware or an installed version does not fit, SourceError for a variable in the head's file
    that must not be taken over.
    """
    request = options
    if file:
        request = _fill_in(options, file, host.versions["vllm"])
    request = _fill_defaults(request, host)
    versions = _find_versions(request, host)

    if file and _is_from_head(options, file):
        nccl = versions["nccl"]
        _check_head_file(request, file, host, nccl, options.extra)
    elif file and not (addressed or options.role):
        _check_own_file(file, host)
    _check_cluster(request)
    preset = named_preset(request.model) if request.model else None
    if preset:
        _check_preset(preset, request)

    attachment = _attach(request, host, addressed=addressed)
    is_same = _is_same(request.vllm, host.versions["vllm"])
    is_here = is_same and request.target == host.target
    return Node(
        role=request.role,
        nodes=request.nodes,
        head=request.head or attachment.address,
        vllm=request.vllm,
        executor=choose_executor(
            request.vllm, request.role, request.executor, request.choice.wanted
        ),
        attachment=attachment,
        target=request.target,
        versions=versions,
        kernels=host.software.flashinfer if host.software and is_here else None,
        quantization=request.quantization,
        preset=preset,
        choice=request.choice,
        extra=request.extra,
    )


def _fill_defaults(options: NodeOptions, host: Host) -> NodeOptions:
    """Return the options with defaults for role, nodes, vLLM and device.

    Raises UsageError if no vLLM is named or installed.
    """
    vllm = options.vllm or host.versions["vllm"]
    if not vllm:
        raise refusal("no-vllm")

    role = options.role or "single"
    default_nodes = 1 if role == "single" else 2
    default_target = host.target if host.gpus else DEFAULT_TARGET
    return replace(
        options,
        vllm=vllm,
        role=role,
        nodes=options.nodes or default_nodes,
        target=options.target or default_target,
    )


def _attach(request: NodeOptions, host: Host, *, addressed: bool) -> Attachment:
    """Return how the node is attached to its cluster. Raises as ``choose_attachment`` does."""
    if request.role == "single":
        return Attachment(topology="single")
    # This host may not be the node: its interfaces do not matter if the options say enough.
    if not addressed and request.head and request.topology != "auto":
        return Attachment(topology=request.topology)

    return choose_attachment(
        host,
        role=request.role,
        topology=request.topology,
        nodes=request.nodes,
        head=request.head,
        target=request.target,
    )


def _find_versions(options: NodeOptions, host: Host) -> Values:
    """Return the versions that rules depend on: from the options, else the installed ones."""
    installed = host.versions
    versions = {
        "torch": installed["torch"],
        "triton": options.triton or installed["triton"],
        "nccl": options.nccl or installed["nccl"],
    }

    # The installed transformers belong to the installed vLLM; another release may need others.
    if _is_same(options.vllm, installed["vllm"]):
        versions["transformers"] = installed["transformers"]
    return versions


def _is_from_head(options: NodeOptions, file: EnvFile) -> bool:
    """Return whether a worker reads the file of its head, so that the roles may differ."""
    return file.role == "head" and options.role == "worker"


def _fill_in(options: NodeOptions, file: EnvFile, installed: str) -> NodeOptions:
    """Return the options; those that are not given come from the facts of the file.

    Raises UsageError for an option that contradicts the file, HostError if the ``installed`` vLLM
    is another release than that of the file.
    """
    facts = file.facts
    filled: Fields = {}
    for name, option in _OPTIONS.items():
        value = getattr(options, name).removeprefix("auto")
        stated = facts.get(name, "")
        if _is_from_head(options, file) and name in _OF_NODE:
            stated = ""

        if option and value and stated and not _is_same(value, stated):
            raise refusal(
                "against-file",
                option=f"{option} {value}",
                file=file.where,
                says=stated,
            )
        filled[name] = value or stated

    vllm = options.vllm or installed
    if vllm and not _is_same(vllm, facts["vllm"]):
        raise refusal(
            "other-vllm",
            here=vllm,
            file=file.where,
            there=facts["vllm"],
        )

    if options.model is None:
        filled["model"] = facts.get("model", "")

    return replace(
        options,
        **filled,
        nodes=options.nodes or int(facts["nodes"]),
        choice=RuleChoice(
            wanted=options.choice.wanted | _list_rules(file, "with"),
            unwanted=options.choice.unwanted | _list_rules(file, "without"),
        ),
        extra={**file.extra, **options.extra},
    )


def _is_same(version: str, reference: str) -> bool:
    """Compare versions without their local parts (+cu130, +gb10), which name a build."""
    return plain_version(version) == plain_version(reference)


def _list_rules(file: EnvFile, fact: str) -> set[str]:
    """Return the ids of rules in the fact ``with`` or ``without`` of the file."""
    ids = file.facts.get(fact, "")
    return set(filter(None, ids.split(",")))


def _check_head_file(
    request: NodeOptions,
    file: EnvFile,
    host: Host,
    nccl: str,
    extra: Values,
) -> None:
    """Check that a worker on this host may use the file of its head.

    Raises HostError if the NCCL is another one than on the head, or if this host is the head;
    SourceError for a variable that must not be taken over.
    """
    own_nccl = plain_version(nccl)
    head_nccl = plain_version(file.facts.get("nccl", ""))
    if own_nccl and head_nccl and own_nccl != head_nccl:
        raise refusal("other-nccl", here=own_nccl, there=head_nccl)

    names = {
        *vllm_variables(request.vllm, host.vllm_home(request.vllm)),
        *nccl_variables(request.nccl),
        *other_variables(),
    }
    check_transfer(file, names, extra)

    if host.has_address(file.facts["head"]):
        raise refusal("head-here", head=file.facts["head"])


def _check_own_file(file: EnvFile, host: Host) -> None:
    """Raise HostError if the file is that of another node than this host."""
    own_address = file.variables.get("VLLM_HOST_IP", "")
    address = own_address or file.facts.get("head", "")
    if file.role == "single" or not address or host.has_address(address):
        return

    raise refusal(
        "file-of-another",
        file=file.where,
        role=file.role,
        address=address,
        has=describe_addresses(host),
    )


def _check_cluster(request: NodeOptions) -> None:
    """Raise UsageError if role, number of nodes and head contradict each other."""
    if request.role == "single":
        if request.nodes > 1 or request.head:
            raise refusal("single-with-head")
    elif request.nodes < 2:
        raise refusal("one-node", role=request.role)
    elif request.role == "worker" and not request.head:
        raise refusal("no-head")


def _check_preset(preset: Preset, request: NodeOptions) -> None:
    """Raise UsageError if the preset has another quantization, or needs a later vLLM."""
    quantizations = ("", preset.quantization)
    if preset.quantization and request.quantization not in quantizations:
        raise refusal(
            "other-quantization",
            model=preset.id,
            has=preset.quantization,
            asked=request.quantization,
        )

    if preset.min_vllm and not within(request.vllm, f">={preset.min_vllm}"):
        raise refusal(
            "older-vllm",
            model=preset.id,
            oldest=preset.min_vllm,
            source=preset.source,
            vllm=request.vllm,
        )
