"""Check what nodes need to serve one model together, and plan each node's part. Pure.

The same decisions as `patchkit env` and `patchkit serve-args` make on each node by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath

from patchkit.cluster.agent.image_facts import ImageFacts
from patchkit.cluster.agent.node_facts import ModelPrint, NodeFacts
from patchkit.cluster.launch.cluster_file import ClusterFile, ClusterNode
from patchkit.cluster.models.names import SHORT, ModelFolder
from patchkit.cluster.net.addressing import find_cages
from patchkit.cluster.net.checks import pair_checks
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.errors import HostError, PatchkitError, StorageError, UsageError
from patchkit.finding import Finding, Level, finding_from_text
from patchkit.runtime.envfile.env_file import EnvFile, env_file
from patchkit.runtime.envfile.syntax import Format
from patchkit.runtime.node.cluster_env import (
    ClusterEnv,
    adopt_shared_settings,
    file_text,
    make_cluster_env,
)
from patchkit.runtime.node.decision import Node, NodeOptions, decide_node
from patchkit.runtime.node.topology import choose_attachment
from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import (
    Preset,
    find_preset,
    named_preset,
    suggest_presets,
)
from patchkit.runtime.rules.rule import RuleChoice
from patchkit.runtime.rules.variable_rules import CACHES, STACKS, load_variable_rules
from patchkit.runtime.serve.args import ServeCommand, serve_args
from patchkit.runtime.serve.listen import listen_address
from patchkit.runtime.serve.model import memory_pool
from patchkit.runtime.serve.request import MASTER_PORT, ServeRequest
from patchkit.units import BYTES_PER_GIB

_SPARK = ("GB10", "DGX_Spark")  # in the product's name, NVIDIA's or another maker's
_CORES = "Cortex-X925"  # of GB10's CPU
_START = ("sudo", "systemctl", "start", "docker")
_NO_DAEMON = "Cannot connect to the Docker"  # docker's own words
_DISK_FULL = "no space left"  # the kernel's, as engines pass them on
IMAGE_DISK_FULL = "image-disk-full"
_LIMIT = "/etc/systemd/system/user@.service.d/patchkit.conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as it is asked for, ``name``, and as vLLM gets it, ``source``: that or a folder."""

    name: str
    source: str
    preset: Preset | None

    @property
    def folder(self) -> str:
        """Return the folder on every node, "" for a model that vLLM itself downloads."""
        return self.source if self.source.startswith(("/", "~/")) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """A node's part: its facts, what it is, its environment, and its command."""

    facts: NodeFacts
    env: ClusterEnv
    text: str
    command: ServeCommand | None

    @property
    def address(self) -> str:
        return self.env.node.attachment.address


def served_model(cluster: ClusterFile, model: str) -> ServedModel:
    """Return what a model's name stands for. Raises UsageError for a slip of a preset's name."""
    chosen = cluster.serve.preset
    preset = named_preset(chosen) if chosen not in ("", "none") else None
    if not chosen:
        preset = find_preset(model)
    name = preset.id if preset and model.lower() == preset.name.lower() else model
    if commit := cluster.models.get(name):
        folder = PurePosixPath(
            cluster.model_folder, ModelFolder(repo=name, commit=commit).name
        )
        return ServedModel(name=name, source=str(folder), preset=preset)
    if not preset and "/" not in model and (meant := suggest_presets(model)):
        raise UsageError(
            f"no model is known as {model}", hint=f"did you mean {' or '.join(meant)}?"
        )
    return ServedModel(name=name, source=name, preset=preset)


def other_model(
    prints: Mapping[str, ModelPrint], pin: str = ""
) -> tuple[str, str] | None:
    """Return the first node that holds another model than it should, and what is other there.

    What it should hold is what the first node with a record holds, without records the first node;
    ``pin`` is the commit of cluster.toml, "" for none.
    """
    recorded = [node for node, model in prints.items() if model.commit]
    first = next(iter(recorded or prints))
    for node, model in prints.items():
        if model.commit and pin and model.commit != pin:
            return (
                node,
                f"is commit {model.commit[:SHORT]}, and cluster.toml pins {pin[:SHORT]}",
            )
        if what := _model_difference(model, prints[first], first):
            return node, what
    return None


def _model_difference(model: ModelPrint, right: ModelPrint, where: str) -> str:
    """Return how a model differs from the one that another node has, "" if it does not."""
    if right.commit and not model.commit:
        return f"has no record of its files, and {where} has one: probably an incomplete copy"
    if model.commit != right.commit:
        return (
            f"is commit {model.commit[:SHORT]}, and {right.commit[:SHORT]} on {where}"
        )
    if (model.files, model.size) != (right.files, right.size):
        here = f"{model.files} files, {model.size:,} bytes"
        return f"has other files than {where}: {here}, not {right.files}, {right.size:,} bytes"
    if model.digest != right.digest:
        other = "other file names or other contents of small files"
        return f"has the same size as on {where}, but {other}"
    return ""


def planned_ranks(
    cluster: ClusterFile, facts: Sequence[NodeFacts], model: ServedModel
) -> list[PlannedRank]:
    """Return each node's part, the head's first.

    Raises HostError for a node without vLLM or with another one than its head, and what the
    functions of ``runtime/node`` and ``serve_args`` raise, with the node's name before it.
    """
    ranks: list[PlannedRank] = []
    head: EnvFile | None = None
    for number, (node, its) in enumerate(zip(cluster.node, facts, strict=True)):
        with name_node(node.ssh):
            software, image = its.host.software, cluster.serve.image
            if software is None or not (software.vllm and (its.venv or image)):
                place, is_there = image or cluster.venv, image or its.venv
                raise HostError(
                    f"there is no vLLM in {place}"
                    if is_there
                    else f"{place} is not there",
                    why="if vLLM is in another environment or image, set `venv` or `image` in "
                    "cluster.toml",
                    hint="patchkit cluster install",
                )
            planned = _plan_rank(cluster, number, its, model, head)
            _check_address(node, planned)
        if number == 0:
            head = env_file(planned.text, f"{node.ssh}'s env file")
        ranks.append(planned)
    return ranks


def _check_address(node: ClusterNode, planned: PlannedRank) -> None:
    """Raise HostError for an ``address`` of the file that is not the node's."""
    host = planned.facts.host
    # A node that serves alone is reached by nobody: any address of its own will do.
    is_own = host.has_address(node.address) if not planned.address else False
    if node.address in ("", planned.address) or is_own:
        return

    where = f"it is reached at {planned.address}"
    if not planned.address:
        where = f"it has {' and '.join(host.addresses) or 'none'}"
    raise HostError(
        f"{node.address} is not its address: {where}",
        hint="correct `address` in its [[node]] of cluster.toml, or leave it out",
    )


@contextmanager
def name_node(node: str) -> Iterator[None]:
    """Put a node's name before the text of what is raised, and before a command for it.

    Keys of cluster.toml stand for the flags of a node's verbs.
    """
    try:
        yield
    except PatchkitError as error:
        hint = re.sub(r": --role \w+ --nodes \d+", "", error.hint)
        hint = re.sub(
            r"--head-ip (\S+)", r"""address = "\1" in the head's [[node]]""", hint
        )
        hint = re.sub(
            r"--(topology|executor|target|preset) (\w+)", r'\1 = "\2" in [serve]', hint
        )
        hint = f"on {node}: {hint}" if "`patchkit " in hint else hint
        raise type(error)(f"{node}: {error.what}", why=error.why, hint=hint) from None


def node_addresses(
    cluster: ClusterFile, facts: Sequence[NodeFacts], choices: Mapping[str, str]
) -> list[str]:
    """Return each node's IPv4 address in the cluster, the head's first, vLLM there or not.

    ``choices`` are keys of ``[serve]``. Raises HostError for a node that has none.
    """
    nodes, topology = len(cluster.node), choices.get("topology") or "auto"
    found: list[str] = []
    for number, its in enumerate(facts if nodes > 1 else ()):
        target = choices.get("target") or its.host.target
        head = found[0] if number else cluster.head.address
        role = "worker" if number else "head"
        with name_node(cluster.node[number].ssh):
            attached = choose_attachment(
                its.host,
                role=role,
                topology=topology,
                nodes=nodes,
                head=head,
                target=target,
            )
        found.append(attached.address)
    return found or [""]


def _plan_rank(
    cluster: ClusterFile,
    number: int,
    facts: NodeFacts,
    model: ServedModel,
    head: EnvFile | None,
) -> PlannedRank:
    # Without the folder of the installed vLLM, which is another machine's.
    software = facts.host.software and replace(facts.host.software, vllm_home="")
    facts = replace(facts, host=replace(facts.host, software=software))
    serve, host, rules = cluster.serve, facts.host, load_variable_rules()
    wanted, unwanted = frozenset(serve.wanted), frozenset(serve.unwanted)
    variables = {rule.id for rule in rules.rules}
    of_variables = RuleChoice(wanted=wanted & variables, unwanted=unwanted & variables)
    of_flags = RuleChoice(wanted=wanted - variables, unwanted=unwanted - variables)
    node = _decide_rank(cluster, number, facts, model, of_variables, head)
    caches = f"{facts.home}/{CACHES}"
    env = make_cluster_env(
        node, host, rules, ptxas=facts.ptxas, caches=caches, model=model.name
    )
    if head:
        env = adopt_shared_settings(env, head, dict(serve.set))
    command = None
    if node.role != "worker" or node.executor.name != "ray":
        request = _serve_request(cluster, number, facts, model, node)
        command = serve_args(replace(request, choice=of_flags), load_flag_rules())
    # systemd reads what it hands to a program, an engine what it hands to a container.
    kind = Format.DOCKER if serve.image else Format.SYSTEMD
    text = file_text(env, kind, hostname=host.system.hostname, target=serve.target)
    return PlannedRank(facts=facts, env=env, text=text, command=command)


def _serve_request(
    cluster: ClusterFile, number: int, facts: NodeFacts, model: ServedModel, node: Node
) -> ServeRequest:
    """Return what the rank of a node serves, and with which memory."""
    serve = cluster.serve
    held = facts.models.get(model.folder)
    return ServeRequest(
        model=absolute(model.source, facts),
        node=node,
        memory=memory_pool(facts.host, node),
        rank=number if node.role != "single" else None,
        host=serve.host or listen_address(serve.listen, node, facts.host),
        port=serve.port,
        folder_gib=held.weights / BYTES_PER_GIB if held and held.weights else None,
        architectures=held.architectures if held else (),
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
    """Return what a node is; a worker takes over what its head's file says."""
    serve, several = cluster.serve, len(cluster.node) > 1
    options = NodeOptions(
        role="single" if not several else "worker" if number else "head",
        target=serve.target,
        model=model.preset.id if model.preset else "",
        choice=choice,
        extra=dict(serve.set),
    )
    if number == 0:
        options = replace(options, nodes=len(cluster.node), executor=serve.executor)
    if number == 0 and several:
        options = replace(options, head=cluster.head.address, topology=serve.topology)
    node = decide_node(options, facts.host, head)
    if (
        node.executor.name == "ray"
        and facts.image
        and facts.image.program.endswith("podman")
    ):
        raise UsageError(
            "no server by Ray runs in podman's containers",
            why="vLLM looks for Ray among its own processes, and podman lets no container that "
            "stays in its unit's control group see those of another one",
            hint='engine = "docker", or executor = "mp" where vLLM has it, in [serve]',
        )
    return node


def absolute(path: str, facts: NodeFacts) -> str:
    """Return a path of a node with its user's home in it."""
    return f"{facts.home}/{path[2:]}" if path.startswith("~/") else path


def survey_nodes(names: Sequence[str], facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Yield what is wrong, node by node, then between the head and each worker."""
    between = list(pair_findings(names, facts))
    # What is in an image that is not the pinned one is nobody's trouble.
    strays = {found.where for found in between if found.about == "image-other"}
    for name, node in zip(names, facts, strict=True):
        for finding in node_findings(name, node):
            if not (name in strays and finding.about == "image-silent"):
                yield finding
    yield from between


def pair_findings(
    names: Sequence[str], facts: Sequence[NodeFacts]
) -> Iterator[Finding]:
    """Yield what is wrong between the head, the first of these nodes, and each worker."""
    first, *others = names
    head, *workers = facts
    cages = find_cages(head.host, cabled=True)
    for name, worker in zip(others, workers, strict=True):
        where = f"{first}, {name}"
        for found in pair_checks(head.host, cages, worker.host) if cages else ():
            if found.level is not Level.OK:
                yield replace(found, where=where, what=f"{found.where}: {found.what}")
        yield from _software_findings(first, name, head, worker)


def _software_findings(
    first: str, second: str, head: NodeFacts, worker: NodeFacts
) -> Iterator[Finding]:
    """Yield which installations, images and devices of a head and a worker differ."""
    where = f"{first}, {second}"
    wrong = partial(
        finding_from_text, "survey.toml", where=where, first=first, second=second
    )
    if head.host.system.machine == worker.host.system.machine:
        if head.venv and worker.venv and head.installation != worker.installation:
            one, other = (
                node.installation or "one of its own" for node in (head, worker)
            )
            yield wrong("installation", venv=head.venv, one=one, other=other)
        contents = {node.image.content for node in (head, worker) if node.image}
        if len(contents - {""}) > 1:
            yield _image_difference(first, second, head.image, worker.image)
    if head.host.target != worker.host.target:
        yield wrong("devices", one=head.host.target, other=worker.host.target)


def _image_difference(
    first: str, second: str, one: ImageFacts | None, other: ImageFacts | None
) -> Finding:
    """Return that two nodes have different images; the pin says which is wrong, if it is known."""
    ids = [image.id if image else "none" for image in (one, other)]
    tagged = [
        name
        for name, image in ((first, one), (second, other))
        if image and image.by_tag
    ]
    if len(tagged) == 1:
        number = (first, second).index(tagged[0])
        return finding_from_text(
            "survey.toml", "image-other", tagged[0], image=ids[number]
        )
    where = f"{first}, {second}"
    return finding_from_text(
        "survey.toml",
        "images",
        where,
        first=first,
        second=second,
        one=ids[0],
        other=ids[1],
    )


def image_finding(name: str, image: ImageFacts) -> Finding:
    """Return the problem that a node has with its engine or image."""
    join = (
        "sudo",
        "usermod",
        "-aG",
        "docker",
        image.login,
    )  # what takes effect at a boot
    room = (image.program, "system", "df")
    look = (
        (image.program, "version")
        if image.program
        else ("sudo", "apt", "install", "podman")
    )
    # What the engine says → the finding, and the words of its cure.
    causes = {
        "permission denied": (image.problem, join),
        _NO_DAEMON: ("engine-stopped", _START),
        _DISK_FULL: (IMAGE_DISK_FULL, room),
    }
    said = image.said.lower()
    cause = next((cause for cause in causes if cause.lower() in said), "")
    about, words = causes.get(cause, (image.problem, look))
    command = ssh_command(name, *words)
    found = finding_from_text(
        "survey.toml", about, name, said=image.said, command=command
    )
    return replace(found, kind=StorageError) if about == IMAGE_DISK_FULL else found


def node_findings(name: str, facts: NodeFacts) -> Iterator[Finding]:
    """Yield what a node lacks."""
    wrong = partial(finding_from_text, "survey.toml", where=name)
    system = facts.host.system
    # The firmware or the CPU names a GB10, whatever is found of its GPU.
    is_spark = _CORES in system.cpu or any(part in system.product for part in _SPARK)
    if not facts.host.gpus and is_spark:
        note = next(
            (note for note in facts.host.notes if "GPU" in note), "no GPU is found"
        )
        yield wrong("gpu", note=note, command=ssh_command(name, "nvidia-smi"))
    if facts.systemd == 0 or "systemctl" not in facts.has:
        yield wrong("systemd")
    if not facts.linger:
        yield wrong(
            "linger",
            user=facts.user,
            command=ssh_command(name, "loginctl", "enable-linger"),
        )
    image = facts.image
    if image and image.problem:
        yield image_finding(name, image)
    of_root = image is not None and image.program.endswith(
        "docker"
    )  # whose daemon has no limit
    if (
        facts.memlock is not None
        and not of_root
        and any(port.active for port in facts.host.rdma)
    ):
        folder = _LIMIT.rpartition("/")[0]
        words = f"mkdir -p {folder} && printf '[Service]\\nLimitMEMLOCK=infinity\\n' > {_LIMIT}"
        command = ssh_command(
            name, "sudo", "sh", "-c", words
        )  # which takes effect at a boot
        yield wrong("memlock", mib=facts.memlock >> 20, command=command)
    if not facts.persistent_journal:
        yield wrong(
            "journal",
            command=ssh_command(name, "sudo", "mkdir", "-p", "/var/log/journal"),
        )
    if "rsync" not in facts.has:
        yield wrong(
            "rsync", command=ssh_command(name, "sudo", "apt", "install", "rsync")
        )
