"""Check what RDMA and threads need of a container of vLLM, and that nothing is said of others."""

import pytest

from patchkit.finding import Level
from patchkit.measure.image.run_lines import run_lines
from patchkit.quoting import quoted
from patchkit.runtime.lint.check import check

IMAGE, HCA = "vllm/vllm-openai:v0.25.1", "-e NCCL_IB_HCA=rocep1s0f0,roceP2p1s0f0"
DEVICE, LOCK, NET = "--device /dev/infiniband", "--ulimit memlock=-1", "--network host"
ADDED = {
    "--device=/dev/infiniband": "has no RDMA device",
    "--ulimit=memlock=-1": "how much memory it may lock",
    "--network=host": "a network of its own",
    "--pids-limit=-1": "2048 processes",
}


def lacking(text, where="run.sh"):
    found = check(text, where, {"vllm": "0.25.1"})
    known = (*ADDED.values(),)
    ours = [each for each in found if any(words in each.what for words in known)]
    assert {each.level for each in ours} <= {Level.WARNING}
    return [each.hint.removeprefix("add ") for each in ours]


@pytest.mark.parametrize(
    ("options", "lacks"),
    [
        (
            f"docker run {HCA}",
            ["--device=/dev/infiniband", "--ulimit=memlock=-1", "--network=host"],
        ),
        (f"docker run {HCA} {DEVICE} {NET}", ["--ulimit=memlock=-1"]),
        (f"docker run {HCA} {DEVICE} --cap-add IPC_LOCK --net=host", []),
        (f"docker run {HCA} -v /dev/infiniband:/dev/infiniband {LOCK} {NET}", []),
        (f"docker run --privileged {HCA} {NET}", []),
        (f"docker run {DEVICE} {NET}", ["--ulimit=memlock=-1"]),
        (f"docker run $MORE {HCA}", []),  # what stands there may be all of it
        (f"docker run --device $RDMA {HCA} {LOCK} {NET}", []),
        (f"docker run {HCA} -e NCCL_IB_DISABLE=1", []),
        ("docker run", []),
        (f"sudo docker compose run {HCA}", []),
        ("podman run", ["--pids-limit=-1"]),
        ("podman run --pids-limit=-1", []),
        (f"podman run --pids-limit 4096 {HCA} {DEVICE} {LOCK}", ["--network=host"]),
    ],
)
@pytest.mark.parametrize(
    "inside",
    [f"{IMAGE} --model org/one", f"{IMAGE} vllm serve org/one", f"{IMAGE} bash -c 'vllm serve x'"],
)
def test_what_a_container_of_vllm_lacks(options, inside, lacks):
    assert lacking(f"{options} {inside}\n") == lacks


def test_other_containers_may_be_started_as_they_like():
    assert lacking("podman run docker.io/grafana/grafana:11.0\n") == []
    assert lacking(f"docker run {HCA} ubuntu:24.04 ib_write_bw\n") == []


HOST = "    network_mode: host\n"
COMPOSE = """\
services:
  served:
    image: {image}
{more}
    environment: {{NCCL_IB_HCA: "rocep1s0f0,roceP2p1s0f0"}}
    command: ["--model", "org/one"]
"""


@pytest.mark.parametrize(
    ("more", "lacks"),
    [
        (
            "    shm_size: 16g",
            ["devices: [/dev/infiniband]", "ulimits: {memlock: -1}", "network_mode: host"],
        ),
        (
            f"    devices: ['/dev/infiniband']\n{HOST}    ulimits: {{memlock: {{soft: -1}}}}",
            [],
        ),
        ("    privileged: true\n" + HOST, []),
        (
            "    privileged: false\n    network_mode: host\n    cap_add: [IPC_LOCK]",
            ["devices: [/dev/infiniband]"],
        ),
        ("    extends: {file: base.yaml, service: base}", []),
    ],
)
def test_a_service_of_compose(more, lacks):
    assert lacking(COMPOSE.format(image=IMAGE, more=more), "compose.yaml") == lacks


def test_the_lines_that_export_prints_lack_nothing():
    for words in run_lines():
        line = quoted(*words[:2], *HCA.split(), *words[2:]).replace("vllm-wheelhouse", IMAGE)
        assert lacking(f"{line}\n") == []
        # and each part of them is needed
        assert lacking(f"{line}\n".replace("/dev/infiniband", "/dev/null")) == [
            "--device=/dev/infiniband"
        ]
