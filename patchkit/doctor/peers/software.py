"""Compare what nodes have installed, and which files of a model: a row of values for each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from patchkit.cluster.agent.examination import FilePrint, LoadedNccl, ModelPrint, PythonContents
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.models.names import folder_of
from patchkit.cluster.ssh.ssh import HERE, there
from patchkit.doctor.peers.check import fine, unknown, wrong
from patchkit.doctor.peers.report import NodeReport
from patchkit.finding import Finding
from patchkit.quoting import quoted

_INSTALL = "patchkit cluster install"
_RANKS = ("vllm", "torch", "triton", "ray")
_OTHER_NAMES = {"triton": ("triton", "pytorch_triton")}
_SHOWN, _MANY = 12, 6  # digits of a digest, names in a finding


def software_findings(file: ClusterFile, nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield who lacks vLLM, and what differs: of the loaded libnccl the bytes, too."""
    for node in nodes:
        yield _check_python(file, node)
    if len(nodes) < 2:
        return
    have = [(each.node, each.contents) for each in nodes if each.contents and _vllm_version(each)]
    if len(have) < 2:
        lacking = [each.node for each in nodes if not (each.contents and _vllm_version(each))]
        for about in ("nccl", *_RANKS, "packages"):
            reason = f"there is nothing to compare: no vLLM is known of {', '.join(lacking)}"
            yield unknown(about, _join_nodes(nodes), reason)
        return
    yield _check_nccl(have)
    env = nodes[0].placed.env if nodes[0].placed else None
    for project in _RANKS:
        if project == "ray" and env and env.facts.get("executor") != "ray":
            yield unknown("ray", _join_nodes(nodes), "the ranks are not started by Ray")
        else:
            yield _check_project(project, have)
    yield _check_packages(have)


def _check_python(file: ClusterFile, node: NodeReport) -> Finding:
    if node.facts is None:
        return unknown("python", node.node, node.why_not("facts"))
    version = _vllm_version(node)
    if version:
        return fine("python", node.node, version=version, venv=node.facts.venv)
    venv = node.facts.venv
    what = f"there is no vLLM in {venv}" if venv else f"{file.venv} is not there"
    alone = [each.ssh for each in file.node] == [HERE]
    command = "name the environment that has it: --venv DIR" if alone else _INSTALL
    return wrong("python", node.node, what=what, command=command)


def _vllm_version(node: NodeReport) -> str:
    software = node.facts.host.software if node.facts else None
    return software.vllm if software else ""


def _join_nodes(nodes: Sequence[NodeReport]) -> str:
    return ", ".join(each.node for each in nodes)


def _check_nccl(have: Sequence[tuple[str, PythonContents]]) -> Finding:
    """Compare the loaded library; where vLLM's and torch's differ, the host's checks tell."""
    where = ", ".join(name for name, _ in have)
    found = {name: each.nccl if each.nccl.path else each.torch_nccl for name, each in have}
    if lacking := [name for name, each in found.items() if not each.sha256]:
        return unknown("nccl", where, f"no libnccl is known to be loaded on {', '.join(lacking)}")
    if len({(each.version, each.sha256) for each in found.values()}) == 1:
        return fine("nccl", where, version=next(iter(found.values())).version)
    return wrong(
        "nccl",
        where,
        what="; ".join(f"{name}: {_describe_nccl(each)}" for name, each in found.items()),
        command=_INSTALL,
    )


def _describe_nccl(nccl: LoadedNccl) -> str:
    return f"{nccl.version or 'of unknown version'}, sha256 {nccl.sha256[:_SHOWN]}, {nccl.path}"


def _check_project(project: str, have: Sequence[tuple[str, PythonContents]]) -> Finding:
    where = ", ".join(name for name, _ in have)
    names = _OTHER_NAMES.get(project, (project,))
    versions = {node: _first_value(each.versions, names) for node, each in have}
    digests = {node: _first_value(each.digests, names) for node, each in have}
    if not any(versions.values()):
        return unknown(project, where, "it is installed on no node")
    if len({*versions.values()}) > 1:
        said = [f"{version or 'none'} on {node}" for node, version in versions.items()]
        return wrong(project, where, what=", ".join(said), command=_INSTALL)
    version = next(iter(versions.values()))
    if len({*filter(None, digests.values())}) > 1:
        said = [f"{digest[:_SHOWN] or 'no RECORD'} on {node}" for node, digest in digests.items()]
        what = f"{version} everywhere, of other files: RECORD's digest is {', '.join(said)}"
        return wrong(project, where, what=what, command=_INSTALL)
    return fine(project, where, version=version)


def _first_value(values: Mapping[str, str], names: Sequence[str]) -> str:
    return next((values[name] for name in names if values.get(name)), "")


def _check_packages(have: Sequence[tuple[str, PythonContents]]) -> Finding:
    where = ", ".join(name for name, _ in have)
    told = {*_RANKS, *(name for names in _OTHER_NAMES.values() for name in names)}
    every = sorted({name for _, each in have for name in each.versions} - told)
    rows = {name: [each.versions.get(name) or "none" for _, each in have] for name in every}
    odd = {name: values for name, values in rows.items() if len({*values}) > 1}
    if not every:
        return unknown("packages", where, "no other package is installed")
    if not odd:
        return fine("packages", where, count=len(every))
    said = [f"{name} ({' | '.join(values)})" for name, values in list(odd.items())[:_MANY]]
    more = [f"{len(odd) - _MANY} more"] if len(odd) > _MANY else []
    return wrong("packages", where, what=", ".join([*said, *more]), command=_INSTALL)


# Models


def model_findings(file: ClusterFile, nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield of each model whether it is whole on every node, and the same."""
    count = max((len(each.models or ()) for each in nodes), default=0)
    if not count:
        reason = "no model is pinned in cluster.toml, and none was started from a folder"
        for node in nodes:
            said = node.why_not("models") if node.models is None else reason
            yield unknown("model", node.node, said)
    for number in range(count):
        prints = [(each, each.models[number] if each.models else None) for each in nodes]
        yield from (_check_model(file, node, own, prints) for node, own in prints)
        if len(nodes) > 1:
            yield _check_same_model(file, prints)


def _check_model(
    file: ClusterFile,
    node: NodeReport,
    own: ModelPrint | None,
    prints: Sequence[tuple[NodeReport, ModelPrint | None]],
) -> Finding:
    if own is None:
        return unknown("model", node.node, node.why_not("models"))
    if not own.problem:
        size = sum(each.size for each in own.files.values()) / 1e9
        return fine("model", node.node, folder=own.folder, files=len(own.files), size=size)
    whole = [(other, its) for other, its in prints if its and not its.problem]
    command = _copy_command(file, (node, own), whole)
    return wrong("model", node.node, folder=own.folder, problem=own.problem, command=command)


def _copy_command(
    file: ClusterFile,
    broken: tuple[NodeReport, ModelPrint],
    whole: Sequence[tuple[NodeReport, ModelPrint]],
) -> str:
    """Return the command that brings a model to a node that lacks some of it."""
    node, own = broken
    if pinned := folder_of(own.folder.rpartition("/")[2]):
        return quoted("patchkit", "model", "sync" if whole else "get", pinned.repo)
    if not whole:
        return "copy it there from where you have it, to the same path on every node"
    source, its = whole[0]
    peers = {each.ssh: each.from_head for each in file.node}
    head = file.head.ssh
    rsync = ("rsync", "--archive", "--checksum")
    if source.node == head:  # from the head, which has ssh to all others
        target = f"{peers[node.node]}:{own.folder}/"
        return there(head, *rsync, f"{its.folder}/", target)
    if node.node == head:
        return there(head, *rsync, f"{peers[source.node]}:{its.folder}/", f"{own.folder}/")
    return f"copy {its.folder} from {source.node} to {own.folder} on {node.node}"


def _check_same_model(
    file: ClusterFile, prints: Sequence[tuple[NodeReport, ModelPrint | None]]
) -> Finding:
    have = [(node, its) for node, its in prints if its and not its.problem]
    where = ", ".join(node.node for node, _ in prints)
    if len(have) < 2:
        return unknown("model-same", where, "fewer than two nodes have it whole")
    (first, right), *others = have
    for node, its in others:
        if odd := _differing_files(right, its):
            what = f"{', '.join(odd[:_MANY])} on {node.node} is not as on {first.node}"
            command = _copy_command(file, (node, its), have[:1])
            return wrong("model-same", where, folder=its.folder, what=what, command=command)
    bare = [name for name, each in right.files.items() if not each.digest]
    if bare:
        reason = f"sizes are the same, and no digest of {bare[0]} was written down at the download"
        return unknown(
            "model-same", where, reason, quoted("patchkit", "model", "check", right.folder)
        )
    return fine("model-same", where)


def _differing_files(one: ModelPrint, other: ModelPrint) -> list[str]:
    names = sorted({*one.files, *other.files})
    none = FilePrint(size=-1)
    found = [n for n in names if _files_differ(one.files.get(n, none), other.files.get(n, none))]
    if one.commit and other.commit and one.commit != other.commit:
        found.insert(0, f"commit {other.commit[:_SHOWN]}, not {one.commit[:_SHOWN]}:")
    return found


def _files_differ(one: FilePrint, other: FilePrint) -> bool:
    known = bool(one.digest and other.digest)
    return one.size != other.size or (known and one.digest != other.digest)
