"""Nodes that are well, and each thing that can be wrong with them or between them."""

from dataclasses import replace

import pytest

from patchkit.cluster.agent.examination import LoadedNccl, UnitFile
from patchkit.cluster.agent.links import PeerLink
from patchkit.cluster.agent.unit_state import GroupProcess, Listener
from patchkit.doctor.judgement import peer_findings
from patchkit.doctor.peers.check import causes_in_order
from patchkit.doctor.peers.node_report import ClockOffset, NodeReport
from patchkit.doctor.peers.placed_files import placed_files
from patchkit.errors import HostError
from patchkit.finding import Level
from support import node_reports

WRONG = (Level.ERROR, Level.WARNING, Level.NOTE)
UNIT = "patchkit-vllm.service"


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    return node_reports.reports(tmp_path_factory.mktemp("nodes"))


def wrong(file, nodes):
    return [each for each in peer_findings(file, nodes) if each.level in WRONG]


def netdev(report, **changes):
    """The report with its cable's interface changed."""
    host = report.facts.host
    name = report.ways[0][1].netdev
    netdevs = [replace(n, **changes) if n.name == name else n for n in host.netdevs]
    return replace(report, facts=replace(report.facts, host=replace(host, netdevs=tuple(netdevs))))


def way(report, **changes):
    name, found = report.ways[0]
    return replace(report, ways=((name, replace(found, **changes)),))


def file(report, name, old, new):
    """The report with a text replaced in a file that `up` placed."""
    texts = dict(report.facts.files)
    assert old in texts[name]
    texts[name] = texts[name].replace(old, new)
    facts = replace(report.facts, files=texts)
    return replace(report, facts=facts, placed=placed_files(texts, UNIT))


def halted(letter):
    return (GroupProcess(pid=10, name="VLLM::Worker_TP1", state=letter),)


def ended(report, *, processes=()):
    return replace(
        report, state=node_reports.state(node_reports.unit("inactive", "dead")), processes=processes
    )


NO_KEY = {"kind": "HostError", "what": "spark-2: Permission denied", "why": "", "hint": "x"}
# What is changed on which node → the check, whom it names, and what the hint holds.
FAULTS = {
    "disk": (
        1,
        lambda r: replace(r, disks=(replace(r.disks[0], free=4096), r.disks[0])),
        "spark-2",
        "du -xah -d 1 /",
    ),
    "clock": (
        1,
        lambda r: replace(r, clock=ClockOffset(ahead=40, error=0.1)),
        "spark-2",
        "set-ntp",
    ),
    "cable": (1, lambda r: netdev(r, carrier=False, state="down"), "spark-2", "-brief link show"),
    "address": (
        1,
        lambda r: netdev(r, addresses=()),
        "spark-2",
        "ip address add 192.168.100.11/24",
    ),
    "mtu": (1, lambda r: netdev(r, mtu=1500), "spark-2", "mtu 9000"),
    "route": (0, lambda r: way(r, netdev="wlan0"), "spark-1", "ip route get 192.168.100.11"),
    "way": (0, lambda r: way(r, plain="silent", full="silent"), "spark-1", "ping -c 3"),
    "link": (
        0,
        lambda r: replace(r, links=(PeerLink(words=(), error=NO_KEY),)),
        "spark-1",
        "on spark-1: `ssh-copy-id spark-2`",
    ),
    "python": (
        1,
        lambda r: replace(
            r,
            contents=None,
            facts=replace(r.facts, venv="", host=replace(r.facts.host, software=None)),
        ),
        "spark-2",
        "patchkit cluster install",
    ),
    "nccl": (
        1,
        lambda r: replace(
            r,
            contents=replace(
                r.contents, nccl=LoadedNccl(path="/l", version="2.30.7", sha256="f" * 64)
            ),
        ),
        "spark-1, spark-2",
        "patchkit cluster install",
    ),
    "vllm": (
        0,
        lambda r: replace(
            r, contents=replace(r.contents, versions={**r.contents.versions, "vllm": "0.24.0"})
        ),
        "spark-1, spark-2",
        "patchkit cluster install",
    ),
    "torch": (
        0,
        lambda r: replace(
            r, contents=replace(r.contents, digests={**r.contents.digests, "torch": "f" * 64})
        ),
        "spark-1, spark-2",
        "patchkit cluster install",
    ),
    "model": (
        1,
        lambda r: replace(r, models=(node_reports.model(problem="m.safetensors is missing"),)),
        "spark-2",
        "ssh -t spark-1 'rsync",
    ),
    "model-same": (
        1,
        lambda r: replace(
            r,
            models=(
                node_reports.model(files={"config.json": node_reports.weights(size=9, digest="0")}),
            ),
        ),
        "spark-1, spark-2",
        "spark-2:/home/spark/models/m/",
    ),
    "start": (
        1,
        lambda r: file(r, "group.json", r.placed.id, "0" * 16),
        "spark-2",
        "patchkit up openai/gpt-oss-120b",
    ),
    "edited": (0, lambda r: file(r, "node.env", "# as above", "# and"), "spark-1", "patchkit up"),
    "env-address": (
        1,
        lambda r: file(r, "node.env", '"192.168.100.11"', '"192.168.100.10"'),
        "spark-2",
        "patchkit up",
    ),
    "env-shared": (
        1,
        lambda r: file(r, "node.env", 'MAX_JOBS="4"', 'MAX_JOBS="9"'),
        "spark-2",
        "patchkit up",
    ),
    "flags": (1, lambda r: file(r, UNIT, "--max-num-seqs 64", "--max-num-seqs 9"), "spark-2", "up"),
    "unit-file": (
        1,
        lambda r: replace(r, unit_file=UnitFile(changed=True)),
        "spark-2",
        "daemon-reload",
    ),
    "rank-stopped": (
        1,
        lambda r: replace(r, processes=halted("T")),
        "spark-2",
        "ssh -t spark-2 'kill -CONT 10'",
    ),
    "unit": (1, ended, "spark-2", "patchkit logs --node spark-2"),
    "restarts": (
        0,
        lambda r: replace(r, state=node_reports.state(node_reports.unit(restarts=2), starts=3)),
        "spark-1",
        "patchkit logs",
    ),
}


def test_nodes_that_are_well(well):
    assert wrong(*well) == []


@pytest.mark.parametrize("about", FAULTS)
def test_what_is_wrong_is_found_and_nothing_else(well, about):
    file, nodes = well
    number, change, where, hint = FAULTS[about]
    changed = [change(each) if n == number else each for n, each in enumerate(nodes)]
    (found,) = wrong(file, changed)
    assert (found.about, found.where) == (about, where)
    assert hint in found.hint


def test_a_node_that_does_not_answer(well):
    """One error with ssh's cause; nothing about it counts as looked at."""
    file, (head, _worker) = well
    silence = HostError("spark-2: Connection refused", hint="`sudo systemctl start ssh`")
    found = list(peer_findings(file, [head, NodeReport(node="spark-2", silence=silence)]))
    (error,) = [each for each in found if each.level in WRONG]
    assert (error.about, error.where, error.hint) == ("ssh", "spark-2", silence.hint)
    others = [each for each in found if "spark-2" in each.where and each is not error]
    assert {each.level for each in others} == {Level.UNKNOWN}
    # Every check that is made of a node or of a pair says that it was not.
    own = {"port", "link", "restarts"}  # of the head alone
    assert {*causes_in_order()} - own - {"ssh"} <= {each.about for each in others}


def test_whose_clock_is_wrong(well):
    """Of three it is the odd one, whatever the launcher's own clock says."""
    _file, (head, worker) = well
    third = replace(worker, node="spark-3")
    clocks = zip((head, worker, third), (50.0, 50.1, 0.0), strict=True)
    nodes = [replace(each, clock=ClockOffset(ahead=a, error=0.1)) for each, a in clocks]
    (found,) = [
        each
        for each in peer_findings(_file, nodes)
        if each.about == "clock" and each.level is Level.WARNING
    ]
    assert (found.where, found.what) == ("spark-3", "its clock is 50 s behind spark-1's")


def test_what_is_left_of_a_cluster_that_is_down(well):
    """Processes with the mark, a port that somebody has, another that nobody lets through."""
    file, nodes = well
    down = [ended(each) for each in nodes]
    own = Listener(address="0.0.0.0", port=29501, pid=77, name="python3")
    head = replace(down[0], listeners=(own,))
    (port,) = wrong(file, [head, down[1]])
    assert (port.about, port.hint) == ("port", "ssh -t spark-1 'kill 77'")
    (left,) = wrong(file, [replace(down[0], listeners=()), ended(nodes[1], processes=halted("S"))])
    assert (left.about, left.hint) == ("left-over", "ssh -t spark-2 'kill -KILL 10'")
    error = HostError("spark-1 does not reach spark-2", hint="ssh -t spark-2 'sudo ufw allow'")
    head = replace(down[0], listeners=(), ports_tried=True, blocked=error)
    (between,) = wrong(file, [head, down[1]])
    assert (between.about, between.hint) == ("ports-between", error.hint)


def test_a_server_that_shares_the_port_of_one_that_runs(well):
    file, (head, worker) = well
    other = Listener(address="0.0.0.0", port=8000, pid=77, name="python3")
    head = replace(head, listeners=(*head.listeners, other))
    assert wrong(file, [head, worker]) == []  # elsewhere
    strangers = ("0.0.0.0 port 8000: python3 (process 77)",)
    head = replace(head, state=replace(head.state, strangers=strangers))
    (port,) = wrong(file, [head, worker])
    assert (port.about, port.hint) == ("port", "ssh -t spark-1 'kill 77'")


def test_an_address_of_another_node(well):
    """It is said where the address does not belong, and no way is judged by it."""
    file, (head, worker) = well
    both = worker.facts.host.netdev(worker.ways[0][1].netdev).addresses
    extra = replace(both[0], address=head.address)
    found = wrong(file, [head, netdev(way(worker, plain="silent"), addresses=(*both, extra))])
    assert [(each.about, each.where) for each in found] == [("address-twice", "spark-2")]
    assert "ip address del 192.168.100.10/24" in found[0].hint


HOSTILE = ["", "[]", '{"workers": 3}', '{"workers": {"1": []}}', "[" * 5000, '{"id": [1]}']


@pytest.mark.parametrize("text", HOSTILE)
def test_placed_files_that_somebody_damaged(well, text):
    file, (head, worker) = well
    texts = {**head.facts.files, "group.json": text, UNIT: "ExecStart='", "node.env": text}
    facts = replace(head.facts, files=texts)
    found = wrong(file, [replace(head, facts=facts, placed=placed_files(texts, UNIT)), worker])
    assert "edited" in {each.about for each in found}
