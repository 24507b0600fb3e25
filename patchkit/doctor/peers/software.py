"""Compare the software of nodes, and their files of models. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from patchkit.cluster.agent.node_facts import ModelPrint, PythonContents
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.ranks import other_model
from patchkit.cluster.models.model_files import folder_of
from patchkit.cluster.ssh.ssh import (
    HERE,
    make_finding,
    make_fine,
    ssh_command,
    unchecked,
)
from patchkit.doctor.peers.node_report import NodeReport, Outcome, check, require
from patchkit.finding import Finding
from patchkit.quoting import quoted

_INSTALL = "patchkit cluster install"
_DISTRIBUTIONS = ("vllm", "torch", "triton", "flashinfer_python")
_SHOWN = 12  # digits of a digest in a finding
_NO_MODEL = "no model is pinned in cluster.toml, and none was started from a folder"


def software_findings(
    file: ClusterFile,
    nodes: Sequence[NodeReport],
) -> Iterator[Finding]:
    """Yield which nodes lack vLLM, and which software differs between nodes.

    Of libnccl the file that vLLM loads is compared; of other software versions and digests.
    """
    for node in nodes:
        yield from check_python(node, file)

    if len(nodes) < 2:
        return

    contents = {}
    for node in nodes:
        has_vllm = node.facts and node.facts.host.versions["vllm"]
        if node.contents and has_vllm:
            contents[node.node] = node.contents

    names = [node.node for node in nodes]
    lacking = ", ".join(name for name in names if name not in contents)
    for about in ("nccl", *_DISTRIBUTIONS):
        if len(contents) > 1:
            yield _compare(about, contents)
        else:
            reason = f"there is nothing to compare: no vLLM is known of {lacking}"
            yield unchecked(about, ", ".join(names), reason)


def _installed(about: str, content: PythonContents) -> tuple[str, str]:
    """Return version and sha256 of a distribution or of the loaded libnccl, "" if unknown."""
    if about == "nccl":
        # The machine's check compares vLLM's libnccl with torch's.
        copies = content.nccl
        return copies.get("vllm") or copies.get("torch", ("", ""))

    return content.versions.get(about, ""), content.digests.get(about, "")


def _compare(about: str, contents: Mapping[str, PythonContents]) -> Finding:
    """Return the finding of a comparison of versions and digests between nodes.

    An unknown digest counts as equal, except for libnccl: there it makes the comparison unknown.
    """
    row = {node: _installed(about, content) for node, content in contents.items()}
    where = ", ".join(row)
    versions = {version for version, _digest in row.values()}
    digests = {sha256 for _version, sha256 in row.values()}

    is_unknown = about == "nccl" and "" in digests

    if is_unknown:
        return unchecked(about, where, "no libnccl is known to be loaded everywhere")

    if versions == {""}:
        return unchecked(about, where, "it is installed on no node")

    is_same = len(versions) == 1 and len(digests - {""}) < 2
    if is_same:
        return make_fine(about, where, version=versions.pop())

    shown = []
    for node, (version, sha256) in row.items():
        digest = sha256[:_SHOWN] or "unknown"
        shown.append(f"{version or 'none'}, sha256 {digest} on {node}")

    return make_finding(about, where, what="; ".join(shown))


@check("python")
def check_python(node: NodeReport, file: ClusterFile) -> Outcome:
    venv = node.part("facts").venv
    if version := node.host.versions["vllm"]:
        return {"version": version}

    fault = f"there is no vLLM in {venv}" if venv else f"{file.venv} is not there"
    command = _INSTALL

    if [entry.ssh for entry in file.members] == [HERE]:
        command = "name the environment that has it: --venv DIR"

    return node.find("python", what=fault, command=command)


# Models


def model_findings(
    file: ClusterFile,
    nodes: Sequence[NodeReport],
) -> Iterator[Finding]:
    """Yield for each model whether every node has it whole, and whether all have the same files.

    If no node has a model, there is one finding for each node that says so.
    """
    count = max(len(node.models or ()) for node in nodes)
    for node in () if count else nodes:
        reason = node.why_not("models") if node.models is None else _NO_MODEL
        yield unchecked("model", node.node, reason)

    names = ", ".join(node.node for node in nodes)
    for number in range(count):
        prints = {node.node: node.models[number] for node in nodes if node.models}
        whole = {name: model for name, model in prints.items() if not model.problem}

        for node in nodes:
            yield from check_model(node, file, prints.get(node.node), whole)

        if len(nodes) > 1:
            yield _check_same_model(file, names, whole)


@check("model")
def check_model(
    node: NodeReport,
    file: ClusterFile,
    model: ModelPrint | None,
    whole: Mapping[str, ModelPrint],
) -> Outcome:
    model = require(model, node.why_not("models"))
    if model.problem:
        command = _copy_command(file, node.node, model, whole)
        return node.find("model", model=model, command=command)

    return {"model": model, "size": model.size / 1e9}


def _copy_command(
    file: ClusterFile,
    node: str,
    model: ModelPrint,
    whole: Mapping[str, ModelPrint],
) -> str:
    """Return the command, or the advice in words, that completes a model on a node.

    ``whole`` is node → model of the nodes that have all of it.
    """
    if pinned := folder_of(model.folder.rpartition("/")[2]):
        return quoted(
            "patchkit",
            "model",
            "sync" if whole else "get",
            pinned.repo,
        )

    if not whole:
        return "copy it there from where you have it, to the same path on every node"

    source = next(iter(whole))
    source_folder = whole[source].folder
    head = file.members[0].ssh
    # Only the head is known to reach the other nodes by ssh.
    if head not in (source, node):
        return f"copy {source_folder} from {source} to {model.folder} on {node}"

    destinations = {entry.ssh: f"{entry.from_head}:" for entry in file.members}
    destinations[head] = ""
    return ssh_command(
        head,
        "rsync",
        "--archive",
        "--checksum",
        f"{destinations[source]}{source_folder}/",
        f"{destinations[node]}{model.folder}/",
    )


def _check_same_model(
    file: ClusterFile,
    where: str,
    whole: Mapping[str, ModelPrint],
) -> Finding:
    if len(whole) < 2:
        return unchecked(
            "model-same",
            where,
            "fewer than two nodes have it whole",
        )

    if difference := other_model(whole):
        node, what = difference
        sources = dict(whole)
        del sources[node]
        return make_finding(
            "model-same",
            where,
            folder=whole[node].folder,
            what=f"{node} {what}",
            command=_copy_command(file, node, whole[node], sources),
        )

    model = next(iter(whole.values()))
    if model.commit:
        return make_fine("model-same", where)

    reason = "sizes are the same, and no digest of the weights was written down at a download"
    hint = quoted("patchkit", "model", "check", model.folder)
    return unchecked("model-same", where, reason, hint)
