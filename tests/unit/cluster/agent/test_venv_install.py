"""Check whether an environment still is what `cluster install` check_venv."""

import json
from dataclasses import asdict

import pytest

from patchkit.cluster.agent.venv_install import MARKER, check_venv, read_whole
from support.wheels import record


@pytest.fixture
def place(tmp_path):
    """An environment with one project, as `cluster install` leaves it."""
    venv = tmp_path / "venv"
    install(venv, "0.25.1", b"one")
    made = check_venv(venv, ["vllm"])
    (venv / MARKER).write_text(json.dumps(asdict(made)))
    return venv


def install(venv, version, code):
    site = venv / "lib/python3.11/site-packages"
    home = f"vllm-{version}.dist-info"
    members = {"vllm.py": code, f"{home}/METADATA": f"Name: vllm\nVersion: {version}\n".encode()}
    for name, data in {**members, f"{home}/RECORD": record(home, members)}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)


def test_it_is_whole(place):
    assert read_whole(place).versions == {"vllm": "0.25.1"}


@pytest.mark.parametrize("version", ["0.25.1", "0.25.2"])
def test_what_another_pip_installed_over_it_is_not_it(place, version):
    """Files that are whole, of the same sizes even, but not those that were check_venv."""
    site = place / "lib/python3.11/site-packages"
    (site / "vllm-0.25.1.dist-info/RECORD").unlink()
    (site / "vllm-0.25.1.dist-info/METADATA").unlink()
    (site / "vllm-0.25.1.dist-info").rmdir()
    install(place, version, b"two")
    assert read_whole(place) is None
