"""`patchkit doctor` on this machine, with a real server beside it, and without one."""

import json
import os
import shutil
import socket

import pytest

from patchkit.finding import Level
from support.model_server import ModelServer
from support.needed import need


@pytest.fixture
def here(cli):
    """Run doctor on this machine, whose server listens at a port; return what it found."""

    def run(*options, rc=(0, 9)):
        said = cli("doctor", *options, "--json", rc=rc)
        return {each["about"]: each for each in json.loads(said.stdout)["findings"]}

    return run


def test_a_vllm_that_answers_is_the_server_whoever_started_it(here):
    with ModelServer() as server:
        port = server.server_address[1]
        found = here("--port", port)

    assert found["server-token"]["what"].startswith("small answers")
    seen = Level.OK if shutil.which("ss") else Level.UNKNOWN
    assert (found["server-token"]["level"], found["port"]["level"]) == (Level.OK, seen)
    assert (str(port) if seen is Level.OK else "ss is not installed") in found["port"]["what"]
    assert found["log"]["level"] == Level.UNKNOWN
    assert found["log"]["what"].startswith("not checked: ")


def test_of_one_node_in_a_file_all_is_asked_that_up_needs(here, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(f'venv = "{tmp_path}/none"\n[[node]]\nssh = "localhost"\n')
    assert here("--file", file)["python"]["level"] == Level.ERROR
    assert here("--venv", tmp_path / "none")["python"]["level"] == Level.NOTE


def test_what_answers_otherwise_has_the_port_and_is_never_fine(here):
    need("ss")
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = here("--port", other.getsockname()[1], rc=9)

    assert found["port"]["level"] == Level.ERROR
    assert found["port"]["hint"] == f"kill {os.getpid()}"
    assert found["server-health-silent"]["level"] == Level.ERROR
