"""What a wheelhouse tells pip, taken by a real pip, and the command line around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv

import pytest

from patchkit.wheel.wheelhouse.contents import add_wheel
from support.wheels import ELSEWHERE, HERE, write_wheel

STOCK, OURS = "2.29.7", "2.29.7+gb10.abc123"
LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
LOCKED = ["--require-hashes", "--no-deps", "--find-links", "wheelhouse"]
LOCKED += ["-r", "wheelhouse/requirements.txt"]


@pytest.fixture
def made(tmp_path):
    return lambda version, **more: write_wheel(tmp_path / "made", version, **more)


@pytest.fixture
def house(tmp_path):
    return tmp_path / "wheelhouse"


@pytest.fixture
def pip(tmp_path):
    """pip for a venv of its own, without an index: ``pip("install", ...)``."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    settings = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}

    def run(*arguments, rc=0):
        offline = ["--no-index"] if arguments[0] == "install" else []
        command = [sys.executable, "-m", "pip", "--python", place / "bin/python", *arguments]
        done = subprocess.run(
            [*map(str, command), *offline],
            cwd=tmp_path,
            env={**settings, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == rc, done.stdout + done.stderr
        return done.stdout + done.stderr

    def installed():
        listed = json.loads(run("list", "--format", "json"))
        return {each["name"]: each["version"] for each in listed}

    run.installed = installed
    run.library = next((place / "lib").glob("python*")) / "site-packages" / LIBRARY
    return run


@pytest.mark.parametrize("form", [pytest.param("*.whl", marks=pytest.mark.e2e), "requirements.txt"])
def test_ours_takes_the_place_of_stock(form, pip, house, made):
    torch = made("2.13.0", project="torch", requires=["nvidia-nccl-cu13==2.29.7"])
    pip("install", made(STOCK), torch)
    add_wheel(house, made(OURS), {})
    assert pip.library.read_text() == f"{STOCK} {HERE}"

    pip("install", *(house.glob("*.whl") if form == "*.whl" else LOCKED))

    assert pip.installed() == {"nvidia-nccl-cu13": OURS, "torch": "2.13.0"}
    assert pip.library.read_text() == f"{OURS} {HERE}"
    assert "No broken requirements found" in pip("check")
    assert "already satisfied" in pip("install", "torch")
    pip("uninstall", "--yes", "nvidia-nccl-cu13")
    # pip leaves the empty folders of a namespace package behind, stock's too.
    assert [path.name for path in pip.library.parents[2].rglob("*")] == ["nccl"]
    assert pip.installed() == {"torch": "2.13.0"}


def test_wheels_for_two_cpus(pip, house, made):
    for tag in (HERE, ELSEWHERE):
        add_wheel(house, made(OURS, tag=tag), {})
    add_wheel(house, made("1.0", project="anywhere", tag="py3-none-any"), {})

    said = pip("install", *LOCKED)

    assert f"Ignoring nvidia-nccl-cu13: markers 'platform_machine == \"{_other()}\"'" in said
    assert pip.installed() == {"anywhere": "1.0", "nvidia-nccl-cu13": OURS}
    assert pip.library.read_text() == f"{OURS} {HERE}"


def _other():
    return ELSEWHERE.removeprefix("py3-none-manylinux_2_17_")


def test_a_changed_wheel_is_not_installed(pip, house, made):
    add_wheel(house, made(OURS), {})
    write_wheel(house, OURS, files={LIBRARY: b"changed"})
    assert "DO NOT MATCH THE HASHES" in pip("install", *LOCKED, rc=1)
    assert pip.installed() == {}


@pytest.mark.parametrize("other", [STOCK, "2.29.7+gb10.def456", "2.30.7", "2.29.7 of another tag"])
def test_what_the_wheelhouse_refuses_pip_cannot_resolve(other, pip, made):
    """The reason for the rule; if a pip learns to choose, the rule may go."""
    version, _, another = other.partition(" of ")
    version = OURS if another else version
    tag = HERE.replace("2_17", "2_5") if another else HERE
    said = pip("install", made(OURS), made(version, tag=tag), rc=1)
    assert "ResolutionImpossible" in said


# The command line


def test_list_verify_prune(cli, house, made):
    facts = {"target": "gb10", "archs": ["12.1a"]}
    place = add_wheel(house, made(OURS), facts)
    add_wheel(house, made("0.25.1", project="vllm"), {})

    shown = cli("wheelhouse", "list").stdout
    _head, *rows, fill = map(str.split, shown.splitlines())
    assert [(*row[:3], row[5]) for row in rows] == [
        ("nvidia-nccl-cu13", OURS, "built", HERE),
        ("vllm", "0.25.1", "built", HERE),
    ]
    assert fill[-4:] == ["wheelhouse", "fill", "--dir", "wheelhouse"]
    listed = json.loads(cli("wheelhouse", "list", "--json").stdout)["wheels"]
    assert [(wheel["filename"], wheel["facts"]) for wheel in listed][:1] == [(place.name, facts)]
    assert "2 wheels, all as listed" in cli("verify").stdout
    assert "nothing to remove" in cli("wheelhouse", "prune").stdout

    write_wheel(house, STOCK)
    found = cli("verify", house, rc=2).stdout
    stock = f"nvidia_nccl_cu13-{STOCK}-{HERE}.whl"
    assert f"✗ {stock}  is not in manifest.json\n" in found
    assert f"✗ {stock}  pip cannot resolve it beside {place.name} (ResolutionImpossible)\n" in found
    # What was built here stays; the other one goes.
    assert f"--drop {stock}\n" in found
    assert f"--drop {place.name}" not in found
    assert "nothing was changed" in cli("wheelhouse", "prune", "--dry-run").stdout
    changes = json.loads(cli("wheelhouse", "prune", "--drop", "vllm", "--json").stdout)["changes"]
    assert [change["reason"] for change in changes] == [
        *("dropped", "not in manifest.json"),
        *["written anew"] * 3,
    ]
    assert "1 wheel, all as listed" in cli("verify").stdout

    place.write_bytes(place.read_bytes()[:-1])
    size = place.stat().st_size
    *_, name, short, unread, hint = cli("verify", rc=8).stdout.splitlines()
    assert (name, hint) == (f"✗ {place.name}", "  next:  build it again")
    assert short.startswith(f"  has {size} bytes, {size + 1} in manifest.json: ")
    assert unread.startswith("  cannot be read: ")
    done = json.loads(cli("verify", "--json", rc=8).stdout)
    assert {each["where"] for each in done["findings"]} == {place.name}
