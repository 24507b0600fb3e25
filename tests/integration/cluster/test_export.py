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
    return hosts.build(tmp_path, "cable_port0")


def test_a_manifest_of_one_machines_facts(cli, root, tmp_path):
    lws = ("export", "kubernetes", LARGE, "--root", root, "--vllm", "0.33.0", "--image", IMAGE)
    done = cli(*lws, "--nodes", 4, "-o", "vllm.yaml")
    assert done.stdout == (
        f"✓ vllm.yaml created: {LARGE}, 1 x 4 pods, roce\nnext: kubectl apply -f vllm.yaml\n"
    )
    assert "on enp1s0f0np0, as 192.168.100.10" in done.stderr
    group = PodGroup((tmp_path / "vllm.yaml").read_text())
    assert group.size == 4
    assert group.pod(0)["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    assert group.variables(3)["NCCL_IB_HCA"] == "rocep1s0f0,roceP2p1s0f0"
    cli("env", "check", "--elsewhere", "vllm.yaml")
    printed = cli(*lws, "--nodes", 4, "--json").stdout
    objects = list(yaml.safe_load_all((tmp_path / "vllm.yaml").read_text()))
    assert json.loads(printed)["items"] == objects


def test_choices_come_from_the_file(cli, root, tmp_path):
    (tmp_path / "cluster.toml").write_text(
        'name = "big"\nmodel_folder = "/srv/models"\n'
        f'[models]\n"{LARGE}" = "{"a" * 40}"\n'
        '[serve]\nport = 8001\nargs = ["--max-model-len", "4096"]\n'
        'set = {VLLM_LOGGING_LEVEL = "DEBUG"}\n'
        '[[node]]\nssh = "spark-1"\naddress = "10.0.0.10"\n'
    )
    done = cli(
        *("export", "kubernetes", LARGE, "--file", "cluster.toml", "--root", root, "--nodes", 3),
        *("--vllm", "0.33.0", "--image", IMAGE),
    )
    group = PodGroup(done.stdout)
    assert (group.lws["metadata"]["name"], group.size) == ("big", 3)
    words = group.command(0)
    folder = f"/srv/models/openai--gpt-oss-120b@{'a' * 12}"
    assert words[2] == folder
    assert words[-4:] == ["--served-model-name", LARGE, "--max-model-len", "4096"]
    assert group.service["spec"]["ports"][0]["port"] == 8001
    variables = group.variables(1)
    assert variables["VLLM_LOGGING_LEVEL"] == "DEBUG"
    # Control over the LAN, data over the cable.
    assert variables["GLOO_SOCKET_IFNAME"] == "enP7s7"
    assert variables["NCCL_IB_HCA"] == "rocep1s0f0,roceP2p1s0f0"
    volumes = group.pod(1)["volumes"]
    assert folder in [its["hostPath"]["path"] for its in volumes if "hostPath" in its]


def test_a_home_that_nobody_knows(cli, root, tmp_path):
    (tmp_path / "cluster.toml").write_text(
        f'[models]\n"{LARGE}" = "{"a" * 40}"\n[[node]]\nssh = "spark-1"\n'
    )
    asked = ("export", "kubernetes", LARGE, "--file", "cluster.toml", "--root", root)
    assert "is in a home" in cli(*asked, "--vllm", "0.33.0", "--image", IMAGE, rc=2).stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--image", "vllm:latest", "--vllm", "0.33.0"], "its tag can be moved"),
        (["--image", IMAGE], "which vLLM"),
    ],
)
def test_what_is_refused(cli, root, arguments, says):
    done = cli("export", "kubernetes", LARGE, "--root", root, *arguments, rc=(2, 9))
    assert says in done.stderr
    assert done.stdout == ""
