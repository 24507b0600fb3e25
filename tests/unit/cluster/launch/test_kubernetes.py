"""Manifests for Kubernetes: the command and variables of a node's unit, whatever is in them."""

import json
import os
import re
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.cluster.agent.node_facts import model_print
from patchkit.cluster.launch.kubernetes import kubernetes_manifest, plan_pods
from patchkit.errors import UsageError
from patchkit.records import RECIPES
from support.clusters import cluster, node_facts, units_of
from support.manifests import IMAGE, PodGroup
from support.model_server import ModelServer
from unit.runtime.memory.test_plan import KINDS

DATA = Path(__file__).parents[3] / "data" / "manifests"
LARGE = "openai/gpt-oss-120b"
HOME = "/var/cache/patchkit"
VERSIONS = {"vllm": "0.33.0", "triton": "3.6.0", "nccl": "2.30.7"}
HOSTILE = [
    "$(LWS_WORKER_INDEX)",
    "$$(HOST_IP)$",
    'a"b\\',
    "two\nlines\t",
    "\u2028\x7f\x85\ufeff",
    "\U0001f600é",
    "- x: *y # z",
    "yes",
    "",
    "$groups ${home}",
]
SET = {"VLLM_LOGGING_LEVEL": "DEBUG", "EMPTY": "", "HEAD": "192.168.100.10"}
# Facts of the machines that only images with torch have; both plans get the same.
TORCH = {"torch": "", "transformers": ""}


def group(folder, model=LARGE, count=2, machine="cable_port0", groups=1, **serve):
    """Return the pods for nodes that are like one machine."""
    file = replace(cluster("spark-1", **serve), name="vllm").with_image(IMAGE)
    host = node_facts(folder, machine).host
    units = plan_pods(file, host, model, count, **VERSIONS)
    return PodGroup(kubernetes_manifest(units, groups))


def model_folder(folder, size):
    """Make a model's folder with weights of a size in bytes, a file that takes no room."""
    folder.mkdir()
    tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(weights, 8 + len(header) + size)
    (folder / "config.json").write_text(json.dumps(KINDS["llama8b"]["config"]))
    return str(folder)


def unit_texts(folder, model, count, machine, models=(), **serve):
    """Return each node's unit and env file by `patchkit up`, and each node's address."""
    facts = []
    for number in range(count):
        made = node_facts(folder, machine, number, vllm="0.33.0", home=HOME)
        software = replace(made.host.software, **TORCH)
        host = replace(made.host, software=software)
        prints = {name: model_print(name) for name in models}
        facts.append(replace(made, host=host, models=prints))
    names = [f"spark-{number + 1}" for number in range(count)]
    units = units_of(cluster(*names, **serve), facts, model)
    files = [each["patchkit-vllm.service"] for each in units.node_files()]
    return (
        files,
        [rank.text for rank in units.ranks],
        [rank.address for rank in units.ranks],
    )


def unit_variables(unit, env_file):
    """Return the variables that systemd gives a unit."""
    values = {}
    for line in unit.splitlines():
        if line.startswith("Environment=VLLM_CACHE_ROOT"):
            words = line.removeprefix("Environment=").replace("%h", HOME).split()
            values |= dict(word.split("=", 1) for word in words)
    for line in env_file.splitlines():
        if line and line[0] not in "#;":
            name, value = line.split("=", 1)
            values[name] = value.strip('"').replace('\\"', '"')
    return values


@pytest.mark.parametrize(
    ("model", "count", "machine", "serve"),
    [
        ("openai/gpt-oss-20b", 1, "single", {}),
        (LARGE, 2, "cable_port0", {"set": SET}),
        ("Qwen/Qwen3-32B", 4, "cable_port0", {"topology": "socket", "port": 9000}),
        ("/srv/m", 2, "cable_port0", {"args": ("--max-model-len", "4096")}),
    ],
)
def test_a_pod_has_the_command_and_the_variables_of_its_unit(
    model, count, machine, serve, tmp_path
):
    compare_with_units(tmp_path, model, count, machine, **serve)


def test_folders_that_are_here_decide_the_memory(tmp_path):
    """`up` looks at them on the nodes; pods mount the model and the one that drafts."""
    model = model_folder(tmp_path / "model", 16 << 30)
    drafter = model_folder(tmp_path / "drafter", 1 << 30)
    drafting = json.dumps({"method": "eagle3", "model": drafter})
    args = ("--speculative-config", drafting.replace(" ", ""))
    pods = compare_with_units(
        tmp_path, model, 2, "cable_port0", models=(model, drafter), args=args
    )

    assert "--kv-cache-memory-bytes" in pods.command(1)
    for rank in (0, 1):
        mounts = pods.container(rank)["volumeMounts"]
        read = {each["mountPath"] for each in mounts if each.get("readOnly")}
        assert {model, drafter} < read

    # Half a folder is nobody's plan.
    Path(drafter, "model.safetensors").unlink()
    Path(model, "model.safetensors").write_bytes(b"")
    pods = group(tmp_path, model, args=args)
    assert "--kv-cache-memory-bytes" not in pods.command(1)


def compare_with_units(folder, model, count, machine, models=(), **serve):
    """Compare commands and variables of pods with those of units; return the pods."""
    units, env_files, addresses = unit_texts(
        folder, model, count, machine, models, **serve
    )
    pods = group(folder, model, count, machine, **serve)
    assert pods.size == count
    for rank, (unit, env_file) in enumerate(zip(units, env_files, strict=True)):
        address = addresses[rank] or "127.0.0.1"
        where = {"address": address, "leader": addresses[0]}

        (line,) = re.findall("^ExecStart=(.*)$", unit, re.MULTILINE)
        # Only a unit has a guard, which may take a smaller cache for the next start.
        line = line.removesuffix(" $PATCHKIT_SMALLER")
        program, *words = line.replace("%%", "%").split()
        command = pods.command(rank, **where)
        if rank == 0:
            # The unit's server listens on 127.0.0.1: clients of a pod's come from elsewhere.
            words[words.index("--host") + 1] = address
        assert [command[0], *map(json.dumps, command[1:])] == [
            Path(program).name,
            *(word if word[0] == '"' else json.dumps(word) for word in words),
        ]

        variables = pods.variables(rank, **where)
        for name in ("LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX", "HOST_IP", "HOME"):
            del variables[name]
        assert variables.pop("PYTHONFAULTHANDLER") == "1"
        assert variables == unit_variables(unit, env_file)
    return pods


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    return tmp_path_factory.mktemp("machines")


@given(words=st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
@settings(max_examples=30)
def test_every_word_reaches_the_container_as_it_is(words, machines):
    words += HOSTILE
    pods = group(machines, args=("--", *words))
    for rank in (0, 1):
        command = pods.command(rank)
        assert command[command.index("--") + 1 :] == words


@pytest.mark.parametrize(
    "value", [each for each in HOSTILE if each.isprintable() and each]
)
def test_every_value_and_folder_reaches_the_container_as_it_is(value, tmp_path):
    folder = f"/srv/{value}"
    pods = group(tmp_path, folder, set={"PATH_TO": value})
    assert pods.variables(1)["PATH_TO"] == value
    for rank in (0, 1):
        assert pods.command(rank)[2] == folder
        mounts = {each["name"]: each for each in pods.container(rank)["volumeMounts"]}
        volumes = {each["name"]: each for each in pods.pod(rank)["volumes"]}
        assert mounts["model"] == {
            "name": "model",
            "mountPath": folder,
            "readOnly": True,
        }
        assert volumes["model"]["hostPath"] == {"path": folder, "type": "Directory"}


def test_folders_of_the_hub_are_mounted(tmp_path):
    """A snapshot has links to files beside it; HF_HOME is where vLLM downloads to."""
    hub = "/srv/hf/hub/models--a--b"
    pods = group(tmp_path, f"{hub}/snapshots/0123", set={"HF_HOME": "/srv/hf"})
    for rank in (0, 1):
        mounts = {
            each["mountPath"]: each for each in pods.container(rank)["volumeMounts"]
        }
        assert mounts[hub]["readOnly"]
        assert "readOnly" not in mounts["/srv/hf"]
        folders = {each["hostPath"]["path"] for each in pods.pod(rank)["volumes"][2:]}
        assert folders == {HOME, hub, "/srv/hf"}


def test_parts_that_a_machine_has_not_are_left_out(tmp_path):
    """A device plugin's resource without RDMA, or a port for ranks that are not there."""
    rdma = "rdma/hca_shared_devices_a"
    for count, machine, serve, resource, ports in (
        (1, "single", {}, False, [8000]),
        (2, "cable_port0", {}, True, [8000, 29501]),
        (2, "cable_port0", {"topology": "socket", "port": 8001}, False, [8001, 29502]),
    ):
        pods = group(tmp_path, "openai/gpt-oss-20b", count, machine, groups=3, **serve)
        container = pods.container(0)
        assert (rdma in container["resources"]["limits"]) is resource
        assert ("add" in container["securityContext"]["capabilities"]) is resource
        assert [each["containerPort"] for each in container["ports"]] == ports
        assert ("VLLM_HOST_IP" in pods.variables(0)) is (count > 1)
        assert pods.lws["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    ("model", "serve", "says"),
    [
        (LARGE, {"set": {"HF_TOKEN": "hf_abc"}}, "HF_TOKEN"),
        (LARGE, {"set": {"X": "two\nlines"}}, "'\\n'"),
        ("/srv/a\nb", {}, "is not a model"),
    ],
)
def test_what_is_refused(model, serve, says, tmp_path):
    with pytest.raises(UsageError) as raised:
        group(tmp_path, model, 4, **serve)
    assert says in str(raised.value)
    assert "hf_abc" not in f"{raised.value} {raised.value.hint}"


def test_halves_of_a_cable_in_one_network_are_one_machine(tmp_path):
    """The address that stands for a worker's may be the head's other one."""
    host = node_facts(tmp_path).host
    netdevs = []
    for netdev in host.netdevs:
        made = (
            replace(
                each, address=each.address.replace("192.168.101.10", "192.168.100.11")
            )
            for each in netdev.addresses
        )
        netdevs.append(replace(netdev, addresses=tuple(made)))
    host = replace(host, netdevs=tuple(netdevs))
    units = plan_pods(cluster("spark-1").with_image(IMAGE), host, LARGE, 2, **VERSIONS)
    assert "--headless" in units.words(1)


# Schemas


@pytest.fixture
def pods(tmp_path):
    return group(tmp_path, "/srv/m")


@pytest.mark.parametrize("version", ["1.27", "1.31", "1.37"])
def test_kubernetes_schemas_take_every_object(version, pods):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    objects = [each for each in pods.objects if each is not pods.lws]
    for template in pods.templates:
        meta = {**template["metadata"], "name": "x"}
        objects.append(
            {"apiVersion": "v1", "kind": "Pod", **template, "metadata": meta}
        )
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)
    assert len(objects) == 5


def test_leaderworkersets_schema_takes_it(pods):
    jsonschema = pytest.importorskip("jsonschema")
    crd = yaml.safe_load((DATA / "leaderworkerset.crd.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    assert pods.lws["apiVersion"] == f"{crd['spec']['group']}/{version['name']}"
    jsonschema.validate(pods.lws, closed(schema))
    wrong = json.loads(json.dumps(pods.lws))
    wrong["spec"]["leaderWorkerTemplate"]["sice"] = 2
    with pytest.raises(jsonschema.ValidationError, match="sice"):
        jsonschema.validate(wrong, closed(schema))


def closed(schema):
    """Return a schema of a CRD as a server reads it: fields that it does not name are errors."""
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(each) for name, each in schema.items()}
    if "properties" in schema:
        made["properties"] = {
            name: closed(each) for name, each in schema["properties"].items()
        }
        made["additionalProperties"] = False
    return made


# Scripts, run as a kubelet would


def script(pods, folder, name, *arguments, env, seconds=60):
    """Run a script of the manifest; return its status, or None if it goes on, and its output."""
    file = folder / name
    file.write_text(pods.script(name))
    words = [sys.executable, "-I", "-u", str(file), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(words, env={**os.environ, **env}, **pipes)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


@pytest.mark.parametrize(
    ("faults", "key", "code", "says"),
    [
        ({}, "k", 0, ""),
        ({"embeds": True}, "k", 0, ""),
        ({"refuse": (500, {"error": {"message": "dead"}})}, "k", 1, "500"),
        ({}, "other", 1, "401"),
        # A line's end in the key: neither key nor header may be in the events of a pod.
        ({}, "k\n", 1, "no token: ValueError"),
        ({}, "\u043a", 1, "no token: UnicodeEncodeError"),
        ({"listing": 503}, "k", 1, "503"),
    ],
)
def test_a_probe_asks_for_a_token(faults, key, code, says, pods, tmp_path):
    """A server that is healthy and gives no token is not ready; its key is the Secret's."""
    with ModelServer(key="k", **faults) as server:
        port = server.url.rpartition(":")[2]
        env = {
            "HOST_IP": "127.0.0.1",
            "VLLM_API_KEY": key,
            "http_proxy": "http://127.0.0.1:9",
        }
        found, output = script(pods, tmp_path, "ask.py", port, env=env)
    assert (found, says in output) == (code, True), output
    assert "Bearer" not in output


def begin_variables(folder):
    return {"HOME": str(folder), "VLLM_CACHE_ROOT": f"{folder}/models/m/vllm"}


@pytest.mark.parametrize(
    ("ages", "says"),
    [
        ([], ""),
        ([900, 800, 700], ""),
        ([4000, 3000, 2000, 1000], ""),
        ([-50], ""),
        ([5], "1 starts within an hour: waiting 1"),
        ([900, 800, 700, 600], "4 starts within an hour: waiting 2"),
    ],
)
def test_the_fifth_start_of_an_hour_waits(ages, says, pods, tmp_path):
    now = time.time()
    starts = tmp_path / "starts"
    times = "".join(f"{now - age:.0f}\n" for age in ages)
    starts.write_bytes(b"damaged \xff\0 \xc2\xb2\n" + times.encode())
    env = {**begin_variables(tmp_path), "LWS_WORKER_INDEX": "0"}
    code, output = script(
        pods, tmp_path, "begin.py", env=env, seconds=5 if says else 60
    )
    assert (code, output.startswith(says)) == (None if says else 0, True), output
    if not says:
        assert abs(float(starts.read_text().split()[-1]) - now) < 60
        assert Path(env["VLLM_CACHE_ROOT"]).is_dir()


def test_a_node_begins_as_many_pods_as_starts_of_its_unit(pods):
    unit = (RECIPES / "units" / "head.service").read_text()
    limits = re.findall("^(?:StartLimit|Restart).*=(\\d.*)$", unit, re.MULTILINE)
    assert limits == ["1h", "4", "20"]
    assert "LIMIT, HOUR, PAUSE = 4, 3600, 20\n" in pods.script("begin.py")


def test_a_worker_waits_for_its_leaders_name(pods, tmp_path):
    env = {**begin_variables(tmp_path), "LWS_WORKER_INDEX": "1"}
    nobody = {**env, "LWS_LEADER_ADDRESS": "vllm-0.vllm.invalid"}
    code, output = script(pods, tmp_path, "begin.py", env=nobody, seconds=5)
    assert (code, output[:23]) == (None, "waiting for the leader:")
    (tmp_path / "starts").unlink()
    there = {**env, "LWS_LEADER_ADDRESS": "localhost"}
    assert script(pods, tmp_path, "begin.py", env=there) == (0, "")
