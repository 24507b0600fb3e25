"""`patchkit check --running`: what a process or a container was really started with."""

import json

import pytest
from click.testing import CliRunner

from patchkit.cli import group
from patchkit.errors import HostError, UsageError
from support import write_files

KEY = "s3cr3t-of-ours"
SERVER = ["vllm", "serve", "a/b", "--gpu-memory-utilization", "0.95", "--api-key", KEY]
VARIABLES = {
    "NCCL_IB_TIMEOUT": "99",
    "HF_TOKEN": f"hf_{'a1B2' * 9}",
    "PATH": "/usr/bin",
}
FOUND = {"value", "gpu-memory-utilization-high", "secret-on-command-line"}


def run(*words):
    return CliRunner().invoke(group, ["check", "--elsewhere", "--running", *words])


def ids(done):
    (server,) = json.loads(done.stdout)["files"]
    return {each["id"] for each in server["findings"]}


@pytest.fixture
def recorded(tmp_path):
    """The processes of a machine: a server, a shell, one that says nothing, one that has ended."""
    for pid, words, variables in (
        (7, ["/opt/bin/python3", "/opt/bin/vllm", *SERVER[1:]], VARIABLES),
        (8, ["bash"], VARIABLES),
        (9, [], {}),
    ):
        pairs = "".join(f"{name}={value}\0" for name, value in variables.items())
        texts = {"cmdline": "".join(f"{word}\0" for word in words)}
        texts["environ"] = pairs.encode() + b"ODD=\xff\0no pair\0"
        write_files(tmp_path / "proc" / str(pid), texts)
    (tmp_path / "proc" / "10").mkdir()
    return tmp_path


@pytest.mark.parametrize("words", [["--root"], ["7", "--root"]])
def test_a_process_is_judged_by_its_environment_and_command_line(recorded, words):
    shown, data = run(*words, str(recorded)), run(*words, str(recorded), "--json")
    assert ids(data) == FOUND
    assert "process 7 (vllm serve)  warning  NCCL_IB_TIMEOUT=99" in shown.stdout
    for done in (shown, data):
        assert done.exit_code == 3
        assert KEY not in done.stdout
        assert "a1B2" not in done.stdout


def test_what_does_not_run_is_told(tmp_path, recorded):
    (tmp_path / "none/proc").mkdir(parents=True)
    for words, kind in (
        (["--root", str(tmp_path / "none")], HostError),
        (["10", "--root", str(recorded)], UsageError),
        (["11", "--root", str(recorded)], UsageError),
        (["no-such-container"], UsageError),
    ):
        with pytest.raises(kind):
            raise run(*words).exception


DOCKER = """#!/bin/sh
asked="inspect --type=container --format={{json .Config}} -- served"
[ "$*" = "$asked" ] || { echo "no such container" >&2; exit 1; }
cat "$0.json"
"""
INSPECTED = {
    "Image": "vllm/vllm-openai:v0.25.1",
    "Entrypoint": None,
    "Cmd": SERVER,
    "Env": [f"{name}={value}" for name, value in VARIABLES.items()]
    + ["NCCL_IB_HCA=rocep1s0f0,roceP2p1s0f0", "VLLM_USE_V1=1"],
    "Labels": {"maintainer.env": "a", "org.image": "b"},
}


def test_a_container_is_judged_by_what_docker_says(tmp_path, monkeypatch):
    write_files(tmp_path, {"docker": DOCKER}, mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "docker.json").write_text(json.dumps(INSPECTED))
    assert ids(run("served", "--json")) == FOUND | {"variable-of-other-release"}
    for answer in ("[]", "no JSON"):
        (tmp_path / "docker.json").write_text(answer)
        assert isinstance(run("served", "--json").exception, HostError)
