"""Judge the files that `up` placed: of one start, unedited, true of their nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from patchkit.doctor.peers.check import fine, unknown, wrong
from patchkit.doctor.peers.placed_files import ENV, PlacedFiles, start_id
from patchkit.doctor.peers.report import NodeReport
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host
from patchkit.runtime.node.env_file import EnvFile
from patchkit.runtime.rules.variable_rules import load_variable_rules

_OWN = "VLLM_HOST_IP"
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# Flags of each rank by itself: vllm/engine/arg_utils.py; the API server is the head's alone.
_OF_RANK = ("--node-rank", "--host", "--port", "--served-model-name")
_ALONE = ("--headless",)
_CHECKS = ("start", "edited", "env-address", "env-interface", "env-shared", "flags")


def file_findings(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what is wrong with what the last `up` left on the nodes."""
    placed = [each.placed for each in nodes if each.placed]
    first = nodes[0].placed
    again = _again(first or placed[0]) if placed else ""
    for node in nodes:
        if node.facts is None:
            yield from (unknown(about, node.node, node.why_not("facts")) for about in _CHECKS)
        elif not placed:
            nothing = "nothing was started here yet: `patchkit up`"
            yield from (unknown(about, node.node, nothing) for about in _CHECKS)
        elif node.placed is None:
            what = "it has no files of the start that other nodes have"
            yield wrong("start", node.node, what=what, command=again)
        else:
            yield _check_start(node.node, first, node.placed, again)
            yield from _check_env_file(node, node.placed, nodes, again)
    flags = [
        _check_flags(each.node, first, each.placed, again)
        for each in nodes[1:]
        if first and each.placed
    ]
    yield from flags
    # Where flags differ, that a unit was edited is said by them.
    whole = len(placed) == len(nodes) and len({each.id for each in placed}) == 1
    if whole and not any(each.level is Level.ERROR for each in flags):
        yield from _check_start_id(nodes, again)


def _check_start(name: str, head: PlacedFiles | None, own: PlacedFiles, again: str) -> Finding:
    if head is None:
        return unknown("start", name, "the head's files are not known")
    if own.id != head.id:
        what = f"its files are of the start {own.id or 'nobody knows'}, the head's of {head.id}"
        return wrong("start", name, what=what, command=again)
    return fine("start", name)


def _again(placed: PlacedFiles) -> str:
    return quoted("patchkit", "up", placed.model or "MODEL")


def _check_env_file(
    node: NodeReport, placed: PlacedFiles, nodes: Sequence[NodeReport], again: str
) -> Iterator[Finding]:
    """Yield what is wrong with a node's env file; that it was edited is said only if it is all."""
    env = placed.env
    if env is None:
        yield wrong("edited", node.node, what=f"{ENV}: {placed.trouble}", command=again)
        for about in ("env-address", "env-interface", "env-shared"):
            yield unknown(about, node.node, placed.trouble)
        return
    edited = f"; {ENV} was edited after patchkit wrote it" if env.edited else ""
    found = [
        *_check_addresses(node, env, nodes, again, edited),
        *_check_interfaces(node, env, again, edited),
        *_check_shared_variables(node, env, nodes, again, edited),
    ]
    yield from found
    said = any(each.why.endswith(edited) for each in found) if edited else False
    if env.edited and not said:
        what = f"{ENV} was edited after patchkit wrote it"
        yield wrong("edited", node.node, what=what, command=again)
    elif not env.edited:
        yield fine("edited", node.node)


def _check_addresses(
    node: NodeReport, env: EnvFile, nodes: Sequence[NodeReport], again: str, edited: str
) -> Iterator[Finding]:
    assert node.facts is not None
    own, head = env.variables.get(_OWN, ""), env.facts.get("head", "")
    wrongs = []
    if own and not node.facts.host.has_address(own):
        whose = _find_owner(own, nodes)
        wrongs.append(f"{_OWN}={own} is {whose or 'no address of this node'}")
    flag = node.placed.flag("--master-addr") if node.placed else ""
    for name, value in (("head", head), ("--master-addr", flag)):
        if value and nodes[0].facts and not nodes[0].facts.host.has_address(value):
            wrongs.append(f"{name}={value} is no address of {nodes[0].node}")
    lost = any(
        each.facts and not each.facts.host.has_address(each.address) for each in (node, nodes[0])
    )
    if wrongs and lost and not edited:
        # The file is as it was written: it is the address that is gone, and that is said.
        yield unknown("env-address", node.node, f"{wrongs[0]}, which has lost it")
    elif wrongs:
        what = "; ".join(wrongs)
        yield wrong("env-address", node.node, what=what, edited=edited, command=again)
    elif own or head:
        yield fine("env-address", node.node)
    else:
        yield unknown("env-address", node.node, "node.env names no address: this node is alone")


def _find_owner(address: str, nodes: Sequence[NodeReport]) -> str:
    holders = [each.node for each in nodes if each.facts and each.facts.host.has_address(address)]
    return f"{holders[0]}'s" if holders else ""


def _check_interfaces(node: NodeReport, env: EnvFile, again: str, edited: str) -> Iterator[Finding]:
    assert node.facts is not None
    host, named, missing = node.facts.host, False, False
    for name in _INTERFACES:
        value = env.variables.get(name, "")
        if not value or value.startswith("^"):
            continue
        named = True
        for each in value.lstrip("=").split(","):
            if not _has_interface(host, each, exact=value.startswith("=")):
                missing = True
                fields = {"name": name, "value": value, "missing": each}
                yield wrong("env-interface", node.node, **fields, edited=edited, command=again)
    if not named:
        yield unknown("env-interface", node.node, "node.env names no interface")
    elif not missing:
        yield fine("env-interface", node.node)


def _has_interface(host: Host, name: str, *, exact: bool) -> bool:
    """Return whether NCCL finds an interface: a name is a prefix unless ``=`` stands before it."""
    return any(
        each.name == name or (not exact and each.name.startswith(name)) for each in host.netdevs
    )


def _check_shared_variables(
    node: NodeReport, env: EnvFile, nodes: Sequence[NodeReport], again: str, edited: str
) -> Iterator[Finding]:
    head = nodes[0].placed.env if nodes[0].placed else None
    if node is nodes[0]:
        return
    if head is None:
        yield unknown("env-shared", node.node, "the head's node.env is not known")
        return
    own, theirs = _shared_variables(env), _shared_variables(head)
    odd = sorted(name for name in {*own, *theirs} if own.get(name) != theirs.get(name))
    if odd:
        said = [
            f"{name} is {_shown_value(own, name)} here and {_shown_value(theirs, name)} there"
            for name in odd
        ]
        if head.edited:
            edited += "; the head's was edited after patchkit wrote it"
        what = "; ".join(said)
        yield wrong("env-shared", node.node, what=what, edited=edited, command=again)
    else:
        yield fine("env-shared", node.node, count=len(own))


def _shared_variables(env: EnvFile) -> dict[str, str]:
    of_host = load_variable_rules().of_host
    return {name: value for name, value in env.variables.items() if name not in of_host}


def _shown_value(variables: Mapping[str, str], name: str) -> str:
    return repr(variables[name]) if name in variables else "not set"


def _check_start_id(nodes: Sequence[NodeReport], again: str) -> Iterator[Finding]:
    """Yield that a file without a digest of its own was edited: the start's tells that one was."""
    placed = [each.placed for each in nodes if each.placed]
    if start_id(placed) == placed[0].id or any(each.env and each.env.edited for each in placed):
        return
    names = ", ".join(each.node for each in nodes)
    what = "a unit or group.py was edited after patchkit wrote it"
    yield wrong("edited", names, what=what, command=again)


def _check_flags(name: str, head: PlacedFiles, own: PlacedFiles, again: str) -> Finding:
    if not (head.source and own.source):
        return unknown("flags", name, "Ray starts this rank with the head's flags")
    one, other = _shared_flags(own.words), _shared_flags(head.words)
    odd = [f"here {each}" for each in one if each not in other]
    odd += [f"there {each}" for each in other if each not in one]
    if odd:
        return wrong("flags", name, what=", ".join(odd), command=again)
    return fine("flags", name)


def _shared_flags(words: Sequence[str]) -> list[str]:
    """Return each flag with its values, without those of a rank; the model's folder is compared."""
    found: list[list[str]] = []
    for word in words[1:]:
        if word.startswith("--") or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return [
        " ".join(each) for each in found if each[0].partition("=")[0] not in (*_OF_RANK, *_ALONE)
    ]
