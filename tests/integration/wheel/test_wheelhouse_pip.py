"""What a wheelhouse tells pip, taken by a real pip, and the command line around it."""

from __future__ import annotations

import json

import pytest

from patchkit.wheel.wheelhouse.contents import add_wheel
from support.filling import installed
from support.wheels import ELSEWHERE, HERE, OTHER_CPU, write_wheel

STOCK, OURS = "2.29.7", "2.29.7+gb10.abc123"
LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
LOCKED = ["--require-hashes", "--no-deps", "--find-links", "wheelhouse"]
LOCKED += ["-r", "wheelhouse/requirements.txt"]


@pytest.fixture
def made(tmp_path):
    return lambda version, **more: write_wheel(tmp_path / "made", version, **more)


def library(tmp_path):
    return next((tmp_path / "node/lib").glob("python*")) / "site-packages" / LIBRARY


def test_ours_takes_the_place_of_stock(node, house, made, tmp_path):
    torch = made("2.13.0", project="torch", requires=["nvidia-nccl-cu13==2.29.7"])
    node("install", made(STOCK), torch)
    add_wheel(house, made(OURS), {})
    assert library(tmp_path).read_text() == f"{STOCK} {HERE}"

    node("install", *LOCKED)

    assert installed(node) == [f"nvidia-nccl-cu13=={OURS}", "torch==2.13.0"]
    assert library(tmp_path).read_text() == f"{OURS} {HERE}"
    assert "No broken requirements found" in node("check")
    assert "already satisfied" in node("install", "torch")
    node("uninstall", "--yes", "nvidia-nccl-cu13")
    # pip leaves the empty folders of a namespace package behind, stock's too.
    assert [path.name for path in library(tmp_path).parents[2].rglob("*")] == ["nccl"]
    assert installed(node) == ["torch==2.13.0"]

    write_wheel(house, OURS, files={LIBRARY: b"changed"})
    assert "DO NOT MATCH THE HASHES" in node("install", *LOCKED, rc=1)


def test_wheels_for_two_cpus(node, house, made):
    for tag in (HERE, ELSEWHERE):
        add_wheel(house, made(OURS, tag=tag), {})
    add_wheel(house, made("1.0", project="anywhere", tag="py3-none-any"), {})

    said = node("install", *LOCKED)

    assert f"Ignoring nvidia-nccl-cu13: markers 'platform_machine == \"{OTHER_CPU}\"'" in said
    assert installed(node) == ["anywhere==1.0", f"nvidia-nccl-cu13=={OURS}"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("version", "tag"), [(STOCK, HERE), ("2.30.7", HERE), (OURS, HERE.replace("2_17", "2_5"))]
)
def test_what_the_wheelhouse_refuses_pip_cannot_resolve(version, tag, node, made):
    """The reason for the rule; if a pip learns to choose, the rule may go."""
    assert "ResolutionImpossible" in node("install", made(OURS), made(version, tag=tag), rc=1)


# The command line


def test_list_verify_prune(cli, house, made):
    facts = {"target": "gb10", "archs": ["12.1a"]}
    place = add_wheel(house, made(OURS), facts)
    add_wheel(house, made("0.25.1", project="vllm"), {})

    _head, *rows, fill = map(str.split, cli("wheelhouse", "list").stdout.splitlines())
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
    assert f"✗ {stock}  pip cannot resolve it beside {place.name} (ResolutionImpossible)\n" in found
    # What was built here stays; the other one goes.
    assert f"--drop {stock}\n" in found
    assert f"--drop {place.name}" not in found
    assert "nothing was changed" in cli("wheelhouse", "prune", "--dry-run").stdout
    changes = json.loads(cli("wheelhouse", "prune", "--drop", "vllm", "--json").stdout)["changes"]
    assert [change["reason"] for change in changes][:2] == ["dropped", "not in manifest.json"]

    place.write_bytes(place.read_bytes()[:-1])
    *_, name, short, _unread, hint = cli("verify", rc=8).stdout.splitlines()
    assert (name, hint) == (f"✗ {place.name}", "  next:  build it again")
    assert short.endswith(" in manifest.json: it was changed or cut short")
    done = json.loads(cli("verify", "--json", rc=8).stdout)
    assert {each["where"] for each in done["findings"]} == {place.name}
