"""Plan and verify the QSFP network: `patchkit net`."""

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import click

from patchkit.cli.out import (
    LaidOut,
    bold,
    next_step,
    next_verb,
    record_fields,
    style,
    table,
    tell,
)
from patchkit.cli.render import (
    GOOD,
    Blocks,
    Data,
    ExitCode,
    Row,
    VerbGroup,
    finding_blocks,
    finding_summary,
    option,
    options_of,
    rendered,
)
from patchkit.cluster.agent.node_facts import NodeFacts, look_at_node
from patchkit.cluster.launch.cluster import read_cluster_file
from patchkit.cluster.launch.cluster_file import VENV
from patchkit.cluster.net.addressing import (
    Line,
    NetPlan,
    NetPlanOptions,
    WrittenPlan,
    make_net_plan,
    other_node_options,
)
from patchkit.cluster.net.checks import (
    choose_checked_cages,
    measure_network,
    plan_remarks,
    verify_network,
)
from patchkit.cluster.net.netplan_file import (
    OURS,
    PlanInputs,
    check_conflicts,
    read_other_files,
    read_written_plan,
    render_netplan,
)
from patchkit.cluster.ssh.node import Remote
from patchkit.errors import UsageError
from patchkit.finding import Finding, Level, worst
from patchkit.quoting import quoted
from patchkit.runtime.envfile.env_file import write
from patchkit.runtime.host.probe import LIVE, probe
from patchkit.runtime.rules.releases import read_env_data, refusal


def _read_network(text: str) -> IPv4Network:
    try:
        return IPv4Network(text)
    except ValueError as error:
        what = f"{text!r} is not an IPv4 network: {error}"
        raise UsageError(what, hint="one such as 192.168.100.0/24") from None


_NETWORK = read_env_data("network")


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
@options_of("net-plan")
@option(
    "--network NETWORK",
    f"Renumber from here; default: keep, or {_NETWORK['plan']['network']}",
    type=_read_network,
)
@options_of("net-file")
@rendered
def plan_network(
    root: Path, output: Path | None, force: bool, verbose: bool, **options: Any
) -> Blocks:
    """Print what is missing in this node's network; needs no rights, and changes nothing.

    The first line is the verdict; -v shows the netplan file, -o writes it, for `netplan try`.
    Existing addresses are kept, whoever gave them. --network gives twin A the first network, twin
    B and further links those that follow.
    """
    if role := options.pop("role"):
        options["node"] = _node_number(role, options["node"], options["nodes"])
    request = NetPlanOptions(**options)
    host = probe(root)
    file = root / OURS
    written = read_written_plan(file)
    plan = make_net_plan(host, request, written)
    files = read_other_files(root)
    given = PlanInputs(host, plan, request, written or WrittenPlan(), files)
    check_conflicts(given)

    text = ""
    outcome = ""
    if plan.written:
        text = render_netplan(plan)
        _tell_unread({**files, str(file): written})
    if output and text:
        if plan.changes and written is None:
            command = quoted("sudo", "chmod", "a+r", file)
            raise refusal("netplan-unread", file=file, open=command)
        by = "patchkit net plan"
        outcome = write(output, text, force=force, private=True, by=by)

    netplan = {
        "yaml": text,
        "file": output if outcome else None,
        "outcome": outcome,
    }
    remarks = tuple(plan_remarks(host, plan))
    yield from _plan_blocks(plan, remarks, netplan)
    if verbose and text:
        yield f"\n{file}:"
        yield Data(text)
    if outcome:
        yield GOOD + f"{output} {outcome}"

    yield _next_step(plan, request, root, output)

    if peer := other_node_options(plan, request):
        unless = "" if plan.changes else ", if it has no address yet"
        where = f"on the other node{unless}"
        yield next_step("patchkit", *peer.command_words(), where=where)


def _tell_unread(contents: Mapping[str, object]) -> None:
    """Tell which netplan files could not be read: they have mode 600, and root alone reads them."""
    paths = [path for path, content in contents.items() if content is None]
    if paths:
        what = "whether they fight this plan was not checked"
        tell(f"note: only root may read {', '.join(paths)}: {what}")


def _next_step(
    plan: NetPlan, request: NetPlanOptions, root: Path, output: Path | None
) -> LaidOut:
    at_root = () if root == LIVE else ("--root", root)
    if not plan.changes:
        return next_verb("net", "verify", *at_root)
    if output is None:
        return next_verb(*request.command_words(), *at_root, "-o", OURS.name)

    # -b keeps the former file as 40-patchkit.yaml~, a name that netplan skips.
    install = next_step("sudo", "install", "-b", "-m", "600", output, root / OURS)
    return install if at_root else LaidOut(install + " && sudo netplan try")


def _node_number(role: str, node: int | None, nodes: int) -> int:
    """Return the number of a node, from 1, by its role.

    Raises UsageError if --node gives a number, too, or if a worker may be one of several.
    """
    if node or (role == "worker" and nodes > 2):
        what = f"--role {role} does not say which of several nodes this is"
        hint = f"its number alone: --node 1 is the head, --node 2 to --node {nodes} the others"
        raise UsageError(what, hint=hint)

    return 1 if role == "head" else 2


def _plan_blocks(
    plan: NetPlan, remarks: Sequence[Finding], netplan: dict[str, Any]
) -> Blocks:
    """Yield a plan's verdict in one line, a row for each interface, and the remarks."""
    verdict = _verdict(plan, remarks)
    lines = [{"action": line.action, **record_fields(line)} for line in plan.lines]
    yield {
        "verdict": verdict,
        "changes": len(plan.changes),
        **record_fields(plan, "lines"),
        "lines": lines,
        "notes": remarks,
        **netplan,
    }

    yield bold(verdict)
    yield from table(map(_interface_row, plan.lines), indent="  ")
    yield from finding_blocks(remarks)


def _verdict(plan: NetPlan, remarks: Sequence[Finding]) -> str:
    if plan.changes:
        return f"{len(plan.changes)} of {len(plan.lines)} interfaces to change"
    if worst(remarks, Level.ERROR, Level.WARNING):
        return "no address has to change, but see what is said below"
    return "this network is fine already: nothing to do"


def _interface_row(line: Line) -> Row:
    addresses = ", ".join(map(str, line.addresses)) or "no IPv4"

    if line.action == "replace":
        addresses += f" (was {', '.join(map(str, line.before))})"

    mtu = f"MTU {line.mtu}"
    if line.mtu != line.mtu_before:
        mtu += f" (was {line.mtu_before})"

    place = line.place
    if line.peer:
        place += f", to node {line.peer}"

    colour = None if line.action == "keep" else "green"
    return (
        style(line.action, fg=colour),
        line.netdev,
        addresses,
        mtu,
        place,
    )


@net_command.command("verify")
@options_of("net-verify")
@rendered
def verify_ends(verbose: bool, root: Path, **options: Any) -> Blocks:
    """Check the QSFP network; needs no rights, changes nothing.

    Link, speed, MTU, addresses and RoCE GIDs here; with --peer the way there, with jumbo frames;
    with --ssh both ends compared. A check that was not possible is reported, and does not count as
    passed. Exits with 9 if a check failed.

    --measure sends for 10 s through each half of each cage, then through both: by ib_write_bw
    (RDMA) if all nodes have it, else by TCP. What is served meanwhile becomes slower.
    """
    if options["measure"]:
        yield from _measure(options["file"], options["netdevs"])
        return

    host = probe(root)
    cages = choose_checked_cages(host, options["netdevs"])
    peer = None
    if options["ssh"]:
        remote = Remote(options["ssh"])
        facts = remote.call(NodeFacts, look_at_node, name="patchkit", venv=VENV)
        peer = (remote.destination, facts.host)

    is_live = root.resolve() == LIVE  # False for a saved copy
    checks = list(verify_network(host, cages, peer, options["peers"], live=is_live))

    yield {"checks": checks}

    shown = [check for check in checks if verbose or check.level is not Level.OK]
    yield from finding_blocks(shown)

    yield "bandwidth is not measured: --measure does that"
    yield finding_summary(checks)
    yield ExitCode(worst(checks))


def _measure(file: Path, netdevs: Sequence[str]) -> Blocks:
    """Measure the cables of a cluster, and report each measurement."""
    cluster = read_cluster_file(file)
    if len(cluster.members) < 2:
        raise refusal("net-alone", file=file)

    hosts = [facts.host for facts in cluster.facts()]
    nodes = list(zip(cluster.nodes, hosts, strict=True))
    rates = list(measure_network(nodes, tuple(netdevs), tell))
    checks = [finding for finding, _gbits in rates]
    measured = [{"where": finding.where, "gbits": gbits} for finding, gbits in rates]
    yield {
        "checks": checks,
        "measured": measured,
    }
    yield from finding_blocks(checks)
    yield finding_summary(checks)
    yield ExitCode(worst(checks))
