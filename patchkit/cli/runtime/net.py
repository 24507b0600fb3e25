"""Plan and verify the QSFP network: `patchkit net`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import (
    FOLDER,
    PATH,
    LaidOut,
    next_step,
    program,
    record_fields,
    style,
    table,
    tell,
)
from patchkit.cli.render import (
    GOOD,
    Block,
    Data,
    ExitCode,
    Record,
    VerbGroup,
    finding_blocks,
    finding_summary,
    rendered,
    verbose_option,
    with_options,
)
from patchkit.cluster.agent.node_facts import NodeFacts, look_at_node
from patchkit.cluster.launch.cluster_file import VENV
from patchkit.cluster.net.addressing import (
    NetPlan,
    NetPlanOptions,
    WrittenPlan,
    make_net_plan,
    other_node_options,
)
from patchkit.cluster.net.checks import (
    choose_checked_cages,
    plan_remarks,
    verify_network,
)
from patchkit.cluster.net.netplan_file import (
    OURS,
    check_conflicts,
    read_other_files,
    read_written_plan,
    render_netplan,
)
from patchkit.cluster.ssh.node import Remote
from patchkit.errors import UsageError
from patchkit.finding import Finding, Level, worst
from patchkit.quoting import quoted
from patchkit.runtime.envfile.write import write
from patchkit.runtime.host.probe import probe
from patchkit.runtime.rules.refusals import refusal
from patchkit.runtime.rules.releases import read_env_data


class _IPv4Type(click.ParamType[Any]):
    """An address or a network, with an example for who mistypes it."""

    def __init__(
        self, kind: type[IPv4Address] | type[IPv4Network], example: str
    ) -> None:
        self.kind, self.example, self.name = (
            kind,
            example,
            kind.__name__.removeprefix("IPv4"),
        )

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self.kind(value)
        except ValueError as error:
            what = f"{value!r} is not an IPv4 {self.name.lower()}: {error}"
            self.fail(f"{what}; for example {self.example}", param, ctx)


_NETWORK = read_env_data("network")
_ROOT = click.option(
    "--root", type=FOLDER, default=Path("/"), help="Another root than /."
)
_NETDEV = click.option("--netdev", "netdevs", multiple=True, help="Not what is cabled.")
_plan_options = with_options(
    click.option(
        "--node", type=int, metavar="N", help="This node's number, from 1: the head."
    ),
    click.option(
        "--role", type=click.Choice(["head", "worker"]), help="Of two: node 1 or 2."
    ),
    click.option(
        "--nodes", type=int, default=2, show_default=True, metavar="N", help="All."
    ),
    click.option(
        "--network",
        type=_IPv4Type(IPv4Network, "192.168.100.0/24"),
        help="Count addresses anew from this one: twin A's; twin B and further links follow. "
        f"Default: keep what is there, else {_NETWORK['plan']['network']}.",
    ),
    _NETDEV,
    click.option("--mtu", type=int, metavar="N", help="Default: what is there."),
    _ROOT,
)


@click.group(cls=VerbGroup)
def net_command() -> None:
    """The QSFP network between Sparks: plan and verify.

    \b
      patchkit net plan --role head -o 40-patchkit.yaml
      sudo install -m 600 40-patchkit.yaml /etc/netplan/ && sudo netplan try
      patchkit net verify --peer 192.168.100.11
      sudo rm /etc/netplan/40-patchkit.yaml && sudo netplan apply

    What works is kept. A cage without addresses gets one on each half, in different networks; a
    ring of three gets twelve.
    """


@net_command.command("plan")
@_plan_options
@click.option(
    "-o", "--output", type=PATH, metavar="FILE", help="Write the netplan file there."
)
@click.option("--force", is_flag=True, help="Replace a FILE with another content.")
@verbose_option
@rendered
def plan_network(
    *, root: Path, output: Path | None, force: bool, verbose: bool, **options: Any
) -> Iterator[Block]:
    """Print what this node's network lacks; needs no rights, and leaves the network alone.

    The first line is the verdict; -v shows the netplan file, -o writes it, for `netplan try`.
    Addresses that are there are kept, whoever gave them.
    """
    asked, file = _read_options(**options), root / OURS
    host, given = (
        probe(root, python=None, environment=os.environ),
        read_written_plan(file),
    )
    plan = make_net_plan(host, asked, given)
    files = read_other_files(root)
    check_conflicts(host, plan, asked, given or WrittenPlan(), files)
    # netplan's files are of mode 600, and plan needs no rights.
    hidden = [path for path, its in {**files, str(file): given}.items() if its is None]
    if hidden and plan.written:
        what = "whether they fight this plan was not checked"
        tell(f"note: only root may read {', '.join(hidden)}: {what}")
    text, outcome = render_netplan(plan) if plan.written else "", ""
    if output and text:
        if plan.changes and given is None:
            raise refusal(
                "netplan-unread", file=file, open=quoted("sudo", "chmod", "a+r", file)
            )
        outcome = write(output, text, force=force, private=True, by="patchkit net plan")
    written = {"yaml": text, "file": output if outcome else None, "outcome": outcome}
    yield from _plan_blocks(plan, tuple(plan_remarks(host, plan)), written)
    if verbose and text:
        yield f"\n{file}:"
        yield Data(text)
    if outcome:
        yield GOOD + f"{output} {outcome}"
    at = () if root == Path("/") else ("--root", root)
    if not plan.changes:
        yield next_step(*program(), "net", "verify", *at)
    elif output:
        # -b: what somebody wrote there stays beside it, as 40-patchkit.yaml~, which netplan skips.
        install = quoted("sudo", "install", "-b", "-m", "600", output, file)
        tried = "" if at else " && sudo netplan try"
        yield LaidOut(style("next:", bold=True) + f" {install}{tried}")
    else:
        yield next_step(*program(), *asked.command_words(), *at, "-o", OURS.name)
    if there := other_node_options(plan, asked):
        unless = "" if plan.changes else ", if it has no address yet"
        yield next_step(
            "patchkit", *there.command_words(), where=f"on the other node{unless}"
        )


def _read_options(role: str | None, node: int | None, **options: Any) -> NetPlanOptions:
    nodes = options["nodes"]
    if role == "worker" and node is None and nodes > 2:
        hint = f"its number: --node 2 to --node {nodes}"
        raise UsageError("--role worker is one of several", hint=hint)
    if node is not None and role and (node == 1) != (role == "head"):
        raise UsageError(
            f"--role {role} --node {node}: the head is node 1, and only the head"
        )
    if node is None and role:
        node = {"head": 1, "worker": 2}[role]
    return NetPlanOptions(node=node, **options)


def _plan_blocks(
    plan: NetPlan, notes: Sequence[Finding], written: dict[str, Any]
) -> Iterator[Block]:
    """Yield the verdict in one line, a row for each interface, and what to know."""
    verdict = "this network is fine already: nothing to do"
    if changes := len(plan.changes):
        verb = "changes" if changes == 1 else "change"
        verdict = f"{changes} of {len(plan.lines)} interfaces {verb}"
    elif any(note.level in (Level.ERROR, Level.WARNING) for note in notes):
        verdict = "no address has to change, but see what is said below"
    lines = [{"action": line.action, **record_fields(line)} for line in plan.lines]
    own = {"verdict": verdict, "changes": changes, **record_fields(plan, "lines")}
    yield Record({**own, "lines": lines, "notes": notes, **written})
    yield style(verdict, bold=True)
    rows = []
    for line in plan.lines:
        addresses = ", ".join(map(str, line.addresses)) or "no IPv4"
        if line.action == "replace":
            addresses += f" (was {', '.join(map(str, line.before))})"
        was = f" (was {line.mtu_before})" if line.mtu != line.mtu_before else ""
        place = line.place + (f", to node {line.peer}" if line.peer else "")
        action = style(line.action, fg=None if line.action == "keep" else "green")
        rows.append((action, line.netdev, addresses, f"MTU {line.mtu}{was}", place))
    yield from table(rows, indent="  ")
    yield from finding_blocks(notes)


@net_command.command("verify")
@click.option(
    "--peer",
    "peers",
    type=_IPv4Type(IPv4Address, "192.168.100.11"),
    multiple=True,
    help="Its address; repeat per twin.",
)
@click.option(
    "--ssh", metavar="HOST", help="Ask the peer, which needs no patchkit, by ssh."
)
@_NETDEV
@_ROOT
@verbose_option
@rendered
def verify_ends(*, verbose: bool, root: Path, **options: Any) -> Iterator[Block]:
    """Check the QSFP network; needs no rights, changes nothing.

    Link, speed, MTU, addresses and RoCE GIDs here; with --peer the way there, with jumbo frames;
    with --ssh both ends compared. What could not be checked is reported and does not
    count as passed. Exits with 9 if a check failed.
    """
    host = probe(root, python=None, environment=os.environ)
    chosen = choose_checked_cages(host, options["netdevs"])
    peer = None
    if options["ssh"]:
        peer = (
            Remote(options["ssh"])
            .call(NodeFacts, look_at_node, name="patchkit", venv=VENV)
            .host
        )
    live = root.resolve() == Path("/")  # else these are facts of another machine
    checks = list(verify_network(host, chosen, peer, options["peers"], live=live))
    link, slower = _NETWORK["link"], _NETWORK["owners"]["hot_plug"]
    (one, most), (least, both) = link["twin_gbits"], link["both_gbits"]
    expected = f"{one} to {most} Gb/s for one twin, {least} to {both} for both at once"
    bandwidth = {"expected": expected, "slower": slower}
    yield Record({"checks": checks, "bandwidth": bandwidth})
    yield from finding_blocks(
        check for check in checks if verbose or check.level is not Level.OK
    )
    yield "RDMA bandwidth is not measured; expect of `ib_write_bw -R --report_gbits`"
    yield from (f"  {line}" for line in bandwidth.values())
    yield finding_summary(checks)
    yield ExitCode(worst(checks))
