"""`patchkit export kubernetes` as users run it, and its manifest before a real API server."""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from support import hosts
from support.manifests import IMAGE, PodGroup
from support.needed import need

DATA = Path(__file__).parents[2] / "data" / "manifests"
LARGE = "openai/gpt-oss-120b"
FILE = """
name = "llm"
model_folder = "/srv/models"
[serve]
listen = "lan"
port = 9000
args = ["--max-model-len", "4096"]
set = { VLLM_LOGGING_LEVEL = "DEBUG" }
[models]
"openai/gpt-oss-120b" = "0123456789abcdef0123456789abcdef01234567"
[[node]]
ssh = "spark-1"
"""


@pytest.fixture
def export(cli, tmp_path):
    root = hosts.build(tmp_path, "cable_port0")
    words = ("export", "kubernetes", LARGE, "--root", root, "--nodes", 2, "--groups", 3)

    def run(*more, rc=0):
        return cli(*words, *more, rc=rc)

    return run


def test_the_choices_of_a_cluster_file_are_in_it(export, cli, tmp_path):
    (tmp_path / "cluster.toml").write_text(FILE)
    (tmp_path / "lock.txt").write_text("vllm==0.33.0\nnvidia-nccl-cu13==2.30.7\n")
    versions = ("--lock", "lock.txt", "--image", IMAGE)
    done = export("--file", "cluster.toml", *versions)
    (tmp_path / "vllm.yaml").write_text(done.stdout)

    group = PodGroup(done.stdout)
    folder = "/srv/models/openai--gpt-oss-120b@0123456789ab"
    assert (group.lws["metadata"]["name"], group.size) == ("llm", 2)
    assert group.lws["spec"]["replicas"] == 3
    assert group.command(0)[:3] == ["vllm", "serve", folder]
    tail = ["--served-model-name", LARGE, "--max-model-len", "4096"]
    assert group.command(0)[-4:] == group.command(1)[-4:] == tail
    assert group.variables(1)["VLLM_LOGGING_LEVEL"] == "DEBUG"
    # Not the file's: a server listens at its node's address.
    assert group.command(0, address="10.1.2.3").count("10.1.2.3") == 1
    assert "the version of triton is unknown (--lock" in done.stderr
    assert "the version of nccl" not in done.stderr

    cli("check", "--elsewhere", "vllm.yaml")
    printed = export("--file", "cluster.toml", *versions, "--json").stdout
    assert json.loads(printed)["manifest"] == done.stdout


@pytest.mark.parametrize(
    ("options", "rc", "says"),
    [
        (("--image", IMAGE, "--vllm", "0.33.0"), 0, "triton and nccl is unknown"),
        (("--image", "vllm:latest", "--vllm", "0.33.0"), 2, "is not NAME@sha256:HEX"),
        (("--image", "", "--vllm", "0.33.0"), 2, "is not NAME@sha256:HEX"),
        (
            ("--image", f"a b@sha256:{'ab' * 32}", "--vllm", "0.33.0"),
            2,
            "is not NAME@sha256:HEX",
        ),
        (("--image", IMAGE), 2, "which vLLM the image has"),
        (("--image", IMAGE, "--vllm", "0.10.2"), 2, "take a later vLLM"),
    ],
)
def test_what_is_said_and_refused(options, rc, says, export):
    done = export(*options, rc=rc)
    assert says in done.stderr
    assert bool(done.stdout) is (rc == 0)


@pytest.mark.parametrize(
    "line",
    [
        'set = { HTTPS_PROXY = "http://user:geheim@proxy:3128" }',
        'args = ["--model-loader-extra-config", \'{"api_key": "geheim"}\']',
    ],
)
def test_no_secret_gets_into_a_manifest(line, export, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(f'[serve]\n{line}\n[[node]]\nssh = "spark-1"\n')
    done = export("--image", IMAGE, "--vllm", "0.33.0", "--file", file, rc=2)
    assert "a secret would be in the manifest" in done.stderr
    assert "geheim" not in done.stdout + done.stderr


def test_no_pods_by_ray(export, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('[serve]\nexecutor = "ray"\n[[node]]\nssh = "spark-1"\n')
    done = export("--image", IMAGE, "--vllm", "0.33.0", "--file", file, rc=2)
    assert "patchkit starts no Ray" in done.stderr
    assert "patchkit env --executor ray" in done.stderr


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """Start etcd and an API server on loopback; yield a function that asks it, as an admin."""
    need("openssl")
    for program in ("kube-apiserver", "etcd"):
        if not shutil.which(program):
            pytest.skip(f"{program} is not on PATH: no real API server here")

    folder = tmp_path_factory.mktemp("api")
    key = folder / "key.pem"
    subprocess.run(["openssl", "genrsa", "-out", key], check=True, capture_output=True)
    (folder / "tokens").write_text("secret,admin,admin,system:masters\n")
    client, peer, secure = free_ports(3)
    etcd = [
        "etcd",
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls=http://127.0.0.1:{client}",
        f"--advertise-client-urls=http://127.0.0.1:{client}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-cluster=default=http://127.0.0.1:{peer}",
    ]
    server = [
        "kube-apiserver",
        f"--etcd-servers=http://127.0.0.1:{client}",
        f"--cert-dir={folder}",
        "--bind-address=127.0.0.1",
        f"--secure-port={secure}",
        f"--token-auth-file={folder / 'tokens'}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://localhost",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--disable-admission-plugins=ServiceAccount",
    ]
    trusted = ssl._create_unverified_context()
    handlers = (
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=trusted),
    )
    opener = urllib.request.build_opener(*handlers)

    def ask(path, value=None):
        data = None if value is None else json.dumps(value).encode()
        headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        url = f"https://127.0.0.1:{secure}{path}"
        request = urllib.request.Request(url, data, headers)
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)

    place = folder / "log"
    with place.open("w") as log:
        streams = {"stdout": log, "stderr": log}
        started = [subprocess.Popen(words, **streams) for words in (etcd, server)]
        try:
            wait_for(lambda: ask("/api/v1/namespaces/default"), started[1], place)
            yield ask
        finally:
            for process in reversed(started):
                process.kill()
                process.wait()


def wait_for(question, server, log):
    for _ in range(300):
        assert server.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            return question()
        time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def test_a_real_api_server_takes_it_and_keeps_it(api, export):
    """Pods of both templates are created as well, as LeaderWorkerSet's controller does."""
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    api(crds, yaml.safe_load((DATA / "leaderworkerset.crd.yaml").read_text()))
    sets = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/default/leaderworkersets"
    for _ in range(60):
        with contextlib.suppress(urllib.error.HTTPError):
            api(sets)
            break
        time.sleep(1)  # until the server knows the new kind

    group = PodGroup(export("--image", IMAGE, "--vllm", "0.33.0").stdout)
    paths = {
        "ConfigMap": "/api/v1/namespaces/default/configmaps",
        "Service": "/api/v1/namespaces/default/services",
        "LeaderWorkerSet": sets,
    }
    for each in group.objects:
        path = paths[each["kind"]]
        api(path, each)
        kept = api(f"{path}/{each['metadata']['name']}")
        assert lost(each, kept) == []

    for number, template in enumerate(group.templates):
        meta = {**template["metadata"], "name": f"pod-{number}"}
        pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": meta}
        api("/api/v1/namespaces/default/pods", pod)
        assert lost(pod, api(f"/api/v1/namespaces/default/pods/pod-{number}")) == []


def lost(sent, kept, at=""):
    """Return the paths of what a server did not keep as it was sent; it may add fields."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [
            path
            for key in sent
            for path in lost(sent[key], kept.get(key), f"{at}.{key}")
        ]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) <= len(kept):
        pairs = enumerate(zip(sent, kept, strict=False))
        return [
            path for number, pair in pairs for path in lost(*pair, f"{at}[{number}]")
        ]
    # The server writes quantities, such as numbers of devices, as texts.
    return [] if str(sent) == str(kept) else [f"{at}: {sent!r} became {kept!r}"]
