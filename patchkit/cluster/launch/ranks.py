"""Plan the ranks of a cluster, one on each node, which serve one model together. Pure.

`patchkit env` and `patchkit serve-args` decide the same for a single node.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from patchkit.cluster.agent.node_facts import ModelPrint, NodeFacts
from patchkit.cluster.launch.cluster_file import ClusterFile, ClusterNode, ServeChoices
from patchkit.cluster.models.model_files import SHORT, ModelFolder
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.frozen import Fields, Values, frozen
from patchkit.runtime.envfile.env_file import EnvFile, Format, parse_env_file
from patchkit.runtime.memory.given_flags import given_drafter, given_flags
from patchkit.runtime.memory.pool import MemoryPool, memory_pool
from patchkit.runtime.node.cluster_env import (
    ClusterEnv,
    adopt_shared_settings,
    file_text,
    make_cluster_env,
)
from patchkit.runtime.node.decision import Node, NodeOptions, decide_node
from patchkit.runtime.node.topology import choose_attachment
from patchkit.runtime.rules.presets import (
    Preset,
    find_preset,
    load_flag_rules,
    named_preset,
    suggest_presets,
)
from patchkit.runtime.rules.rule import CACHES, STACKS, RuleChoice, load_variable_rules
from patchkit.runtime.serve.args import ServeCommand, serve_args
from patchkit.runtime.serve.request import (
    MASTER_PORT,
    ServeRequest,
    listen_address,
)
from patchkit.units import BYTES_PER_GIB

# Patterns of flags of `patchkit env` in hints → the keys of cluster.toml that replace them.
_FLAGS = {
    r"(: |, or with )--role \w+( --nodes \d+)?": "",
    r"`\w+ env --role head (--topology \w+) (--head-ip [\d.]+)`": r"\1, \2",
    r"--without ([\w-]+)": r'without = ["\1"] in [serve]',
    r"--set (\w+)=(\S+);": r'set = { \1 = "\2" } in [serve];',
    r"--head-ip ([\w.]+)": r"""address = "\1" in the head's [[node]]""",
    r"--ctx (\d+)": r'"--max-model-len", "\1" in `args` of [serve]',
    r"--executor \w+, or ": "",
    r"--(topology|target|preset) (\w+)": r'\1 = "\2" in [serve]',
}


@frozen
class ServedModel:
    """A model: clients ask for ``name``, and vLLM loads ``source``: that name, or a folder."""

    name: str
    source: str
    preset: Preset | None

    @property
    def folder(self) -> str:
        """Return the model's folder on every node, "" for a model that vLLM itself downloads."""
        if self.source.startswith(("/", "~/")):
            return self.source
        return ""


@frozen
class PlannedRank:
    """The rank of a node: the node's facts, the environment as values and as the text of a file."""

    facts: NodeFacts
    env: ClusterEnv
    text: str
    command: ServeCommand

    @property
    def address(self) -> str:
        """Return the node's IPv4 address in the cluster, "" for a single node."""
        return self.env.node.attachment.address

    @property
    def hub(self) -> str:
        """Return the folder of the Hub's files: HF_HOME of the env file, or its default."""
        for setting in self.env.settings:
            if setting.name == "HF_HOME":
                return setting.value
        return f"{self.facts.home}/.cache/huggingface"


def refuse_ray(cluster: ClusterFile) -> None:
    """Raise UsageError if cluster.toml says that Ray starts the ranks."""
    if cluster.serve.executor == "ray":
        raise UsageError(
            'executor = "ray" in [serve] of cluster.toml: patchkit starts no Ray',
            why="vLLM starts on several nodes by itself (--nnodes), and Ray runs what anybody on "
            "any network of a node sends it",
            hint="leave `executor` out; or start Ray by hand, with what "
            "`patchkit env --executor ray` and `patchkit serve-args` print",
        )


def served_model(cluster: ClusterFile, model: str) -> ServedModel:
    """Return the model that the user names: by a preset, by a repository of the Hub, or a folder.

    A model that cluster.toml pins is served from its folder. Raises UsageError for a name without
    "/" that is no preset's, but resembles one, and for a path that begins in the current folder.
    """
    if model.startswith(".") or _is_folder_here(cluster, model):
        raise UsageError(
            f"{model} is a path in the current folder, which the nodes do not know",
            hint=f"name the whole path: {Path(model).resolve()}",
        )

    preset = _choose_preset(cluster.serve.preset, model)
    name = model
    if preset and model.lower() == preset.name.lower():
        name = preset.id

    source = name
    is_short = not preset and "/" not in model
    if commit := cluster.models.get(name):
        folder = ModelFolder(repo=name, commit=commit).name
        source = str(PurePosixPath(cluster.model_folder, folder))
    elif is_short and (suggestions := suggest_presets(model)):
        hint = f"did you mean {' or '.join(suggestions)}?"
        raise UsageError(f"no model is known as {model}", hint=hint)

    return ServedModel(
        name=name,
        source=source,
        preset=preset,
    )


def _is_folder_here(cluster: ClusterFile, model: str) -> bool:
    """Return whether a name is that of a folder below the current one, and of nothing else.

    A preset's short name, or a model that cluster.toml pins, goes before a folder of that name.
    """
    preset = find_preset(model)
    is_known = model in cluster.models or (preset and "/" not in model)
    with suppress(OSError):  # the name is too long for a file
        return not is_known and not model.startswith("/") and Path(model).is_dir()
    return False


def drafter_folder(serve: ServeChoices) -> str:
    """Return the folder of the model that drafts, by `args` of cluster.toml; "" for none."""
    source = given_drafter(serve.args)
    return ServedModel(name="", source=source, preset=None).folder


def model_folders(cluster: ClusterFile, model: ServedModel) -> list[str]:
    """Return the folders of the model and of the one that drafts, as cluster.toml names them."""
    folders = (model.folder, drafter_folder(cluster.serve))
    return [*filter(None, folders)]


def _choose_preset(choice: str, model: str) -> Preset | None:
    """Return the preset that ``choice`` names, else that of the model; None for "none".

    ``choice`` is `preset` of cluster.toml, "" if it is not set.
    """
    if not choice:
        return find_preset(model)
    if choice == "none":
        return None
    return named_preset(choice)


def other_model(
    prints: Mapping[str, ModelPrint], pin: str = ""
) -> tuple[str, str] | None:
    """Return the first node that holds another model than it should, and the difference in words.

    Returns None if all nodes hold the same. ``prints`` has what each node holds, by its name;
    ``pin`` is the commit in cluster.toml, "" for none. The first node with a record of its files
    has the right model; if no node has a record, the first node has it.
    """

    recorded = [node for node, model in prints.items() if model.commit]
    right_node = next(iter(recorded or prints))

    for node, model in prints.items():
        if model.commit and pin and model.commit != pin:
            commit = model.commit[:SHORT]
            return node, f"is commit {commit}, and cluster.toml pins {pin[:SHORT]}"
        difference = _model_difference(model, prints[right_node], right_node)
        if difference:
            return node, difference
    return None


def _model_difference(
    model: ModelPrint,
    right: ModelPrint,
    where: str,
) -> str:
    """Return how a model differs from the right one, which the node ``where`` has; "" if not."""
    if right.commit and not model.commit:
        return f"has no record of its files, and {where} has one: probably an incomplete copy"
    if model.commit != right.commit:
        commit = model.commit[:SHORT]
        return f"is commit {commit}, and {right.commit[:SHORT]} on {where}"
    if (model.files, model.size) != (right.files, right.size):
        size = f"{model.files} files, {model.size:,} bytes"
        right_size = f"{right.files}, {right.size:,} bytes"
        return f"has other files than {where}: {size}, not {right_size}"
    if model.digest != right.digest:
        difference = "other file names or other contents of small files"
        return f"has the same size as on {where}, but {difference}"
    return ""


def planned_ranks(
    cluster: ClusterFile,
    facts: Sequence[NodeFacts],
    model: ServedModel,
) -> list[PlannedRank]:
    """Return the rank of each node whose facts are given, the head's first.

    Raises HostError for a node without vLLM, or with another address than its ``address``; and
    what the decisions in ``runtime/node`` and ``serve_args`` raise. The text of each error begins
    with the node's name.
    """
    ranks: list[PlannedRank] = []
    head: EnvFile | None = None
    for number, (node, node_facts) in enumerate(
        zip(cluster.members, facts, strict=False)
    ):
        with name_node(node.ssh):
            _require_vllm(cluster, node_facts)
            rank = _plan_rank(cluster, number, facts, model, head)
            _check_address(node, rank)

        if number == 0:
            head = parse_env_file(rank.text, f"{node.ssh}'s env file")
        ranks.append(rank)
    return ranks


def _require_vllm(cluster: ClusterFile, facts: NodeFacts) -> None:
    """Raise HostError for a node without vLLM in its environment or image."""
    software = facts.host.software
    exists = bool(cluster.serve.image or facts.venv)
    if software and software.vllm and exists:
        return

    source = cluster.serve.image or cluster.venv
    raise HostError(
        f"there is no vLLM in {source}" if exists else f"{source} is not there",
        why="if vLLM is in another environment or image, set `venv` or `image` in cluster.toml",
        hint="patchkit cluster install",
    )


def _check_address(node: ClusterNode, rank: PlannedRank) -> None:
    """Raise HostError if `address` in cluster.toml is not the address of the node's rank."""
    if node.address in ("", rank.address):
        return

    where = f"it is reached at {rank.address}"
    if not rank.address:
        host = rank.facts.host
        # Nobody reaches a node that serves alone: any address of its own will do.
        if host.has_address(node.address):
            return
        where = f"it has {' and '.join(host.addresses) or 'none'}"

    raise HostError(
        f"{node.address} is not its address: {where}",
        hint="correct `address` in its [[node]] of cluster.toml, or leave it out",
    )


@contextmanager
def name_node(node: str) -> Iterator[None]:
    """Put a node's name before the text of a PatchkitError of the block.

    The name also goes before a hint with a command of patchkit, and flags of `patchkit env` in the
    hint become the keys of cluster.toml.
    """
    try:
        yield
    except PatchkitError as error:
        error.what = f"{node}: {error.what}"
        for flags, keys in _FLAGS.items():
            error.hint = re.sub(flags, keys, error.hint)
        if "`patchkit " in error.hint:
            error.hint = f"on {node}: {error.hint}"
        raise


def node_addresses(
    cluster: ClusterFile,
    facts: Sequence[NodeFacts],
    choices: Values,
) -> list[str]:
    """Return the IPv4 address of each node in the cluster, the head's first; [""] for one node.

    The nodes need no vLLM yet. ``choices`` are keys of ``[serve]``. Raises HostError for a node
    without an address in the cluster.
    """
    nodes = len(cluster.members)
    if nodes == 1:
        return [""]

    addresses: list[str] = []
    for node, node_facts in zip(cluster.members, facts, strict=True):
        with name_node(node.ssh):
            attachment = choose_attachment(
                node_facts.host,
                role="worker" if addresses else "head",
                topology=choices.get("topology") or "auto",
                nodes=nodes,
                head=addresses[0] if addresses else cluster.members[0].address,
                target=choices.get("target") or node_facts.host.target,
            )
        addresses.append(attachment.address)
    return addresses


def _plan_rank(
    cluster: ClusterFile,
    number: int,
    all_facts: Sequence[NodeFacts],
    model: ServedModel,
    head: EnvFile | None,
) -> PlannedRank:
    """Return the rank of a node; ``head`` is the head's env file, None for the head's own rank."""
    facts = all_facts[number]
    # The folder of the installed vLLM is on another machine: nothing here may look into it.
    software = facts.host.software and replace(facts.host.software, vllm_home="")
    facts = replace(facts, host=replace(facts.host, software=software))
    serve = cluster.serve
    rules = load_variable_rules()
    variables = {rule.id for rule in rules.rules}
    wanted = frozenset(serve.wanted)
    unwanted = frozenset(serve.unwanted)
    choice = RuleChoice(wanted=wanted & variables, unwanted=unwanted & variables)
    node = _decide_rank(cluster, number, facts, model, choice, head)
    choice = RuleChoice(wanted=wanted - variables, unwanted=unwanted - variables)
    memory = _smallest_memory(cluster, all_facts, node)
    request = _serve_request(cluster, number, facts, model, node, memory, choice)
    command = serve_args(request, load_flag_rules())

    env = make_cluster_env(
        node,
        facts.host,
        rules,
        ptxas=facts.ptxas,
        caches=f"{facts.home}/{CACHES}",
        model=model.name,
    )

    if head:
        env = adopt_shared_settings(env, head)

    # systemd reads the file for a program, the engine reads it for a container.
    form = Format.DOCKER if serve.image else Format.SYSTEMD
    text = file_text(
        env,
        form,
        hostname=facts.host.system.hostname,
        target=serve.target,
    )
    return PlannedRank(
        facts=facts,
        env=env,
        text=text,
        command=command,
    )


def _smallest_memory(
    cluster: ClusterFile, facts: Sequence[NodeFacts], node: Node
) -> MemoryPool:
    """Return the memory of the smallest node, of any device: all ranks need equal flags."""
    serve = cluster.serve
    pools = []
    for row in facts:
        target = serve.target or (row.host.target if row.host.gpus else node.target)
        as_there = replace(node, target=target)
        pools.append(memory_pool(row.host, as_there, serve.memory_floor))

    smallest = min(pools, key=lambda pool: pool.gib or math.inf)
    return replace(smallest, shared=any(pool.shared for pool in pools))


def _serve_request(
    cluster: ClusterFile,
    number: int,
    facts: NodeFacts,
    model: ServedModel,
    node: Node,
    memory: MemoryPool,
    choice: RuleChoice,
) -> ServeRequest:
    """Return the request for a rank's `vllm serve`: model, memory, addresses and ports."""
    serve = cluster.serve
    files = facts.models.get(model.folder)
    drafter = facts.models.get(drafter_folder(serve))

    return ServeRequest(
        model=absolute(model.source, facts),
        node=node,
        memory=memory,
        choice=choice,
        rank=number if node.role != "single" else None,
        host=serve.host or listen_address(serve.listen, node, facts.host),
        port=serve.port,
        folder_gib=files.weights / BYTES_PER_GIB if files and files.weights else None,
        drafter_gib=drafter.weights / BYTES_PER_GIB if drafter else None,
        architectures=files.architectures if files else (),
        checkpoint=files.checkpoint if files else None,
        given=given_flags(serve.args),
        stacks=f"{facts.home}/{STACKS}",
        frozen=serve.frozen,
        master_port=serve.ranks_port(MASTER_PORT),
    )


def _decide_rank(
    cluster: ClusterFile,
    number: int,
    facts: NodeFacts,
    model: ServedModel,
    choice: RuleChoice,
    head: EnvFile | None,
) -> Node:
    """Return the decision about a node; a worker takes over what the head's env file says.

    Raises what ``decide_node`` raises.
    """
    serve = cluster.serve
    nodes = len(cluster.members)
    given: Fields = {"role": "worker"}
    if number == 0:
        given = {"role": "single", "nodes": nodes, "executor": "mp"}
        if nodes > 1:
            address = cluster.members[0].address
            given |= {"role": "head", "head": address, "topology": serve.topology}

    options = NodeOptions(
        target=serve.target,
        model=model.preset.id if model.preset else "",
        choice=choice,
        extra=dict(serve.set),
        **given,
    )

    return decide_node(options, facts.host, head)


def absolute(path: str, facts: NodeFacts) -> str:
    """Return a path on a node, with the home of the node's user for ``~``."""
    if path.startswith("~/"):
        return f"{facts.home}/{path[2:]}"
    return path
