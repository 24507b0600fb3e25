"""`patchkit cluster install` of an image: real sshd and rsync, an engine of files."""

import json
import sys
from hashlib import sha256

import pytest

from support import write_files
from support.needed import need
from support.ssh_server import obstacle, ssh_server

AS_A_UNIT = '#!/bin/sh\nshift 5\nexec "$@"\n'
NODES = ("spark-1", "spark-2")
ENGINE = f"""#!{sys.executable}
import json, os, pathlib, sys
home = pathlib.Path(os.environ["HOME"])
store, registry = home / "images.json", pathlib.Path(__file__).parent / "registry.json"
held = json.loads(store.read_text()) if store.exists() else {{}}
verb, *words = sys.argv[1:]
if (home / "refuses").exists():
    sys.exit("permission denied while trying to connect to the Docker daemon socket")
if verb == "info":
    print(json.dumps({{"ServerVersion": "28.3", "DockerRootDir": str(home)}}))
elif verb == "image":
    names = words[-1], "sha256:" + words[-1]
    found = [it for it in held.values() if it["Id"] in names or names[0] in it["RepoDigests"]]
    found = held.get(names[0]) or next(iter(found), None)
    sys.exit("No such image") if found is None else print(json.dumps([found]))
elif verb == "pull":
    if (home / "offline").exists():
        sys.exit("dial tcp: i/o timeout")
    held[words[0]] = json.loads(registry.read_text())[words[0]]
elif verb == "save":
    found = next(it for it in held.values() if it["Id"] == "sha256:" + words[2])
    pathlib.Path(words[1]).write_text(json.dumps(found))
elif verb == "load":
    found = json.loads(pathlib.Path(words[1]).read_text())
    held[found["Id"]] = found
    print("Loaded image ID: " + found["Id"])
elif verb == "run":
    os.execv("/bin/sh", ["sh", "-c", words[-1]])
elif verb == "tag":
    held[words[1]] = next(it for it in held.values() if it["Id"] == "sha256:" + words[0])
store.write_text(json.dumps(held))
"""


def image(name, *digests):
    own = sha256(name.encode()).hexdigest()
    config = {
        "Config": {"Entrypoint": ["vllm"]},
        "Architecture": "arm64",
        "Size": 1_000,
    }
    return {
        "Id": f"sha256:{own}",
        "RootFS": {"Layers": [own]},
        "RepoDigests": digests,
        **config,
    }


PIN = "f" * 64
V1 = image("v1", f"vllm/vllm-openai@sha256:{PIN}", "vllm/vllm-openai@sha256:' #")
TAG = f"localhost/patchkit:{PIN[:12]}"
FILE = (
    '[[node]]\nssh = "spark-1"\n[[node]]\nssh = "spark-2"\n[serve] # mine\nport=8001\n'
)


@pytest.fixture
def homes(tmp_path):
    for name in NODES:
        (tmp_path / name).mkdir()
    return [tmp_path / name for name in NODES]


@pytest.fixture
def install(homes, cli, tmp_path):
    """Run `patchkit cluster install` for an image that has this name: what it printed."""
    need("rsync")
    if why := obstacle():
        pytest.skip(why)
    known = dict.fromkeys(
        ("a/b:1", "vllm/vllm-openai:v1", f"vllm/vllm-openai@sha256:{PIN}"), V1
    )
    engine = {
        "docker": ENGINE,
        "registry.json": json.dumps(known),
        "systemd-run": AS_A_UNIT,
    }
    write_files(tmp_path / "ssh/bin", engine, mode=0o755)
    names = dict(zip(NODES, homes, strict=True))
    with ssh_server(tmp_path / "ssh", *NODES, homes=names) as path:
        env = {"PATH": path, "XDG_RUNTIME_DIR": str(tmp_path)}

        def run(name="", *words, rc=0):
            if name:
                (tmp_path / "cluster.toml").write_text(
                    f"{FILE}image = '{name}' # one\n"
                )
            done = cli("cluster", "install", *words, rc=rc, env=env)
            return " ".join((done.stdout + done.stderr).split())

        yield run


def held(home, digits=PIN):
    found = json.loads((home / "images.json").read_text())
    return found.get(f"localhost/patchkit:{digits[:12]}", {}).get("Id")


def test_a_tag_is_pinned_and_pulled_by_all(install, homes, tmp_path):
    said = install("vllm/vllm-openai:v1")
    pinned = f"vllm/vllm-openai:v1@sha256:{PIN}"
    assert f"cluster.toml pins {pinned}" in said
    assert (
        tmp_path / "cluster.toml"
    ).read_text() == f'{FILE}image = "{pinned}" # one\n'
    assert [*map(held, homes)] == [V1["Id"]] * 2
    assert f"spark-2: {TAG} pulled" in said
    again = install()
    assert all(f"{name}: {TAG} as it is" in again for name in NODES)


def test_a_node_without_a_network_gets_a_copy(install, homes):
    (homes[1] / "offline").touch()
    said = install("vllm/vllm-openai:v1")
    assert f"spark-2: {TAG} loaded" in said
    assert [*map(held, homes)] == [V1["Id"]] * 2
    # Neither an archive, nor the package that each call brought with it.
    assert [*homes[0].glob("*/**/*.tar"), *homes[1].glob("*/**/*.tar")] == []
    assert [path for home in homes for path in home.glob("patchkit-*")] == []
    (homes[0] / "offline").touch()
    said = install(f"vllm/vllm-openai@sha256:{'0' * 64}", rc=9)
    assert "spark-1: cannot pull vllm/vllm-openai@sha256:000" in said
    assert "and spark-2: cannot pull" in said
    assert "i/o timeout" in said


def test_what_is_only_here_is_pinned_by_its_id(install, homes, tmp_path):
    own = image("own")
    (homes[0] / "images.json").write_text(json.dumps({"mine:1": own}))
    (homes[0] / "offline").touch()
    install("mine:1")
    assert f'image = "mine:1@{own["Id"]}"' in (tmp_path / "cluster.toml").read_text()
    assert held(homes[1], own["Id"].removeprefix("sha256:")) == own["Id"]


OTHER = image("other")


@pytest.mark.parametrize("number", [0, 1])
def test_another_image_under_the_tag_is_replaced_where_it_is(install, homes, number):
    """The pin says which node is wrong: by an id, or by a registry's digest."""
    install("vllm/vllm-openai:v1")
    store = homes[number] / "images.json"
    images = json.loads(store.read_text())
    store.write_text(json.dumps({**images, TAG: OTHER}))
    said = install()
    assert f"spark-{number + 1}: {TAG} as it is" in said
    assert [*map(held, homes)] == [V1["Id"]] * 2
    # Where nothing but the tag is left, the right one comes anew.
    store.write_text(json.dumps({TAG: OTHER}))
    said = install()
    assert f"spark-{number + 1}: {TAG} pulled" in said
    assert f"spark-{2 - number}: {TAG} as it is" in said
    assert [*map(held, homes)] == [V1["Id"]] * 2


def test_nodes_that_differ_or_refuse(install, homes):
    """No node has an image that bears the pin: nobody knows which is right."""
    for home, other in zip(homes, (OTHER, V1 | {"RepoDigests": []}), strict=True):
        (home / "images.json").write_text(json.dumps({TAG: other}))
    said = install(f"vllm/vllm-openai@sha256:{PIN}", rc=9)
    assert "differs from node to node, and nothing was switched: image: " in said
    assert f"`docker image rm {TAG}`, then install again" in said
    (homes[1] / "refuses").touch()
    said = install(rc=9)
    assert "spark-2: a unit of this user gets no container: permission denied" in said
    assert "sudo usermod -aG docker" in said


def test_a_layer_is_for_an_image_that_has_vllm(install):
    assert "--apply is for an image" in install("", "--apply", rc=2)
    assert "spark-1: the image's Python finds no vLLM" in install(
        "a/b:1", "--apply", rc=9
    )
