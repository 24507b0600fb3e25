"""`patchkit doctor` on this machine, with a real server beside it, and without one."""

from __future__ import annotations

import json
import os
import socket

import pytest

from patchkit.doctor.questions import questions
from patchkit.finding import Level
from support.model_server import ModelServer


@pytest.fixture
def here(cli, tmp_path):
    """Run doctor on a cluster of this machine alone, whose server listens at a port."""

    def run(port, *options, rc=(0, 9)):
        file = tmp_path / "cluster.toml"
        file.write_text(f'name = "t"\n[[node]]\nssh = "localhost"\n[serve]\nport = {port}\n')
        said = cli("doctor", "--file", file, "--json", *options, rc=rc)
        return {each["about"]: each for each in json.loads(said.stdout)["findings"]}

    return run


def test_a_server_that_answers_and_knows(here):
    right = {each.ask: each.accepts[0] for each in questions()}
    with ModelServer(answers=right) as server:
        found = here(server.server_address[1], "--ask")

    assert found["server-token"]["level"] == Level.OK
    assert found["sense"]["level"] == Level.OK
    assert found["log"]["level"] == Level.UNKNOWN
    assert found["log"]["what"].startswith("not checked: ")


@pytest.mark.parametrize("how", ["--port", "--url"])
def test_a_vllm_that_answers_is_the_server_whoever_started_it(cli, how):
    with ModelServer() as server:
        place = server.server_address[1] if how == "--port" else f"{server.url}/v1/"
        said = json.loads(cli("doctor", how, place, "--json", rc=(0, 9)).stdout)["findings"]
    found = {each["about"]: each for each in said}

    assert found["server-token"]["what"].startswith("small answers")
    assert (found["server-token"]["level"], found["port"]["level"]) == (Level.OK, Level.OK)
    assert str(server.server_address[1]) in found["port"]["what"]


def test_of_one_node_in_a_file_all_is_asked_that_up_needs(cli, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(f'venv = "{tmp_path}/none"\n[[node]]\nssh = "localhost"\n')
    levels = []
    for words in (("--file", file), ("--venv", tmp_path / "none")):
        said = json.loads(cli("doctor", *words, "--json", rc=(0, 9)).stdout)["findings"]
        levels += [each["level"] for each in said if each["about"] == "python"]

    assert levels == [Level.ERROR, Level.NOTE]


def test_what_answers_otherwise_has_the_port(here):
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = here(other.getsockname()[1], rc=9)

    assert found["port"]["level"] == Level.ERROR
    assert found["port"]["hint"] == f"kill {os.getpid()}"


def test_of_a_server_elsewhere_the_server_alone_is_asked(cli):
    said = cli("doctor", "--url", "http://127.0.0.1.invalid:8888", "--json", rc=9).stdout
    found = {each["about"]: each for each in json.loads(said)["findings"]}
    assert {each["where"] for each in found.values()} == {"127.0.0.1.invalid"}
    assert found["server-answers"]["level"] == Level.ERROR


def test_the_key_of_this_machine_goes_to_no_other(cli, tmp_path):
    folder = tmp_path / ".config/patchkit"
    folder.mkdir(parents=True)
    (folder / "secrets.env").write_text("VLLM_API_KEY=not-for-others\n")
    with ModelServer() as server:
        url = f"http://0.0.0.0:{server.server_address[1]}"  # no loopback by its name
        cli("doctor", "--url", url, "--ask", rc=(0, 9), env={"HOME": str(tmp_path)})

    assert server.headers_seen
    assert not any("not-for-others" in str(each) for each in server.headers_seen)


def test_a_password_in_a_url_is_refused_and_not_printed(cli):
    said = cli("doctor", "--url", "http://me:s3cret@127.0.0.1:8000", rc=2)
    assert "s3cret" not in said.stdout + said.stderr
    assert "'127.0.0.1:8000' is not the address of a server" in said.stderr


def test_what_was_not_looked_at_is_never_fine(here):
    found = here(9)

    assert found["server-answers"]["level"] == Level.UNKNOWN
    assert found["sense"]["level"] == Level.UNKNOWN
    assert all(each["what"] for each in found.values())


def test_nothing_of_it_needs_rights_or_a_home(cli, tmp_path):
    env = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}

    shown = cli("doctor", rc=(0, 9), env=env).stdout

    assert "not checked" in shown.splitlines()[-1]
