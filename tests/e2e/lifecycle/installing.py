"""`patchkit cluster install` on nodes with nothing, cut short, and back; wheels of the fake."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from e2e.emulation.nodes import NodeError
from e2e.lifecycle import fake_venv, image
from e2e.lifecycle.cluster import (
    MODEL,
    OTHER_MODEL,
    URL,
    EmulatedCluster,
    insist,
    scenario,
)
from e2e.lifecycle.fake_vllm import VERSION
from e2e.lifecycle.launching import OPTIONS, kill_launcher
from e2e.lifecycle.rack import ROOT
from patchkit.process import attempt
from patchkit.wheel.wheelhouse.storage import add_wheel
from support import readme

HOUSE = "wheelhouse"
MOMENTS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.5)
UPGRADE = ROOT / "docs" / "upgrade.md"
OPEN_REGISTRY = """\
sed -i '/^auth:/,/path:/d' /etc/docker/registry/config.yml
systemctl start docker-registry
until curl --silent --fail 127.0.0.1:5000/v2/; do sleep 0.2; done
"""
PYTHON = "import sys; print('.'.join(map(str, sys.version_info[:2])))"


@scenario("bare")
def newcomer(cluster: EmulatedCluster) -> str:
    """Nodes with nothing, a wheelhouse, and README's own lines: init, install, up."""
    (cluster.home / "cluster.toml").unlink()
    fill(cluster, HOUSE)
    _paste(cluster, readme.README, readme.TWO)
    insist(cluster.answers(), "up said that it serves, and it does not answer")
    return "from nothing to an answer"


@scenario("bare")
def upgraded(cluster: EmulatedCluster) -> str:
    """docs/upgrade.md's lines with two nodes: 0.25.1 serves, then 0.33.0, then 0.25.1 again."""
    for release in ("0.25.1", "0.33.0"):
        fill(cluster, f"wheelhouse-{release}", release=release)
    cluster.expect("install", "--wheelhouse", "wheelhouse-0.25.1")
    cluster.up()
    served = [_version(cluster)]
    for title in ("Upgrade two Sparks", "Rollback on two Sparks"):
        said = _paste(cluster, UPGRADE, title)
        insist(cluster.answers(), f"{title}: it does not answer")
        insist("patchkit up MODEL" in said, f"{title}: nothing leads on: {said}")
        served.append(_version(cluster))
    insist(served == ["0.25.1", "0.33.0", "0.25.1"], f"served: {served}")
    return f"serves {', then '.join(served)}; each line printed what comes next"


@scenario("bare")
def launcher_killed_in_install(cluster: EmulatedCluster) -> str:
    """`kill -9` of `install` at any moment, then `install` again."""
    fill(cluster, HOUSE)
    count = 0
    for moment in MOMENTS:
        for node in cluster.nodes.values():
            node.user("rm", "-rf", ".local/share/patchkit")
        count += kill_launcher(cluster, moment, "cluster", "install")
        cluster.expect("install")
    cluster.up()
    return f"killed {count} times; install again is whole each time, and it serves"


@scenario("bare", engines=("docker", "podman"))
def image_installed(cluster: EmulatedCluster) -> str:
    """An image that the head alone has: `install` pins it, the worker gets it; `up`, `switch`."""
    image.load(cluster.head, cluster.engine, cluster.archive)
    cluster.describe(engine=cluster.engine, image=image.NAME)
    cluster.expect("install")
    _insist_on_pin(cluster, image.NAME)
    cluster.up()
    cluster.expect("switch", OTHER_MODEL)
    insist(cluster.served() == OTHER_MODEL, "another model is served")
    return "the tag is pinned; saved, copied, loaded; it serves one model, then another"


@scenario("bare", engines=("docker",))
def image_pulled(cluster: EmulatedCluster) -> str:
    """A registry has it: `install` pins what it gives, each node pulls it; `up` without it."""
    cluster.head.root("sh", "-c", OPEN_REGISTRY)
    image.load(cluster.head, cluster.engine, cluster.archive)
    own, pulled = image.NAME, image.PULLED
    for words in (("tag", own, pulled), ("push", pulled), ("rmi", own, pulled)):
        fake_venv.insist_user(cluster.head, cluster.engine, *words)
    cluster.describe(engine=cluster.engine, image=pulled)
    cluster.expect("install")
    _insist_on_pin(cluster, pulled)
    cluster.head.root("systemctl", "stop", "docker-registry")
    cluster.up()
    cluster.expect("install")
    return "pinned by the registry's digest; the same on both nodes; served without the registry"


def _insist_on_pin(cluster: EmulatedCluster, name: str) -> None:
    text = (cluster.home / "cluster.toml").read_text()
    insist(f'image = "{name}@sha256:' in text, f"not pinned: {text}")


def _paste(cluster: EmulatedCluster, page: Path, title: str) -> str:
    """Run a page's lines that are about the cluster; return what they said.

    The lab's nodes and model stand for the page's. ``init`` is told what a Spark's probe says.
    """
    names = {f"spark-{n}": name for n, name in enumerate(cluster.names, 1)}
    said = ""
    for _machine, text in readme.commands(page, title):
        program, *words = shlex.split(text, comments=True)
        if program != "patchkit" or words[0] not in (
            "cluster",
            "up",
            "status",
            "down",
            "switch",
        ):
            continue
        words = words[words[0] == "cluster" :]
        words = [
            MODEL if word.startswith("openai/") else names.get(word, word)
            for word in words
        ]
        said += cluster.expect(*words, *(OPTIONS if words[0] == "init" else ()))
    return said


def _version(cluster: EmulatedCluster) -> str:
    """Return the release that serves, by its own word."""
    ask = ("curl", "--silent", "--fail", f"{URL}/version")
    return str(json.loads(cluster.head.user(*ask).output)["version"])


def fill(cluster: EmulatedCluster, name: str, release: str = VERSION) -> None:
    """Fill a wheelhouse in the laptop's home, for the nodes' Python."""
    python = cluster.head.user("python3", "-c", PYTHON).output.strip()
    made = cluster.folder / f"{name}.wheels"
    house = cluster.folder / name
    vllm, *others = fake_venv.wheels(made, note=name, release=release)
    (made / "offered").mkdir()
    for each in others:
        each.rename(made / "offered" / each.name)
    add_wheel(house, vllm, {"target": "gb10"})
    words = (
        "--dir",
        house,
        "--python-version",
        python,
    )
    filled = attempt(
        *(sys.executable, "-m", "patchkit", "wheelhouse", "fill", *words),
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": str(made / "offered"),
            "PIP_NO_INDEX": "1",
        },
        timeout=120,
    )
    if filled.trouble:
        raise NodeError(f"{name}: {filled.trouble}")
    shutil.copytree(house, Path(cluster.home, name))
