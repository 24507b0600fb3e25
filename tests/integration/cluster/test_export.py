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
    done = cli(*lws, "--nodes", 4, "-o", "vllm.yaml", "--node-selector", "site=a")
    assert done.stdout == (
        f"✓ vllm.yaml created: {LARGE}, 1 x 4 pods, roce\nnext: kubectl apply -f vllm.yaml\n"
    )
    assert "on enp1s0f0np0, as 192.168.100.10" in done.stderr
    group = PodGroup((tmp_path / "vllm.yaml").read_text())
    assert group.size == 4
    assert group.pod(0)["nodeSelector"] == {"kubernetes.io/arch": "arm64", "site": "a"}
    assert group.variables(3)["NCCL_IB_HCA"] == "rocep1s0f0,roceP2p1s0f0"
    cli("env", "check", "--elsewhere", "vllm.yaml")
    printed = cli(*lws, "--nodes", 4, "--node-selector", "site=a", "--json").stdout
    objects = list(yaml.safe_load_all((tmp_path / "vllm.yaml").read_text()))
    assert json.loads(printed)["items"] == objects


def test_control_over_the_lan(cli, root):
    done = cli(
        *("export", "lws", LARGE, "--root", root, "--vllm", "0.33.0", "--image", IMAGE),
        *("--head-ip", "10.0.0.10"),  # by the verb's former name
    )
    variables = PodGroup(done.stdout).variables(1)
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_IB_HCA"]) == (
        "enP7s7",
        "rocep1s0f0,roceP2p1s0f0",
    )


def test_choices_come_from_the_file_and_the_command_line(cli, root, tmp_path):
    (tmp_path / "cluster.toml").write_text(
        'name = "big"\nmodel_folder = "/srv/models"\n'
        f'[models]\n"{LARGE}" = "{"a" * 40}"\n'
        '[serve]\nport = 8001\nargs = ["--max-model-len", "4096"]\n[[node]]\nssh = "spark-1"\n'
    )
    done = cli(
        *("export", "kubernetes", LARGE, "--file", "cluster.toml", "--root", root, "--nodes", 3),
        *("--vllm", "0.33.0", "--image", IMAGE, "--set", "VLLM_LOGGING_LEVEL=DEBUG"),
    )
    group = PodGroup(done.stdout)
    assert (group.lws["metadata"]["name"], group.size) == ("big", 3)
    words = group.command(0)
    folder = f"/srv/models/openai--gpt-oss-120b@{'a' * 12}"
    assert words[2] == folder
    assert words[-4:] == ["--served-model-name", LARGE, "--max-model-len", "4096"]
    assert group.service["spec"]["ports"][0]["port"] == 8001
    assert group.variables(0)["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert folder in [
        each["hostPath"]["path"] for each in group.pod(1)["volumes"] if "hostPath" in each
    ]


def test_a_home_that_nobody_knows(cli, root, tmp_path):
    (tmp_path / "cluster.toml").write_text(
        f'[models]\n"{LARGE}" = "{"a" * 40}"\n[[node]]\nssh = "spark-1"\n'
    )
    asked = ("export", "ray", LARGE, "--file", "cluster.toml", "--root", root, "--vllm", "0.33.0")
    assert "is in a home" in cli(*asked, rc=2).stderr


def test_a_job_for_ray(cli, root, tmp_path):
    done = cli("export", "ray", LARGE, "--root", root, "--vllm", "0.33.0", "-o", "job.json")
    assert "-d @job.json http://127.0.0.1:8265/api/jobs/" in done.stdout
    assert "its own VLLM_HOST_IP before `ray start`" in done.stderr
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["entrypoint"].startswith(f"vllm serve {LARGE} --tensor-parallel-size 2 ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--image", "vllm:latest", "--vllm", "0.33.0"], "its tag can be moved"),
        (["--image", IMAGE], "which vLLM"),
        (["--image", IMAGE, "--vllm", "0.33.0", "--set", "HF_TOKEN=hf_x"], "value of a secret"),
        (["--image", IMAGE, "--vllm", "0.33.0", "--node-selector", "x"], "is no label"),
        (["--image", IMAGE, "--vllm", "0.33.0", "--head-ip", "1.2.3.4"], "is not its address here"),
    ],
)
def test_what_is_refused(cli, root, arguments, says):
    done = cli("export", "kubernetes", LARGE, "--root", root, *arguments, rc=(2, 9))
    assert says in done.stderr
    assert done.stdout == ""


def test_a_file_of_somebody_else_stays(cli, root, tmp_path):
    (tmp_path / "job.json").write_text("mine\n")
    asked = ("export", "ray", LARGE, "--root", root, "--vllm", "0.33.0", "-o", "job.json")
    assert "--force replaces it" in cli(*asked, rc=2).stderr
    assert (tmp_path / "job.json").read_text() == "mine\n"
    cli(*asked, "--force")
    cli(*asked)  # the same again
