"""Judge the files that `up` placed: written by one start, not edited, true of their nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patchkit.doctor.peers.check import NotCheckedError, Outcome, check, make_finding, require
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.doctor.peers.placed_files import ENV, PlacedFiles
from patchkit.finding import Finding
from patchkit.quoting import quoted
from patchkit.runtime.node.env_file import EnvFile
from patchkit.runtime.rules.variable_rules import load_variable_rules

_OWN = "VLLM_HOST_IP"
# Flags of each rank by itself: vllm/engine/arg_utils.py; the API server is the head's alone.
_OF_RANK = ("--node-rank", "--host", "--port", "--served-model-name", "--headless")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedNode:
    """A node beside the others; ``again`` is the command that writes its files anew."""

    report: NodeReport
    nodes: Sequence[NodeReport]
    again: str

    @property
    def node(self) -> str:
        """Return the node's name."""
        return self.report.node

    @property
    def head(self) -> NodeReport:
        """Return the first node."""
        return self.nodes[0]

    @property
    def placed(self) -> PlacedFiles:
        """Return its files. Raises NotCheckedError where there are none."""
        if self.report.facts is None:
            raise NotCheckedError(self.report.why_not("facts"))
        nothing = any(other.placed for other in self.nodes)
        why = "it has no files of the start" if nothing else "nothing was started here yet"
        return require(self.report.placed, f"{why}: `patchkit up`")

    @property
    def env(self) -> EnvFile:
        """Return its env file. Raises NotCheckedError where there is none that can be read."""
        return require(self.placed.env, self.placed.trouble)

    @property
    def edited(self) -> str:
        """Return the end of a sentence that says that an env file was edited, "" if none was."""
        whose = [its for its in (self.report, self.head) if its.env and its.env.edited]
        names = " and ".join(dict.fromkeys(its.node for its in whose))
        return f"; {ENV} of {names} was edited after patchkit wrote it" if names else ""


def file_findings(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what is wrong with what the last `up` left on the nodes."""
    model = next((each.placed.model for each in nodes if each.placed), "")
    again = quoted("patchkit", "up", model or "MODEL")
    for report in nodes:
        node = PlacedNode(report=report, nodes=nodes, again=again)
        yield from check_start(node)
        found = check_env_addresses(node)
        if report is not nodes[0]:
            found += check_env_shared(node)
        yield from found
        # That it was edited is said only if nothing else of it is.
        if not any("was edited after" in finding.why for finding in found):
            yield from check_edited(node)
    for report in nodes[1:]:
        yield from check_flags(PlacedNode(report=report, nodes=nodes, again=again))


@check("start")
def check_start(node: PlacedNode) -> Outcome:
    others = any(other.placed for other in node.nodes)
    if node.report.facts and node.report.placed is None and others:
        what = "it has no files of the start that other nodes have"
        return make_finding("start", node.node, what=what, command=node.again)
    own, head = node.placed, require(node.head.placed, "the head's files are not known")
    if own.id == head.id:
        return {}
    what = f"its files are of the start {own.id or 'nobody knows'}, the head's of {head.id}"
    return make_finding("start", node.node, what=what, command=node.again)


@check("edited")
def check_edited(node: PlacedNode) -> Outcome:
    what = f"{ENV} was edited after patchkit wrote it"
    if node.placed.env is None:
        what = f"{ENV}: {node.placed.trouble}"
    elif not node.env.edited:
        return {}
    return make_finding("edited", node.node, what=what, command=node.again)


@check("env-address")
def check_env_addresses(node: PlacedNode) -> Outcome:
    env, host = node.env, node.report.host
    own, head = env.variables.get(_OWN, ""), env.facts.get("head", "")
    wrong = []
    if own and not host.has_address(own):
        owners = [f"{o.node}'s" for o in node.nodes if o.facts and o.facts.host.has_address(own)]
        wrong.append(f"{_OWN}={own} is {[*owners, 'no address of this node'][0]}")
    flag = node.placed.word_after("--master-addr")
    for name, value in (("head", head), ("--master-addr", flag)):
        if value and node.head.facts and not node.head.facts.host.has_address(value):
            wrong.append(f"{name}={value} is no address of {node.head.node}")
    lost = any(
        each.facts and not each.facts.host.has_address(each.address)
        for each in (node.report, node.head)
    )
    if wrong and lost and not env.edited:
        # The file is as it was written: it is the address that is gone, and that is said.
        raise NotCheckedError(f"{wrong[0]}, which has lost it")
    if wrong:
        fields = {"what": "; ".join(wrong), "edited": node.edited, "command": node.again}
        return make_finding("env-address", node.node, **fields)
    if not (own or head):
        raise NotCheckedError("node.env names no address: this node is alone")
    return {}


@check("env-shared")
def check_env_shared(node: PlacedNode) -> Outcome:
    head = require(node.head.env, "the head's node.env is not known")
    of_host = load_variable_rules().of_host
    names = sorted({*node.env.variables, *head.variables} - {*of_host})
    odd = []
    for name in names:
        own, other = (
            repr(env.variables[name]) if name in env.variables else "not set"
            for env in (node.env, head)
        )
        if own != other:
            odd.append(f"{name} is {own} here and {other} there")
    if not odd:
        return {"count": len(names)}
    fields = {"what": "; ".join(odd), "edited": node.edited, "command": node.again}
    return make_finding("env-shared", node.node, **fields)


@check("flags")
def check_flags(node: PlacedNode) -> Outcome:
    own, head = node.placed, require(node.head.placed, "the head's files are not known")
    if not (head.word_after("serve") and own.word_after("serve")):
        raise NotCheckedError("Ray starts this rank with the head's flags")
    one, other = _shared_flags(own.words), _shared_flags(head.words)
    odd = [f"here {flag}" for flag in one if flag not in other]
    odd += [f"there {flag}" for flag in other if flag not in one]
    if not odd:
        return {}
    return make_finding("flags", node.node, what=", ".join(odd), command=node.again)


def _shared_flags(words: Sequence[str]) -> list[str]:
    """Return each flag with its values, without those of a rank; the model's folder is compared."""
    flags: list[list[str]] = []
    for word in words[1:]:
        if word.startswith("--") or not flags:
            flags.append([word])
        else:
            flags[-1].append(word)
    return [" ".join(flag) for flag in flags if flag[0].partition("=")[0] not in _OF_RANK]
