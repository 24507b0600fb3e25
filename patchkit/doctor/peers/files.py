"""Judge the files that `up` placed: written by one start, not edited, true of their nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.doctor.peers.check import NotCheckedError, Outcome, check, require
from patchkit.doctor.peers.node_report import ENV, NodeReport, PlacedFiles
from patchkit.finding import Finding
from patchkit.quoting import quoted
from patchkit.runtime.node.env_file import EnvFile
from patchkit.runtime.rules.variable_rules import load_variable_rules

_OWN = "VLLM_HOST_IP"
_EDITED = f"{ENV} was edited after patchkit wrote it"
# Flags of each rank by itself: vllm/engine/arg_utils.py; the API server is the head's alone.
_OF_RANK = ("--node-rank", "--host", "--port", "--served-model-name", "--headless")


def file_findings(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what is wrong with what the last `up` left on the nodes."""
    model = next((each.placed.model for each in nodes if each.placed), "")
    again = quoted("patchkit", "up", model or "MODEL")
    for node in nodes:
        yield from check_start(node, nodes, again)
        found = check_env_addresses(node, nodes, again)
        if node is not nodes[0]:
            found += check_env_shared(node, nodes, again)
        yield from found
        # That it was edited is said only if nothing else of it is.
        if not any(_EDITED in finding.why for finding in found):
            yield from check_edited(node, nodes, again)
    for node in nodes[1:]:
        yield from check_flags(node, nodes, again)


def _placed(node: NodeReport, nodes: Sequence[NodeReport]) -> PlacedFiles:
    """Return a node's files. Raises NotCheckedError where there are none."""
    node.part("facts")
    started = any(other.placed for other in nodes)
    why = "it has no files of the start" if started else "nothing was started here yet"
    return require(node.placed, f"{why}: `patchkit up`")


def _env(node: NodeReport, nodes: Sequence[NodeReport]) -> EnvFile:
    placed = _placed(node, nodes)
    return require(placed.env, placed.trouble)


@check("start")
def check_start(node: NodeReport, nodes: Sequence[NodeReport], again: str) -> Outcome:
    head = nodes[0].placed
    if node.facts and node.placed is None and any(other.placed for other in nodes):
        what = "it has no files of the start that other nodes have"
    else:
        own, head = _placed(node, nodes), require(head, "the head's files are not known")
        if own.id == head.id:
            return {}
        what = f"its files are of the start {own.id or 'nobody knows'}, the head's of {head.id}"
    return node.find("start", what=what, command=again)


@check("edited")
def check_edited(node: NodeReport, nodes: Sequence[NodeReport], again: str) -> Outcome:
    placed = _placed(node, nodes)
    if placed.env and not placed.env.edited:
        return {}
    what = _EDITED if placed.env else f"{ENV}: {placed.trouble}"
    return node.find("edited", what=what, command=again)


@check("env-address")
def check_env_addresses(node: NodeReport, nodes: Sequence[NodeReport], again: str) -> Outcome:
    env, host = _env(node, nodes), node.host
    own, head = env.variables.get(_OWN, ""), env.facts.get("head", "")
    first = nodes[0].facts
    wrong = []
    if own and not host.has_address(own):
        owners = [f"{o.node}'s" for o in nodes if o.facts and o.facts.host.has_address(own)]
        wrong.append(f"{_OWN}={own} is {[*owners, 'no address of this node'][0]}")
    flag = node.placed.word_after("--master-addr") if node.placed else ""
    for name, value in (("head", head), ("--master-addr", flag)):
        if value and first and not first.host.has_address(value):
            wrong.append(f"{name}={value} is no address of {nodes[0].node}")
    if not (own or head):
        raise NotCheckedError("node.env names no address: this node is alone")
    if not wrong:
        return {}
    ends = [each for each in (node, nodes[0]) if each.facts]
    if not env.edited and not all(each.host.has_address(each.address) for each in ends):
        # The file is as it was written: it is the address that is gone, and that is said.
        raise NotCheckedError(f"{wrong[0]}, which has lost it")
    what, edited = "; ".join(wrong), _edited(node, nodes[0])
    return node.find("env-address", what=what, edited=edited, command=again)


def _edited(*nodes: NodeReport) -> str:
    """Return the end of a sentence that says whose env file was edited, "" for nobody's."""
    names = " and ".join(dict.fromkeys(its.node for its in nodes if its.env and its.env.edited))
    return f"; on {names} {_EDITED}" if names else ""


@check("env-shared")
def check_env_shared(node: NodeReport, nodes: Sequence[NodeReport], again: str) -> Outcome:
    own, head = _env(node, nodes), require(nodes[0].env, "the head's node.env is not known")
    of_host = load_variable_rules().of_host
    names = sorted({*own.variables, *head.variables} - {*of_host})
    odd = []
    for name in names:
        here, there = (repr(env.variables.get(name, "not set")) for env in (own, head))
        if here != there:
            odd.append(f"{name} is {here} here and {there} there")
    if not odd:
        return {"count": len(names)}
    what, edited = "; ".join(odd), _edited(node, nodes[0])
    return node.find("env-shared", what=what, edited=edited, command=again)


@check("flags")
def check_flags(node: NodeReport, nodes: Sequence[NodeReport], again: str) -> Outcome:
    own = _placed(node, nodes)
    head = require(nodes[0].placed, "the head's files are not known")
    if not (head.word_after("serve") and own.word_after("serve")):
        raise NotCheckedError("Ray starts this rank with the head's flags")
    one, other = _shared_flags(own.words), _shared_flags(head.words)
    odd = [f"here {flag}" for flag in one if flag not in other]
    odd += [f"there {flag}" for flag in other if flag not in one]
    return node.find("flags", what=", ".join(odd), command=again) if odd else {}


def _shared_flags(words: Sequence[str]) -> list[str]:
    """Return each flag with its values, without those of a rank; the model's folder is compared."""
    flags: list[list[str]] = []
    for word in words[1:]:
        if word.startswith("--") or not flags:
            flags.append([word])
        else:
            flags[-1].append(word)
    return [" ".join(flag) for flag in flags if flag[0].partition("=")[0] not in _OF_RANK]
