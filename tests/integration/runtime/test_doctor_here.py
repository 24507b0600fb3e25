"""`patchkit doctor` on this machine, with a real server beside it, and without one."""

from __future__ import annotations

import json
import os

import pytest

from patchkit.finding import Level
from patchkit.runtime.doctor.sense import questions
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


def test_what_was_not_looked_at_is_never_fine(here):
    found = here(9)

    assert found["server-answers"]["level"] == Level.UNKNOWN
    assert found["sense"]["level"] == Level.UNKNOWN
    assert all(each["what"] for each in found.values())


def test_nothing_of_it_needs_rights_or_a_home(cli, tmp_path):
    env = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}

    shown = cli("doctor", rc=(0, 9), env=env).stdout

    assert "not checked" in shown.splitlines()[-1]
