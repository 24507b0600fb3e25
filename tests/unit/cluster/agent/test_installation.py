"""Let a link lead to an environment that still is what `cluster install` made, to no other."""

import json
from dataclasses import asdict

import pytest

from patchkit.cluster.agent import installation
from patchkit.cluster.agent.installation import (
    MARKER,
    InstalledVenv,
    describe_successor,
    environment_of,
    switch_link,
)
from patchkit.digests import digest
from patchkit.errors import HostError, UsageError
from support import write_files
from support.wheels import record


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An environment with one project, as `cluster install` leaves it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    venv = tmp_path / ".local/share/patchkit/venvs/abc"
    home = write_project(venv, b"one")
    rows = digest(f"vllm {installation.digest_record(home)}")
    made = InstalledVenv(
        name="abc",
        folder=str(venv),
        python="3.12",
        versions={"vllm": "0.25.1"},
        record=rows,
    )
    (venv / MARKER).write_text(json.dumps(asdict(made)))
    return venv


def write_project(venv, code):
    site = venv / "lib/python3.12/site-packages"
    home = "vllm-0.25.1.dist-info"
    members = {"vllm.py": code, f"{home}/METADATA": b"Name: vllm\nVersion: 0.25.1\n"}
    return (
        write_files(site, {**members, f"{home}/RECORD": record(home, members)}) / home
    )


def test_what_was_installed_since_a_start_is_told(place, tmp_path):
    link = tmp_path / "venv"
    switch_link(str(link), "abc")
    assert describe_successor(str(link), str(place)) == ""
    former = place.with_name("def")
    expected = "vLLM 0.25.1 (abc) is installed, and def serves until the next `up`"
    assert describe_successor(str(link), str(former)) == expected
    assert environment_of(link) == place
    assert describe_successor(str(tmp_path / "own"), str(tmp_path / "own")) == ""


def test_a_link_is_switched_to_what_is_whole_and_ours_alone(place, tmp_path):
    link = tmp_path / "venv"
    for given in (str(link), "~/venv"):
        switch_link(given, "abc")
    assert link.resolve() == place
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match="patchkit did not make it"):
        switch_link(str(tmp_path / "other"), "abc")
    # What another pip installed over it, of the same version even.
    write_project(place, b"two")
    with pytest.raises(HostError, match="is not a whole installation"):
        switch_link(str(link), "abc")
