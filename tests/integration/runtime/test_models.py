"""`patchkit model` with a real huggingface_hub, rsync and sshd; the Hub is a small real server."""

import json
import os
import re
import subprocess
import sys
import venv

import pytest

from patchkit.cluster.models.model_files import ModelFolder
from patchkit.cluster.models.sync import (
    ModelNode,
    find_holders,
    find_source,
    models_of,
    sync_model,
)
from patchkit.errors import HashMismatchError, HostError, SourceError
from support.hub import CHOSEN, COMMIT, MODEL, SHARDS, HubServer, safetensors
from support.needed import need
from support.ssh_server import obstacle, ssh_server

# That of transformers 4, with which the first releases came, and the newest.
OLDEST, NEWEST = "0.36.2", "2.4.0"
SIZE = sum(len(MODEL[name]) for name in CHOSEN)
FOLDER = ModelFolder(repo="org/small", commit=COMMIT).name


@pytest.fixture(
    scope="module", params=[pytest.param(OLDEST, marks=pytest.mark.e2e), NEWEST]
)
def python(request, tmp_path_factory):
    """The Python of an environment with a real huggingface_hub."""
    python = tmp_path_factory.mktemp("venv") / "bin/python"
    venv.create(python.parents[1])
    pip = [sys.executable, "-m", "pip", "--python", python]
    words = [*pip, "install", "-q", "--no-compile", f"huggingface_hub=={request.param}"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {request.param}: {done.stderr.strip()[-300:]}")
    return python


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def model(cli, hub, tmp_path):
    """`patchkit model VERB …` with the Hub and a home of the test's own."""
    home = {
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.url,
    }
    home |= dict.fromkeys(("http_proxy", "HTTP_PROXY", "HF_TOKEN", "HF_HUB_CACHE"), "")

    def run(verb, *arguments, env=None, **options):
        return cli("model", verb, *arguments, env={**home, **(env or {})}, **options)

    return run


def test_get_fetches_what_is_loaded_and_nothing_twice(model, hub, python, tmp_path):
    get = ("get", "org/small@main", "--venv", python.parents[1], "--json")
    plan = json.loads(model(*get, "--dry-run").stdout)["plan"]
    assert (plan["files"], plan["size"], plan["left"]) == (5, SIZE, SIZE)
    assert not (tmp_path / "models").exists()
    done = json.loads(model(*get).stdout)
    assert (done["check"]["complete"], done["check"]["full"]) == (True, True)
    folder = tmp_path / "models" / FOLDER
    names = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
    }
    assert names == {name: MODEL[name] for name in CHOSEN}
    hub.asked.clear()
    again = json.loads(model(*get).stdout)
    assert again["plan"]["left"] == 0
    assert not [line for line in hub.asked if re.match("GET /org/.*safetensors ", line)]
    assert json.loads(model("list", "--json").stdout)["nodes"][0]["models"][0][
        "complete"
    ]


def rot(place):
    """Change the last byte of a file, whose time and size stay; return its bytes."""
    kept, data = place.stat(), bytearray(place.read_bytes())
    data[-1] ^= 1
    place.write_bytes(data)
    os.utime(place, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    return data


@pytest.mark.e2e
def test_get_goes_on_where_it_was_and_repairs_what_is_damaged(
    model, hub, python, tmp_path
):
    """A connection that breaks, a file that was cut off, and one with another byte."""
    folder = tmp_path / "models" / FOLDER
    get = ("get", "org/small", "--venv", python.parents[1])
    # hf writes 10 MiB at once.
    hub.repos["org/small"] = files = {**MODEL, SHARDS[1]: safetensors(2, 25 << 20)}
    hub.cut = 21 << 20
    model(*get, rc=(0, 7))
    model(*get)
    assert [line for line in hub.asked if "bytes=" in line]
    # As a killed one leaves it since huggingface_hub 1.18, which never goes on with it.
    part = folder / f".cache/huggingface/download/AbC=.{'e' * 64}.0123abcd.incomplete"
    part.write_bytes(b"lost")
    os.truncate(folder / SHARDS[0], 100)
    model(*get)
    rot(folder / SHARDS[1])
    said = model(*get, rc=8).stdout
    assert f"{SHARDS[1]}  hash: has the hash" in said
    assert f"model get org/small@{COMMIT}" in said
    model(*get)
    assert all((folder / name).read_bytes() == files[name] for name in CHOSEN)
    assert not part.exists()


@pytest.mark.e2e
def test_what_the_hub_and_this_machine_do_not_have_is_said(
    model, hub, python, tmp_path, small_disk
):
    """In the words of huggingface_hub, which differ from release to release."""
    venv = ("--venv", python.parents[1])
    said = model("get", "org/none", *venv, rc=3).stderr
    assert "org/none: 404 Client Error." in said
    assert f"`{python.parent}/hf auth login`" in said
    assert "org/small@v9: 404" in model("get", "org/small@v9", *venv, rc=3).stderr
    hub.repos["org/hostile"] = {
        "model.safetensors": safetensors(1),
        "../../x.json": b"{}",
    }
    said = model("get", "org/hostile", *venv, rc=3).stderr
    assert "'../../x.json', which is no plain name" in said
    said = model("get", "org/small", "--venv", sys.prefix, rc=9).stderr
    assert "there is no huggingface_hub" in said
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    said = model("get", "org/small", *venv, rc=7, env=nobody).stderr
    assert "next: look at the network there" in said
    disk = small_disk("size=10k")
    said = model("get", "org/small", *venv, rc=7, env={"HOME": str(disk)}).stderr
    assert re.search(r"needs [\d,]+ bytes, and [\d,]+ are free", said)
    assert not list(disk.iterdir())
    assert not (tmp_path / "models").exists()


def test_a_token_is_used_and_never_shown(model, hub, python, tmp_path):
    hub.token = "hf_" + "s" * 34
    said = model("get", "org/small", "--venv", python.parents[1], rc=3).stderr
    assert "Access to this model is restricted" in said
    assert "agree at https://huggingface.co/org/small" in said
    words = ("get", "org/small", "--venv", python.parents[1], "--json")
    done = model(*words, env={"HF_TOKEN": hub.token})
    assert hub.token not in done.stdout + done.stderr
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(hub.token.encode() in data for data in written)


@pytest.fixture(params=["localhost", pytest.param("spark-1", marks=pytest.mark.e2e)])
def nodes(tmp_path, monkeypatch, model, python, request):
    """Two nodes, the first of which has the model: this machine, or one that ssh reaches."""
    need("rsync")
    if reason := obstacle():
        pytest.skip(reason)
    model("get", "org/small", "--venv", python.parents[1])
    with ssh_server(tmp_path / "ssh", "spark-1", "spark-2", "cable-2") as path:
        monkeypatch.setenv("PATH", path)
        yield (
            ModelNode(
                ssh=request.param, peer="spark-1", models=str(tmp_path / "models")
            ),
            ModelNode(ssh="spark-2", peer="cable-2", models=str(tmp_path / "a b'$(c)")),
        )


def silent(_task):
    return lambda _done, _total: None


@pytest.mark.e2e
def test_sync_copies_checks_and_goes_on(nodes, tmp_path):
    source, model, _rotten = find_source(whole(nodes), "org/small", silent)
    assert source is nodes[0]
    first = sync_model(source, model, nodes[1], silent)
    there = tmp_path / "a b'$(c)" / FOLDER
    assert (first.exit_code, first.complete, first.full, first.folder) == (
        0,
        True,
        True,
        str(there),
    )
    assert first.sent.sent >= SIZE
    assert {path.name for path in there.iterdir()} == {*CHOSEN, ".cache"}
    assert sync_model(source, model, nodes[1], silent).sent.sent == 0
    # As an interrupt of an older patchkit leaves it: a part under the file's own name.
    os.truncate(there / SHARDS[1], 4000)
    assert models_of(nodes)[1][0].exit_code
    assert not sync_model(source, model, nodes[1], silent).exit_code
    # The same size and time, other bytes: rsync alone would keep them.
    rot(there / SHARDS[1])
    again = sync_model(source, model, nodes[1], silent)
    assert (again.exit_code, again.sent.sent) == (0, len(MODEL[SHARDS[1]]))


@pytest.mark.e2e
def test_sync_refuses_what_is_not_whole_and_names_what_is_missing(nodes, tmp_path):
    source, model, _rotten = find_source(whole(nodes), "org/small", silent)
    unknown = ModelNode(ssh="spark-2", peer="no-such-host", models=nodes[1].models)
    with pytest.raises(HostError, match="no-such-host") as refused:
        sync_model(source, model, unknown, silent)
    advice = "`ssh -t no-such-host 'rsync -V'`"
    assert (
        advice if source.ssh == "localhost" else "ssh spark-1"
    ) in refused.value.hint
    rot(tmp_path / "models" / FOLDER / SHARDS[0])
    with pytest.raises(HashMismatchError, match=f"{SHARDS[0]}: has the hash"):
        find_source(whole(nodes), "org/small", silent)
    (tmp_path / "models" / FOLDER / SHARDS[0]).unlink()
    with pytest.raises(SourceError, match="no node has the whole model"):
        whole(nodes)


def whole(nodes):
    return find_holders(nodes, models_of(nodes), "org/small", COMMIT[:12])


CLUSTER = """\
# ours
venv = "{venv}"
model_folder = "{models}"

[[node]]
ssh = "localhost"  # the head
peer = "spark-1"

[[node]]
ssh = "spark-2"
peer = "cable-2"
"""


@pytest.mark.e2e
def test_the_verbs_over_a_cluster_file(cli, hub, python, tmp_path):
    """Two names of one machine: each sees the same folder."""
    need("rsync")
    if reason := obstacle():
        pytest.skip(reason)
    models = tmp_path / "models"
    file = tmp_path / "cluster.toml"
    file.write_text(text := CLUSTER.format(models=models, venv=python.parents[1]))
    with ssh_server(tmp_path / "ssh", "spark-1", "spark-2", "cable-2") as path:
        env = {"PATH": path, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        shown = cli("model", "list", env=env).stdout
        assert shown.count(f"no models in {models}") == 2
        shown = cli("model", "get", "org/small", env=env).stdout
        assert f"cluster.toml pins org/small to {COMMIT}" in shown
        assert file.read_text() == text + f'\n[models]\n"org/small" = "{COMMIT}"\n'
        checks = json.loads(
            cli("model", "check", "org/small", "--json", env=env).stdout
        )["nodes"]
        whole = [(each["node"], each["complete"]) for each in checks]
        assert whole == [("localhost", True), ("spark-2", True)]
        (models / FOLDER / SHARDS[0]).unlink()
        said = cli("model", "check", "org/small", env=env, rc=3).stdout
        assert said.count(f"{SHARDS[0]}  is missing") == 2
