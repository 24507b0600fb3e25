"""Manifests, taken by a real API server of Kubernetes and by its published schemas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from support.kube_api import KubeApi, missing
from support.manifests import OPTIONS, PodGroup, manifest, planned
from tools.golden_manifests import DATA

LARGE = "openai/gpt-oss-120b"
CRD = Path(DATA, "leaderworkerset.crd.yaml")


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    if lacking := missing():
        pytest.skip(f"no {', '.join(lacking)}: nox -s manifests builds and runs them")
    with KubeApi(tmp_path_factory.mktemp("api")) as server:
        server.kubectl("apply", "-f", str(CRD))
        crd = "customresourcedefinition/leaderworkersets.leaderworkerset.x-k8s.io"
        server.kubectl("wait", "--for=condition=established", crd)
        yield server


def _pod(group, rank, name):
    """Return the pod that LWS and a StatefulSet make of a template."""
    template = group.templates[min(rank, 1)]
    spec = json.loads(json.dumps(template["spec"]))
    own = [
        {"name": "LWS_LEADER_ADDRESS", "value": "vllm-0.vllm.default"},
        {"name": "LWS_WORKER_INDEX", "value": str(rank)},
    ]
    for each in (*spec["containers"], *spec["initContainers"]):
        each["env"] = [*own, *each["env"]]
    metadata = {"name": name, "labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _lost(asked, got, where="spec"):
    """Return where an object is not as it was asked for; Kubernetes adds its defaults."""
    if isinstance(asked, dict):
        return [lost for key in asked for lost in _lost(asked[key], got.get(key), f"{where}.{key}")]
    if isinstance(asked, list) and len(asked) == len(got or ()):
        pairs = enumerate(zip(asked, got, strict=True))
        return [lost for number, (a, b) in pairs for lost in _lost(a, b, f"{where}[{number}]")]
    return [] if asked == got else [where]


@pytest.mark.parametrize("nodes", [2, 4])
def test_the_manifest_is_taken_and_kept(api, nodes, tmp_path):
    text = manifest(planned(tmp_path, LARGE, nodes))
    api.kubectl("delete", "--ignore-not-found", "-f", "-", text=text)
    said = api.kubectl("apply", "-f", "-", text=text).stdout
    assert [line.rpartition(" ")[2] for line in said.splitlines()] == ["created"] * 3
    kept = json.loads(api.kubectl("get", "lws", "vllm", "-o", "json").stdout)
    assert kept["spec"] == PodGroup(text).lws["spec"]  # nothing is pruned, nothing has another type
    again = api.kubectl("apply", "-f", "-", text=text).stdout
    assert [line.rpartition(" ")[2] for line in again.splitlines()] == ["unchanged"] * 3


@pytest.mark.parametrize("rdma", ["rdma/hca_shared_devices_a", "host", ""])
def test_kubernetes_takes_the_pods(api, rdma, tmp_path):
    options = replace(OPTIONS, rdma=rdma)
    group = PodGroup(manifest(planned(tmp_path, "/srv/$(id) #x"), options))
    for rank in (0, 1):
        pod = _pod(group, rank, f"rank-{rank}")
        api.kubectl("delete", "--ignore-not-found", "pod", f"rank-{rank}", "--now")
        api.kubectl("create", "-f", "-", text=json.dumps(pod))
        kept = json.loads(api.kubectl("get", "pod", f"rank-{rank}", "-o", "json").stdout)["spec"]
        assert _lost(pod["spec"], kept) == []
        ports = [each.get("hostPort") for each in kept["containers"][0].get("ports", ())]
        assert ports == ([8000, 29501] if rank == 0 else [])  # so that no second one fits there


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("size: 2", 'size: "2"'), "size"),
        (("RecreateGroupOnPodRestart", "Always"), "restartPolicy"),
        (("startupPolicy", "startPolicy"), "startPolicy"),
    ],
)
def test_what_is_wrong_is_refused(api, change, says, tmp_path):
    """Else the tests above could not fail."""
    text = manifest(planned(tmp_path, LARGE))
    assert text.count(change[0]) == 1
    done = api.kubectl("create", "-f", "-", text=text.replace(*change), check=False)
    assert done.returncode, done.stdout
    assert says in done.stderr


@pytest.mark.parametrize("version", ["1.27", "1.33", "1.37"])
@pytest.mark.parametrize("nodes", [2, 4])
def test_pods_are_as_the_published_schemas(version, nodes, tmp_path):
    validator = pytest.importorskip(
        "kubernetes_validate", reason="no kubernetes-validate: nox -s manifests"
    )
    text = manifest(planned(tmp_path, LARGE, nodes))
    group = PodGroup(text)
    others = [each for each in yaml.safe_load_all(text) if each["kind"] != "LeaderWorkerSet"]
    for each in (_pod(group, 0, "leader"), _pod(group, 1, "worker"), *others):
        validator.validate(each, version, strict=True)
    wrong = _pod(group, 0, "leader")
    wrong["spec"]["hostnetwork"] = True
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, version, strict=True)
