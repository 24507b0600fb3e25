"""`patchkit export` as users run it, on the files of a machine."""

from __future__ import annotations

import json

import pytest
import yaml

from support import hosts
from support.manifests import IMAGE, PodGroup

LARGE = "openai/gpt-oss-120b"


@pytest.fixture
def root(tmp_path):
    pinned = f'[models]\n"{LARGE}" = "{"a" * 40}"\n[[node]]\nssh = "spark-1"\n'
    (tmp_path / "cluster.toml").write_text(pinned)
    return hosts.build(tmp_path, "cable_port0")


def test_a_manifest_of_one_machines_facts(cli, root, tmp_path):
    lws = ("export", "kubernetes", LARGE, "--root", root, "--vllm", "0.33.0", "--image", IMAGE)
    done = cli(*lws, "--nodes", 4, "-o", "vllm.yaml")
    assert f"✓ vllm.yaml created: {LARGE}, 1 x 4 pods, roce\nnext: kubectl" in done.stdout
    assert "on enp1s0f0np0, as 192.168.100.10" in done.stderr
    group = PodGroup((tmp_path / "vllm.yaml").read_text())
    assert group.size == 4
    assert group.pod(0)["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    assert group.variables(3)["NCCL_IB_HCA"] == "rocep1s0f0,roceP2p1s0f0"
    cli("env", "check", "--elsewhere", "vllm.yaml")
    printed = cli(*lws, "--nodes", 4, "--json").stdout
    objects = list(yaml.safe_load_all((tmp_path / "vllm.yaml").read_text()))
    assert json.loads(printed)["items"] == objects


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--image", "vllm:latest", "--vllm", "0.33.0"], "its tag can be moved"),
        (["--image", IMAGE], "which vLLM"),
        (["--file", "cluster.toml", "--vllm", "0.33.0", "--image", IMAGE], "is in a home"),
    ],
)
def test_what_is_refused(cli, root, arguments, says):
    done = cli("export", "kubernetes", LARGE, "--root", root, *arguments, rc=(2, 9))
    assert says in done.stderr
    assert done.stdout == ""
