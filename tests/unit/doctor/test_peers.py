"""Nodes that are well, and each thing that can be wrong with them or between them."""

import json
from dataclasses import replace

import pytest

from patchkit.cluster.agent.node_facts import PeerLink
from patchkit.cluster.agent.processes import Listener, Process
from patchkit.doctor.archive import pack_archive, take_out_names
from patchkit.doctor.cluster_checks import cluster_findings
from patchkit.doctor.examination import Examination
from patchkit.doctor.peers.node_report import NodeReport, placed_files
from patchkit.doctor.peers.software import model_findings
from patchkit.doctor.private_names import private_names
from patchkit.errors import HostError
from patchkit.finding import Level, finding_texts
from patchkit.runtime.host.host import Gpu
from support import clusters, hosts
from support.archives import archive_texts
from support.clusters import image_facts, model, state, unit

WRONG = (Level.ERROR, Level.WARNING)
UNIT = "patchkit-vllm.service"
HEAD, WORKER, BOTH = "spark-1", "spark-2", "spark-1, spark-2"
INSTALL, UP = "patchkit cluster install", "patchkit up openai/gpt-oss-120b"


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    return clusters.reports(tmp_path_factory.mktemp("nodes"))


def wrong(file, nodes):
    return [each for each in cluster_findings(file, nodes) if each.level in WRONG]


def test_a_device_that_nobody_tried_is_told(well):
    gpu = Gpu(name="NVIDIA GeForce RTX 5090", capability="12.0", memory=32607)
    head = well[1][0]
    facts = replace(head.facts, host=replace(head.facts.host, gpus=(gpu,)))
    told = {
        row.about: row
        for row in cluster_findings(well[0], [replace(head, facts=facts)])
    }
    assert told["rtx50"].level is Level.NOTE
    assert "nobody has run patchkit's vLLM on one" in told["rtx50"].what
    assert "rtx50" not in {row.about for row in cluster_findings(well[0], [head])}


def netdev(report, **changes):
    """The report with its cable's interface changed."""
    host = hosts.with_netdev(report.facts.host, report.ways[0][1].netdev, **changes)
    return replace(report, facts=replace(report.facts, host=host))


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


def contents(report, part, **changes):
    """The report with some of what its Python holds changed."""
    values = getattr(report.contents, part) | changes
    return replace(report, contents=replace(report.contents, **{part: values}))


def moved(report):
    """The report of a node that had another address at the last start."""
    env = report.placed.env
    env = replace(env, variables={**env.variables, "VLLM_HOST_IP": "192.168.100.12"})
    return replace(report, placed=replace(report.placed, env=env))


def halted(letter):
    return (Process(pid=10, name="VLLM::Worker_TP1", state=letter),)


def ended(report, *, processes=()):
    return replace(report, state=state(unit("inactive", "dead")), processes=processes)


def without_python(report):
    host = replace(report.facts.host, software=None)
    return replace(
        report, contents=None, facts=replace(report.facts, venv="", host=host)
    )


def other_nccl(report):
    return contents(report, "nccl", vllm=("2.30.7", "f" * 64))


def without_key(report):
    error = {
        "kind": "HostError",
        "what": "spark-2: Permission denied",
        "why": "",
        "hint": "x",
    }
    return replace(report, links=(PeerLink(words=(), error=error),))


# What is changed on which node → the check, whom it names, and what the hint holds.
FAULTS = [
    (
        "disk",
        1,
        lambda r: replace(r, disks=(replace(r.disks[0], free=9),)),
        WORKER,
        "du -xah -d 1",
    ),
    (
        "cable",
        1,
        lambda r: netdev(r, carrier=False, state="down"),
        WORKER,
        "ip link set",
    ),
    (
        "address",
        1,
        lambda r: netdev(r, addresses=()),
        WORKER,
        "ip address add 192.168.100.11/24",
    ),
    ("lanes", 1, lambda r: netdev(r, lanes=2), WORKER, ""),
    ("mtu", 1, lambda r: netdev(r, mtu=1500), WORKER, "mtu 9000"),
    ("route", 0, lambda r: way(r, netdev="wlan0"), HEAD, "ip route get 192.168.100.11"),
    ("way", 0, lambda r: way(r, plain="silent", full="silent"), HEAD, "ping -c 3"),
    ("mtu", 0, lambda r: way(r, full="silent"), HEAD, "-M do -s 8972 192.168.100.11"),
    ("mtu", 0, lambda r: way(r, full="silent"), HEAD, "patchkit net plan --mtu 9000"),
    ("link", 0, without_key, HEAD, "on spark-1: `ssh-copy-id spark-2`"),
    ("python", 1, without_python, WORKER, INSTALL),
    ("nccl", 1, other_nccl, BOTH, INSTALL),
    ("vllm", 0, lambda r: contents(r, "versions", vllm="0.24.0"), BOTH, INSTALL),
    ("torch", 0, lambda r: contents(r, "digests", torch="f" * 64), BOTH, INSTALL),
    (
        "model",
        1,
        lambda r: replace(r, models=(model(problem="x"),)),
        WORKER,
        "spark-1 'rsync",
    ),
    (
        "model-same",
        1,
        lambda r: replace(r, models=(model(digest="0"),)),
        BOTH,
        "spark-2:/home/",
    ),
    ("start", 1, lambda r: file(r, "group.json", r.placed.id, "0" * 16), WORKER, UP),
    ("edited", 1, lambda r: file(r, "node.env", '.11"', '.10"'), WORKER, UP),
    (
        "edited",
        1,
        lambda r: file(r, UNIT, "--max-num-seqs 64", "--max-num-seqs 9"),
        WORKER,
        UP,
    ),
    ("env-address", 1, moved, WORKER, UP),
    (
        "unit-file",
        1,
        lambda r: replace(r, state=state(unit(changed=True))),
        WORKER,
        "reload",
    ),
    (
        "rank-stopped",
        1,
        lambda r: replace(r, processes=halted("T")),
        WORKER,
        "kill -CONT 10",
    ),
    ("unit", 1, ended, WORKER, "patchkit logs --node spark-2"),
    (
        "restarts",
        0,
        lambda r: replace(r, state=state(unit(restarts=2))),
        HEAD,
        "patchkit logs",
    ),
]


@pytest.mark.parametrize(("about", "number", "change", "where", "hint"), FAULTS)
def test_what_is_wrong_is_found_and_nothing_else(
    well, about, number, change, where, hint
):
    file, nodes = well
    changed = [change(each) if n == number else each for n, each in enumerate(nodes)]
    (found,) = wrong(file, changed)
    assert (found.about, found.where) == (about, where)
    assert hint in found.hint


def test_the_cable_is_out_where_the_address_is_gone_too(well):
    """The other half still has a link, and the network lost its end."""
    file, (head, worker) = well
    dark = netdev(worker, carrier=False, state="down", addresses=())
    findings = cluster_findings(file, [head, dark])
    judged = {(row.about, row.level) for row in findings if row.where == WORKER}
    assert judged >= {("cable", Level.ERROR), ("networks", Level.UNKNOWN)}
    assert "half-down" not in {about for about, _level in judged}


@pytest.mark.parametrize(
    ("extra", "addresses"),
    [
        ({"lo": ["192.168.100.250/32"]}, []),
        ({hosts.B0: ["192.168.100.77/24"]}, [("192.168.100.77/24", hosts.B0)]),
        (
            {hosts.A0: ["10.0.0.50/24"], "enP7s7": ["192.168.100.77/24"]},
            [("10.0.0.11/24", "enP7s7"), ("192.168.100.77/24", "enP7s7")],
        ),
    ],
)
def test_the_address_of_the_cluster_stays_in_a_network_with_others(
    well, extra, addresses
):
    file, (head, worker) = well
    host = worker.facts.host
    (one, *_) = host.netdev(hosts.A0).addresses
    for name, texts in extra.items():
        rows = [text.split("/") for text in texts]
        more = [replace(one, address=ip, prefix=int(size)) for ip, size in rows]
        present = host.netdev(name).addresses
        host = hosts.with_netdev(host, name, addresses=(*present, *more))
    env = worker.placed.env
    names = {"NCCL_SOCKET_IFNAME": f"{hosts.A0},{hosts.B0}"}  # as over sockets
    env = replace(env, variables=env.variables | names)
    worker = replace(
        worker,
        facts=replace(worker.facts, host=host),
        placed=replace(worker.placed, env=env),
    )
    rows = wrong(file, [head, worker])
    cures = {row.hint.split(": ")[-1] for row in rows if row.about == "networks"}
    assert cures == {
        f"`ssh -t spark-2 'sudo ip address del {address} dev {name}'`"
        for address, name in addresses
    }


def test_a_node_that_does_not_answer(well):
    """One error with ssh's cause; nothing about it counts as looked at."""
    file, (head, _worker) = well
    silence = HostError(
        "spark-2: Connection refused", hint="`sudo systemctl start ssh`"
    )
    found = cluster_findings(file, [head, NodeReport(node=WORKER, silence=silence)])
    (error,) = [each for each in found if each.level in WRONG]
    assert (error.about, error.where, error.hint) == ("ssh", WORKER, silence.hint)
    others = [each for each in found if WORKER in each.where and each is not error]
    assert {each.level for each in others} == {Level.UNKNOWN}
    # Every check that is made of a node or of a pair says that it was not.
    own = {"port", "port-serves", "link", "restarts", "ssh"}  # of the head alone
    assert {*finding_texts("peers.toml")} - own <= {each.about for each in others}


def test_a_node_without_models_does_not_speak_for_the_next_ones(well):
    file, (head, worker) = well
    silent = {"models": HostError("the disk hangs")}
    head = replace(head, models=None, missing=silent)
    worker = replace(worker, models=())
    found = model_findings(file, [head, worker])
    assert [(each.where, each.what) for each in found] == [
        (HEAD, "not checked: the disk hangs"),
        (
            WORKER,
            "not checked: no model is pinned in cluster.toml, and none was started from a folder",
        ),
    ]


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({}, []),
        ({"content": "d"}, ["images"]),
        ({"id": "", "content": "", "problem": "image-missing"}, ["image-missing"]),
        (
            {"id": "", "content": "", "problem": "engine-refuses", "said": "x"},
            ["engine-refuses"],
        ),
    ],
)
def test_an_image_in_the_place_of_an_environment(well, changes, about):
    file, nodes = well
    file = replace(file, serve=replace(file.serve, image="a/b", engine="podman"))
    served = []
    for each, image in zip(nodes, (image_facts(), image_facts(**changes)), strict=True):
        bare = without_python(each)
        served.append(replace(bare, facts=replace(bare.facts, image=image)))
    assert [each.about for each in wrong(file, served)] == about


def test_what_is_left_of_a_cluster_that_is_down(well):
    """Processes with the mark, a port that somebody has."""
    file, nodes = well
    head, worker = [ended(each) for each in nodes]
    own = Listener(address="0.0.0.0", port=29501, pid=77, name="python3")
    free = replace(head, listeners=())
    for one, other, about, hint in (
        (replace(head, listeners=(own,)), worker, "port", "ssh -t spark-1 'kill 77'"),
        (
            free,
            ended(worker, processes=halted("S")),
            "left-over",
            "spark-2 'kill -KILL 10'",
        ),
    ):
        (found,) = wrong(file, [one, other])
        assert found.about == about
        assert hint in found.hint


def test_what_answers_requests_is_named_and_not_killed_first(well):
    file, (head, worker) = well
    other = Listener(address="127.0.0.1", port=8000, pid=77, name="llama-server")
    head = replace(
        ended(head), listeners=(other,), processes=(), serving="it serves small"
    )
    (found, *_) = [each for each in wrong(file, [head, worker]) if "port" in each.about]
    assert (found.about, "kill" in found.hint) == ("port-serves", False)
    assert (
        "llama-server (process 77), which answers requests: it serves small"
        in found.what
    )
    assert found.hint.startswith("patchkit doctor --port 8001")


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
    extra = replace(both[0], address=head.address, prefix=32)
    found = wrong(
        file, [head, netdev(way(worker, plain="silent"), addresses=(*both, extra))]
    )
    assert [(each.about, each.where) for each in found] == [("address-twice", WORKER)]
    assert "ip address del 192.168.100.10/32" in found[0].hint


@pytest.mark.parametrize("text", ["", "[]", "[" * 5000, '{"id": [1]}'])
def test_placed_files_that_somebody_damaged(well, text):
    file, (head, worker) = well
    texts = {
        **head.facts.files,
        "group.json": text,
        UNIT: "ExecStart='",
        "node.env": text,
    }
    facts = replace(head.facts, files=texts)
    found = wrong(
        file, [replace(head, facts=facts, placed=placed_files(texts, UNIT)), worker]
    )
    assert "edited" in {each.about for each in found}


def test_the_first_cause_stands_first(well):
    """A node without lingering, whose rank is stopped, whose cable is out, and one that is off."""
    file, (head, worker) = well
    failed = state(unit("failed", "failed"))
    worker = replace(worker, state=failed, processes=())
    worker = netdev(worker, carrier=False, state="down")
    worker = replace(worker, facts=replace(worker.facts, linger=False))
    assert [each.about for each in wrong(file, [head, worker])] == [
        "linger",
        "cable",
        "unit",
    ]
    silent = NodeReport(node="spark-2", silence=HostError("spark-2: no route"))
    assert [each.about for each in wrong(file, [head, silent])] == ["ssh"]


def test_a_report_has_all_that_the_nodes_said_and_no_error_breaks_it(well):
    assert wrong(*well) == []
    _, (head, worker) = well
    worker = replace(worker, no_address=HostError("spark-2 has no address"))
    folder = "/srv/models/kunde-7b"
    worker = replace(worker, models=(replace(worker.models[0], folder=folder),))
    line = ("spark-1", f"loads {folder}")
    examination = Examination(findings=(), reports=(head, worker), lines=(line,))
    parts = examination.report_content()
    logs = {"journal": parts.pop("journal")}
    names = private_names(examination.reports)
    # A user may be called as a field is.
    names = replace(names, users=(*names.users, "facts", "findings", "state"))
    packed = pack_archive("report", take_out_names(parts, logs, names), [])
    texts = archive_texts(packed)
    report = json.loads(texts["report.json"])
    for node in report["nodes"]:
        assert all(
            node[part] for part in ("facts", "contents", "state", "disks", "models")
        )
        assert any("VLLM_HOST_IP=" in text for text in node["facts"]["files"].values())
    assert texts["logs/journal.txt"] == "node-1: loads model-2\n"
    assert "kunde" not in "".join(texts.values())
