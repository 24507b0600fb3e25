"""Compare what nodes have installed, and which files of a model: a row of values for each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from patchkit.cluster.agent.node_facts import ModelPrint
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.plan import other_model
from patchkit.cluster.models.names import folder_of
from patchkit.cluster.ssh.ssh import HERE, ssh_command
from patchkit.doctor.peers.node_report import (
    NodeReport,
    Outcome,
    check,
    make_finding,
    make_fine,
    unchecked,
)
from patchkit.finding import Finding
from patchkit.quoting import quoted

_INSTALL = "patchkit cluster install"
_RANKS = ("vllm", "torch", "triton")
_SHOWN = 12  # digits of a digest in a finding


def software_findings(
    file: ClusterFile, nodes: Sequence[NodeReport]
) -> Iterator[Finding]:
    """Yield who lacks vLLM, and what differs: of the loaded libnccl the bytes, too."""
    for node in nodes:
        yield from check_python(node, file)
    if len(nodes) < 2:
        return
    have = {
        node.node: node.contents
        for node in nodes
        if node.contents and node.facts and node.facts.host.versions["vllm"]
    }
    if len(have) < 2:
        where = ", ".join(node.node for node in nodes)
        lacking = ", ".join(node.node for node in nodes if node.node not in have)
        reason = f"there is nothing to compare: no vLLM is known of {lacking}"
        yield from (unchecked(about, where, reason) for about in ("nccl", *_RANKS))
        return
    # Where vLLM's libnccl and torch's differ, the host's checks tell.
    loaded = [
        its.nccl.get("vllm") or its.nccl.get("torch", ("", "")) for its in have.values()
    ]
    rows = {"nccl": loaded} | {
        name: [
            (its.versions.get(name, ""), its.digests.get(name, ""))
            for its in have.values()
        ]
        for name in _RANKS
    }
    where = ", ".join(have)
    for about, row in rows.items():
        versions, digests = ({*column} for column in zip(*row, strict=True))
        if about == "nccl" and (not any(versions) or "" in digests):
            yield unchecked(about, where, "no libnccl is known to be loaded everywhere")
        elif not any(versions):
            yield unchecked(about, where, "it is installed on no node")
        # Digests that are not known do not differ.
        elif len(versions) == 1 and len(digests - {""}) < 2:
            yield make_fine(about, where, version=row[0][0])
        else:
            what = "; ".join(
                f"{version or 'none'}, sha256 {sha256[:_SHOWN] or 'unknown'} on {node}"
                for node, (version, sha256) in zip(have, row, strict=True)
            )
            yield make_finding(about, where, what=what)


@check("python")
def check_python(node: NodeReport, file: ClusterFile) -> Outcome:
    venv = node.part("facts").venv
    if version := node.host.versions["vllm"]:
        return {"version": version, "venv": venv}
    what = f"there is no vLLM in {venv}" if venv else f"{file.venv} is not there"
    alone = [each.ssh for each in file.node] == [HERE]
    command = "name the environment that has it: --venv DIR" if alone else _INSTALL
    return node.find("python", what=what, command=command)


# Models


def model_findings(file: ClusterFile, nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield of each model whether it is whole on every node, and the same."""
    count = max((len(node.models or ()) for node in nodes), default=0)
    if not count:
        reason = (
            "no model is pinned in cluster.toml, and none was started from a folder"
        )
        for node in nodes:
            reason = node.why_not("models") if node.models is None else reason
            yield unchecked("model", node.node, reason)
    for number in range(count):
        prints = {node.node: node.models[number] for node in nodes if node.models}
        whole = {name: own for name, own in prints.items() if not own.problem}
        for node in nodes:
            if (own := prints.get(node.node)) is None:
                yield unchecked("model", node.node, node.why_not("models"))
                continue
            fields: dict[str, object] = {"folder": own.folder, "problem": own.problem}
            if own.problem:
                command = _copy_command(file, node.node, own, whole)
                yield node.find("model", command=command, **fields)
            else:
                amount = {"files": own.files, "size": own.size / 1e9}
                yield make_fine("model", node.node, **amount, **fields)
        if len(nodes) > 1:
            yield _check_same_model(file, ", ".join(node.node for node in nodes), whole)


def _copy_command(
    file: ClusterFile, node: str, own: ModelPrint, whole: Mapping[str, ModelPrint]
) -> str:
    """Return the command that brings a model to a node that lacks some of it."""
    if pinned := folder_of(own.folder.rpartition("/")[2]):
        return quoted("patchkit", "model", "sync" if whole else "get", pinned.repo)
    if not whole:
        return "copy it there from where you have it, to the same path on every node"
    source, its = next(iter(whole.items()))
    peers = {each.ssh: each.from_head for each in file.node}
    head = file.head.ssh
    if head not in (source, node):  # which has ssh to all others
        return f"copy {its.folder} from {source} to {own.folder} on {node}"
    one, other = (
        f"{folder}/" if name == head else f"{peers[name]}:{folder}/"
        for name, folder in ((source, its.folder), (node, own.folder))
    )
    return ssh_command(head, "rsync", "--archive", "--checksum", one, other)


def _check_same_model(
    file: ClusterFile, where: str, whole: Mapping[str, ModelPrint]
) -> Finding:
    if len(whole) < 2:
        return unchecked("model-same", where, "fewer than two nodes have it whole")
    if other := other_model(whole):
        node, what = other
        others = {name: model for name, model in whole.items() if name != node}
        command = _copy_command(file, node, whole[node], others)
        fields = {
            "folder": whole[node].folder,
            "what": f"{node} {what}",
            "command": command,
        }
        return make_finding("model-same", where, **fields)
    right = next(iter(whole.values()))
    if not right.commit:
        reason = "sizes are the same, and no digest of the weights was written down at a download"
        hint = quoted("patchkit", "model", "check", right.folder)
        return unchecked("model-same", where, reason, hint)
    return make_fine("model-same", where)
