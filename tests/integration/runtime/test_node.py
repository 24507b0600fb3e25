"""Run what a node runs from the wheel and click alone, in an environment of its own."""

import json
import shlex
import sys
from pathlib import Path

import click
import pytest

from patchkit.cli import group
from patchkit.errors import HostError
from support import hosts, run_program, write_files

REPOSITORY = Path(__file__).parents[3]
OF_A_NODE = [
    "check",
    "doctor",
    "env",
    "inspect",
    "net",
    "probe",
    "serve-args",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Install patchkit by the lines that docs/install.md has for nodes."""
    folder = tmp_path_factory.mktemp("node")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", f"--wheel-dir={folder}", str(REPOSITORY))
    (wheel,) = folder.glob("patchkit*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = str(folder / "venv/bin/python")
    run(*pip, f"--python={python}", "install", "--no-deps", str(wheel), "click")
    return (python, "-m", "patchkit")


def run(*command: str, rc: int | None = 0) -> str:
    return run_program(*command, rc=rc, cwd="/").stdout


def test_a_cluster_from_the_wheel_and_click_alone(program, tmp_path):
    head, worker = (hosts.build(tmp_path, "cable_port0", node=node) for node in (0, 1))
    facts = json.loads(run(*program, "probe", "--json", f"--root={head}"))
    assert facts["gpus"][0]["name"] == "NVIDIA GB10"
    env = (*program, "env", "--triton=3.8.0")
    asked = ("--role=head", "--vllm=0.33.0", "--nccl=2.30.7", f"--root={head}")
    run(*env, *asked, f"--output={tmp_path}/head.env")
    text = run(*env, "--role=worker", f"--from={tmp_path}/head.env", f"--root={worker}")
    assert "\nVLLM_HOST_IP=192.168.100.11\n" in text
    assert "NCCL_IB_HCA" in run(*program, "env", "explain")
    assert "no problems" in run(
        *program, "check", "--elsewhere", f"{tmp_path}/head.env"
    )
    serve = (*program, "serve-args", "openai/gpt-oss-120b", f"--root={head}")
    line = run(*serve, f"--from={tmp_path}/head.env")
    assert line.startswith("vllm serve openai/gpt-oss-120b --tensor-parallel-size 2 ")
    log = tmp_path / "vllm.log"
    log.write_text("ModuleNotFoundError: No module named 'ray'\n")
    said = run(*program, "doctor", "--log", log, rc=None)
    assert f"{log}:1" in said.replace("\n", "")
    bare = hosts.build(tmp_path, "ipv6_only")
    assert "192.168.100.10/24" in run(
        *program, "net", "plan", "--role=head", f"--root={bare}"
    )


def test_other_verbs_say_what_brings_their_libraries(program, tmp_path):
    """Before anything else, with a command that works where the wheel was installed from."""
    write_files(tmp_path / "torch", {"__init__.py": "", "version.py": "cuda = None\n"})

    def ask(*words):
        return run_program(
            *program, *words, rc=None, cwd="/", env={"PYTHONPATH": str(tmp_path)}
        )

    verbs = sorted(group.list_commands(click.Context(group)))
    done = {verb: ask(verb, "--help") for verb in verbs}
    assert [verb for verb in verbs if done[verb].returncode == 0] == OF_A_NODE
    done |= {"inspect": ask("inspect", "lib.so"), "doctor": ask("doctor")}
    for verb in {*verbs} - {*OF_A_NODE} | {"inspect", "doctor"}:
        assert done[verb].returncode == HostError.exit_code, verb
        said, why, after = done[verb].stderr.splitlines()
        assert said.startswith(
            "error: not installed: cmake, libcst, lz4, packaging, "
        ), verb
        assert "--no-deps" in why
        command = after.removeprefix("  next: in a clone of patchkit: ")
        assert shlex.split(command) == [program[0], "-m", "pip", "install", "."]
    assert "torch takes none: no library in " in ask("inspect", "--loaded").stdout
