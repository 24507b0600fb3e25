"""Compare what nodes have installed, and which files of a model: a row of values for each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from patchkit.cluster.agent.examination import FilePrint, ModelPrint, PythonContents
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.models.names import folder_of
from patchkit.cluster.ssh.ssh import HERE, there
from patchkit.doctor.peers.check import Outcome, check, make_finding, make_fine, unchecked
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.finding import Finding
from patchkit.quoting import quoted

_INSTALL = "patchkit cluster install"
_RANKS = ("vllm", "torch", "triton", "ray")
_OTHER_NAMES = {"triton": "pytorch_triton"}
_SHOWN, _MANY = 12, 6  # digits of a digest, names in a finding


def software_findings(file: ClusterFile, nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield who lacks vLLM, and what differs: of the loaded libnccl the bytes, too."""
    for node in nodes:
        yield from check_python(node, file)
    if len(nodes) < 2:
        return
    where = ", ".join(node.node for node in nodes)
    have = {node.node: node.contents for node in nodes if node.contents and _vllm_version(node)}
    if len(have) < 2:
        lacking = ", ".join(node.node for node in nodes if node.node not in have)
        reason = f"there is nothing to compare: no vLLM is known of {lacking}"
        yield from (unchecked(about, where, reason) for about in ("nccl", *_RANKS))
        return
    where = ", ".join(have)
    yield _compare_nccl(where, have)
    env = nodes[0].env
    for project in _RANKS:
        if project == "ray" and env and env.facts.get("executor") != "ray":
            yield unchecked("ray", where, "the ranks are not started by Ray")
        else:
            yield _compare_project(project, where, have)


@check("python")
def check_python(node: NodeReport, file: ClusterFile) -> Outcome:
    venv = node.known_facts.venv
    if version := _vllm_version(node):
        return {"version": version, "venv": venv}
    what = f"there is no vLLM in {venv}" if venv else f"{file.venv} is not there"
    alone = [each.ssh for each in file.node] == [HERE]
    command = "name the environment that has it: --venv DIR" if alone else _INSTALL
    return make_finding("python", node.node, what=what, command=command)


def _vllm_version(node: NodeReport) -> str:
    software = node.facts.host.software if node.facts else None
    return software.vllm if software else ""


def _compare_nccl(where: str, have: Mapping[str, PythonContents]) -> Finding:
    """Compare the loaded library; where vLLM's and torch's differ, the host's checks tell."""
    loaded = {name: its.nccl if its.nccl.path else its.torch_nccl for name, its in have.items()}
    if lacking := [name for name, nccl in loaded.items() if not nccl.sha256]:
        reason = f"no libnccl is known to be loaded on {', '.join(lacking)}"
        return unchecked("nccl", where, reason)
    if len({(nccl.version, nccl.sha256) for nccl in loaded.values()}) == 1:
        return make_fine("nccl", where, version=next(iter(loaded.values())).version)
    rows = (
        f"{name}: {nccl.version or 'of unknown version'}, sha256 {nccl.sha256[:_SHOWN]}, "
        f"{nccl.path}"
        for name, nccl in loaded.items()
    )
    return make_finding("nccl", where, what="; ".join(rows), command=_INSTALL)


def _compare_project(project: str, where: str, have: Mapping[str, PythonContents]) -> Finding:
    names = (project, _OTHER_NAMES.get(project, project))
    versions, digests = (
        {
            node: next((values[name] for name in names if values.get(name)), "")
            for node, values in column.items()
        }
        for column in (
            {node: its.versions for node, its in have.items()},
            {node: its.digests for node, its in have.items()},
        )
    )
    if not any(versions.values()):
        return unchecked(project, where, "it is installed on no node")
    version, *others = {*versions.values()}
    if others:
        what = ", ".join(f"{its or 'none'} on {node}" for node, its in versions.items())
    elif len({*filter(None, digests.values())}) > 1:
        rows = (f"{its[:_SHOWN] or 'no RECORD'} on {node}" for node, its in digests.items())
        what = f"{version} everywhere, of other files: RECORD's digest is {', '.join(rows)}"
    else:
        return make_fine(project, where, version=version)
    return make_finding(project, where, what=what, command=_INSTALL)


# Models


def model_findings(file: ClusterFile, nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield of each model whether it is whole on every node, and the same."""
    count = max((len(node.models or ()) for node in nodes), default=0)
    if not count:
        reason = "no model is pinned in cluster.toml, and none was started from a folder"
        for node in nodes:
            reason = node.why_not("models") if node.models is None else reason
            yield unchecked("model", node.node, reason)
    for number in range(count):
        prints = {node.node: node.models[number] for node in nodes if node.models}
        whole = {name: own for name, own in prints.items() if not own.problem}
        for node in nodes:
            yield _check_model(file, node, prints.get(node.node), whole)
        if len(nodes) > 1:
            yield _check_same_model(file, ", ".join(node.node for node in nodes), whole)


def _check_model(
    file: ClusterFile, node: NodeReport, own: ModelPrint | None, whole: Mapping[str, ModelPrint]
) -> Finding:
    if own is None:
        return unchecked("model", node.node, node.why_not("models"))
    if not own.problem:
        size = sum(each.size for each in own.files.values()) / 1e9
        return make_fine("model", node.node, folder=own.folder, files=len(own.files), size=size)
    command = _copy_command(file, node.node, own, whole)
    fields = {"folder": own.folder, "problem": own.problem, "command": command}
    return make_finding("model", node.node, **fields)


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
    rsync = ("rsync", "--archive", "--checksum")
    if source == head:  # from the head, which has ssh to all others
        return there(head, *rsync, f"{its.folder}/", f"{peers[node]}:{own.folder}/")
    if node == head:
        return there(head, *rsync, f"{peers[source]}:{its.folder}/", f"{own.folder}/")
    return f"copy {its.folder} from {source} to {own.folder} on {node}"


def _check_same_model(file: ClusterFile, where: str, whole: Mapping[str, ModelPrint]) -> Finding:
    if len(whole) < 2:
        return unchecked("model-same", where, "fewer than two nodes have it whole")
    (first, right), *others = whole.items()
    for node, its in others:
        if odd := _differing_files(right, its):
            what = f"{', '.join(odd[:_MANY])} on {node} is not as on {first}"
            command = _copy_command(file, node, its, {first: right})
            fields = {"folder": its.folder, "what": what, "command": command}
            return make_finding("model-same", where, **fields)
    bare = [name for name, each in right.files.items() if not each.digest]
    if bare:
        reason = f"sizes are the same, and no digest of {bare[0]} was written down at the download"
        hint = quoted("patchkit", "model", "check", right.folder)
        return unchecked("model-same", where, reason, hint)
    return make_fine("model-same", where)


def _differing_files(one: ModelPrint, other: ModelPrint) -> list[str]:
    found = []
    if one.commit and other.commit and one.commit != other.commit:
        found.append(f"commit {other.commit[:_SHOWN]}, not {one.commit[:_SHOWN]}:")
    for name in sorted({*one.files, *other.files}):
        own, its = (each.files.get(name, FilePrint(size=-1)) for each in (one, other))
        digests = {*filter(None, (own.digest, its.digest))}
        if own.size != its.size or len(digests) > 1:
            found.append(name)
    return found
