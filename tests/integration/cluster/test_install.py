"""`patchkit cluster install` on two nodes: real sshd, rsync, venv and pip, small real wheels."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from patchkit.durable.lock import locked
from patchkit.wheel.wheelhouse.contents import add
from support.filling import FACTS, OURS, THIS, TORCH
from support.needed import need
from support.ssh_server import obstacle, ssh_server
from support.wheels import HERE, write_wheel

NODES = ("spark-1", "spark-2")
LINK = ".local/share/patchkit/venv"


@pytest.fixture
def house(tmp_path, environment):
    """A filled wheelhouse: a vLLM, an NCCL, and the torch that they need."""
    folder, house = tmp_path / "made", tmp_path / "wheelhouse"
    offered = folder / "offered"
    add(house, write_wheel(folder, "0.25.1", project="vllm", requires=["torch==2.11.0"]), FACTS)
    add(house, write_wheel(folder, OURS), FACTS)
    nccl = ["nvidia-nccl-cu13==2.28.9"]
    write_wheel(offered, "2.11.0", project="torch", tag=HERE, files=TORCH, requires=nccl)
    fill(house, offered, environment)
    return house


def fill(house, offered, environment, release=THIS):
    words = ["wheelhouse", "fill", "--dir", house, "--offline", "--find-links", offered]
    words += ["--python-version", release]
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    done = subprocess.run(
        [sys.executable, "-m", "patchkit", *map(str, words)],
        env={**environment, **alone},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def homes(tmp_path):
    """The home folder of each node."""
    folders = {name: tmp_path / name for name in NODES}
    for each in folders.values():
        each.mkdir()
    return folders


@pytest.fixture
def start(homes, house, environment, tmp_path):
    """Begin `patchkit cluster VERB …`: a process."""
    need("rsync")
    if why := obstacle():
        pytest.skip(why)
    text = "".join(f'[[node]]\nssh = "{name}"\n' for name in NODES)
    (tmp_path / "cluster.toml").write_text(text)
    with ssh_server(tmp_path / "ssh", *NODES, homes=homes) as path:
        env = {**environment, "PATH": path, "XDG_RUNTIME_DIR": str(tmp_path)}

        def run(*words):
            return subprocess.Popen(
                [sys.executable, "-m", "patchkit", "cluster", "install", *map(str, words)],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

        yield run


@pytest.fixture
def install(start):
    """The same, waited for: what it printed."""

    def run(*words, rc=0):
        process = start(*words)
        output, errors = process.communicate(timeout=300)
        assert "Traceback" not in errors, errors
        assert process.returncode == rc, output + errors
        return json.loads(output) if "--json" in words and not rc else output + errors

    return run


def leads(homes, link=LINK):
    return [(home / link).resolve().name for home in homes.values()]


def another(house, tmp_path, environment):
    """Put a later NCCL into the wheelhouse: another installation."""
    add(house, write_wheel(tmp_path / "later", "2.28.9+gb10.def456"), FACTS)
    fill(house, tmp_path / "made/offered", environment)


def test_fresh_again_another_and_back(install, homes, house, environment, tmp_path):
    """Of a fresh start, of nothing to do, of a later wheelhouse, of a way back, and back again."""
    plan = install("--dry-run", "--json")["nodes"]
    assert [len(each["copies"]) for each in plan] == [3, 3]
    assert not any((home / ".local").exists() for home in homes.values())
    fresh = install("--json")
    first = fresh["nodes"][0]["name"]
    assert [each["changed"] for each in fresh["nodes"]] == [True, True]
    assert [(c["node"], c["source"], c["wheels"]) for c in fresh["copies"]] == [
        ("spark-1", "", 3),
        ("spark-2", "spark-1", 3),
    ]
    versions = {"vllm": "0.25.1", "torch": "2.11.0", "nvidia_nccl_cu13": OURS}
    assert fresh["nodes"][1]["versions"] == versions
    assert leads(homes) == [first, first]
    again = install("--json")
    assert (again["copies"], [each["changed"] for each in again["nodes"]]) == ([], [False, False])
    assert "as it is" in install()
    another(house, tmp_path, environment)
    later = install("--json")
    second = later["nodes"][0]["name"]
    assert [each["wheels"] for each in later["copies"]] == [1, 1]
    assert (leads(homes), leads(homes, f"{LINK}.former")) == ([second] * 2, [first] * 2)
    assert "uses" in install("--rollback")
    assert (leads(homes), leads(homes, f"{LINK}.former")) == ([first] * 2, [second] * 2)
    install("--rollback")
    assert leads(homes) == [second] * 2
    (homes["spark-2"] / f"{LINK}.former").unlink()
    said = install("--rollback", rc=9)
    assert "spark-2: has no former installation" in said
    assert leads(homes) == [second] * 2


@pytest.mark.parametrize("place", ["wheelhouse", "venvs"])
def test_killed_in_the_middle_it_goes_on(start, install, homes, place):
    """The launcher is killed while wheels are copied, and while environments are made."""
    process = start()
    there = homes["spark-1"] / ".local/share/patchkit" / place
    while not there.exists() or not any(there.iterdir()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (homes["spark-2"] / LINK).exists()
    name = install("--json")["nodes"][0]["name"]
    assert leads(homes) == [name, name]


def test_what_is_damaged_is_put_right(install, homes):
    """A wheel that came in part, and a file of an installation that was changed."""
    name = install("--json")["nodes"][0]["name"]
    share = homes["spark-2"] / ".local/share/patchkit"
    (module,) = share.glob("venvs/*/lib/python*/site-packages/vllm.txt")
    was = module.read_bytes()
    module.write_text("x")
    (wheel,) = share.glob("wheelhouse/vllm*")
    os.truncate(wheel, 100)
    done = install("--json")
    assert [(each["node"], each["wheels"]) for each in done["copies"]] == [
        ("spark-1", 1),
        ("spark-2", 1),
    ][1:]
    assert module.read_bytes() == was
    assert leads(homes) == [name, name]


def test_a_node_that_differs_is_named_and_nothing_is_switched(
    install, homes, house, environment, tmp_path
):
    first = install("--json")["nodes"][0]["name"]
    another(house, tmp_path, environment)
    # What runs when Python starts there, and lets torch find another library.
    (site,) = homes["spark-2"].glob(".local/share/patchkit/venvs/*/lib/python*/site-packages")
    name = install("--dry-run", "--json")["nodes"][1]["installation"]
    marker = homes["spark-2"] / f".local/share/patchkit/venvs/{name}"
    install("--json")
    install("--rollback")
    found = json.loads((marker / "patchkit-installed.json").read_text())
    found["versions"]["torch"] = "2.12.0"
    found["nccl_sha256"] = "f" * 64
    (marker / "patchkit-installed.json").write_text(json.dumps(found))
    said = install(rc=9)
    assert "nothing was switched" in said
    assert [line.split() for line in said.splitlines() if "torch " in line] == [
        ["torch", "2.11.0", "2.12.0"]
    ]
    assert leads(homes) == [first, first]
    assert site.exists()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_patchkit_did_not_make_stays(install, homes, kind, tmp_path):
    link = homes["spark-2"] / LINK
    link.parent.mkdir(parents=True)
    link.mkdir() if kind == "folder" else link.symlink_to(tmp_path)
    said = install(rc=2)
    assert "spark-2: " in said
    assert "patchkit did not make it" in said
    assert not (homes["spark-1"] / ".local/share/patchkit/venvs").exists()


def test_a_second_launcher_is_told(install, homes):
    folder = homes["spark-1"] / ".config/patchkit/vllm"
    folder.mkdir(parents=True)
    with locked(folder):
        assert "another patchkit is changing the cluster" in install(rc=6)


def test_a_disk_without_room(install, homes, small_disk):
    disk = small_disk("size=20m,mode=755")
    homes["spark-2"].rmdir()
    homes["spark-2"].symlink_to(disk)
    said = install(rc=7)
    assert "spark-2: 0.03 GB are needed" in said
    assert not (homes["spark-1"] / LINK).exists()


def test_another_python_and_an_unfilled_wheelhouse_are_said_before_a_copy(
    install, homes, house, environment, tmp_path
):
    other = "3.12" if THIS != "3.12" else "3.13"
    fill(house, tmp_path / "made/offered", environment, other)
    said = install(rc=9)
    assert f"has Python {THIS}, and the wheels are for {other}" in said
    bare = tmp_path / "bare"
    add(bare, write_wheel(tmp_path, "0.25.1", project="vllm", requires=["torch==2.11.0"]), FACTS)
    said = install("--wheelhouse", bare, rc=2)
    assert f"patchkit wheelhouse fill --dir {bare}" in said
    assert not (homes["spark-1"] / ".local").exists()
