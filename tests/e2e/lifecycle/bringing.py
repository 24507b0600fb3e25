"""Bring models and installations to nodes: from a node, cut short, rotten, while it serves."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import tarfile
import time
from pathlib import Path

from e2e.emulation import wires
from e2e.lifecycle import fake_venv
from e2e.lifecycle.cluster import MODEL, URL, EmulatedCluster, insist, scenario, wait
from e2e.lifecycle.installing import HOUSE, fill
from e2e.lifecycle.nodes import HOME, SystemdNode
from e2e.lifecycle.rack import ROOT
from e2e.lifecycle.scenarios import REFUSED
from patchkit.cluster.models.model_files import RECORD, ModelFolder
from patchkit.digests import digest, sha256_of
from patchkit.follow import Completed

LINK = ".local/share/patchkit/venv"
SPEC, COMMIT = "org/tiny", "0123456789abcdef0123456789abcdef01234567"
PLACE = f"{HOME}/models/{ModelFolder(repo=SPEC, commit=COMMIT).name}"
WEIGHTS = "model.safetensors"
NUMBERS = 20 << 20  # of four bytes: a copy takes long enough to be cut
CUT_SECONDS = 30
IMPORT = "tar --create --file=- --directory=/etc hostname | {engine} import - {tag}"


@scenario("bare")
def installed_from_head(cluster: EmulatedCluster) -> str:
    """`install` typed on the head by its user: without a cluster.toml, then as localhost."""
    fill(cluster, HOUSE)
    head = cluster.head
    _share_python(head)
    _send_folder(head, Path(cluster.home, HOUSE))
    alone = _patchkit(head, "cluster", "install")
    insist(not alone.trouble, f"without cluster.toml: {alone.output}{alone.errors}")
    insist("localhost: " in alone.output, f"without cluster.toml: {alone.output}")

    head.user("rm", "-rf", ".local/share/patchkit")
    names = {"localhost": head, "spark2": cluster.worker}
    text = "[serve]\n" + "".join(
        f"{key} = {json.dumps(cluster.choices[key])}\n" for key in cluster.choices
    )
    for name, node in names.items():
        text += f'[[node]]\nssh = "{name}"\naddress = "{wires.qsfp_ip(node.number)}"\n'
    fake_venv.write(head, f"{HOME}/cluster.toml", text)
    for words in (("cluster", "install"), ("up", MODEL)):
        done = _patchkit(head, *words)
        insist(not done.trouble, f"{' '.join(words)}: {done.output}{done.errors}")
    insist(cluster.answers(), "up said that it serves, and it does not answer")
    places = {
        node.user("readlink", "-f", LINK).output for node in cluster.nodes.values()
    }
    insist(len(places) == 1, f"installed: {places}")
    return (
        "this machine alone, then this one and another: the same on both, and it serves"
    )


@scenario("bare")
def installed_while_it_serves(cluster: EmulatedCluster) -> str:
    """0.33.0 installed while 0.25.1 serves, then a rank killed: nobody typed `up`."""
    for release in ("0.25.1", "0.33.0"):
        fill(cluster, f"wheelhouse-{release}", release=release)
    cluster.expect("install", "--wheelhouse", "wheelhouse-0.25.1")
    cluster.up()
    cluster.expect("install", "--wheelhouse", "wheelhouse-0.33.0")
    says = (
        "vLLM 0.33.0",
        "is installed, and vLLM 0.25.1",
        "serves until the next `up`",
    )
    before = cluster.ranks()
    cluster.kill("spark2", "worker")
    healed = cluster.heals(before)
    insist(_release(cluster) == "0.25.1", f"after a crash {_release(cluster)} serves")
    said = " ".join(cluster.patchkit("status").output.split())
    insist(all(each in said for each in says), f"status: {said}")
    cluster.up()
    insist(_release(cluster) == "0.33.0", f"after up {_release(cluster)} serves")
    said = cluster.patchkit("status").output
    insist("is installed, and" not in said, f"status: {said}")

    record = f"{LINK}/lib/python3*/site-packages/vllm-*.dist-info/RECORD"
    other_pip = f"echo 'x.py,sha256=a,1' | tee -a {record}"
    fake_venv.insist_user(cluster.worker, "sh", "-c", other_pip)
    says = ("spark2", "runs from it", "patchkit down")
    cluster.expect(
        "install", "--wheelhouse", "wheelhouse-0.33.0", status=REFUSED, says=says
    )
    insist(cluster.answers(), "install took the environment from under the ranks")
    return f"0.25.1 {healed}; `status` names both; the next `up` serves 0.33.0"


@scenario("stopped", engines=("docker", "podman"))
def image_retagged(cluster: EmulatedCluster) -> str:
    """Another image under the pin's tag on the worker; then only that one is left there."""
    engine, worker = cluster.engine, cluster.worker
    pin = str(cluster.choices["image"]).partition("@sha256:")[2]
    tag = f"localhost/patchkit:{pin[:12]}"
    other = IMPORT.format(engine=engine, tag=tag)
    fake_venv.insist_user(worker, "sh", "-c", other, seconds=60)
    cluster.up()
    cluster.expect("install", says=f"spark2: {tag} as it is")
    shown = (engine, "image", "inspect", "--format={{.Id}}", tag)
    found = fake_venv.insist_user(worker, *shown).strip().removeprefix("sha256:")
    insist(found == pin, f"the tag is on {found}")
    cluster.down()

    fake_venv.insist_user(worker, engine, "rmi", "--force", pin, seconds=60)
    fake_venv.insist_user(worker, "sh", "-c", other, seconds=60)
    said = cluster.expect(
        "up", MODEL, status=REFUSED, says=("spark2: ", "cluster install")
    )
    insist("spark1: the tag" not in said, f"up: {said}")
    cluster.expect("install", says=f"spark2: {tag} loaded")
    cluster.up()
    return "the right one is served and tagged again; brought anew where it is gone"


@scenario("serving", engines=("docker", "podman"))
def engine_lost(cluster: EmulatedCluster) -> str:
    """docker stopped on the head; with podman the worker's images removed while it serves."""
    if cluster.engine == "docker":
        cluster.head.root("systemctl", "stop", "docker.socket", "docker", seconds=90)
        says = ("docker does not run", "sudo systemctl start docker")
        wait(lambda: _shows(cluster, *says), 90, "status does not name docker")
        said = cluster.expect("up", MODEL, status=REFUSED, says=says)
        insist("no rank runs as root" not in said, f"up: {said}")
        cluster.head.root("systemctl", "start", "docker", seconds=90)
        cluster.up()
        return (
            "`status` and `up` name it and the command that starts it; then it serves"
        )
    fake_venv.insist_user(
        cluster.worker, "podman", "rmi", "--all", "--force", seconds=60
    )
    says = ("spark2: the image is not there", "patchkit cluster install")
    wait(lambda: _shows(cluster, *says), 90, "status does not name the image")
    cluster.expect("install")
    cluster.up()
    return "`status` names the node and `cluster install`, which cures it"


def _shows(cluster: EmulatedCluster, *says: str) -> bool:
    said = " ".join(cluster.patchkit("status").output.split())
    return all(each in said for each in says)


@scenario("stopped")
def model_copied(cluster: EmulatedCluster) -> str:
    """The worker loses power in `model sync`; then the head's copy rots, its time and size kept."""
    _put_model(cluster)
    laptop, worker = cluster.laptop, cluster.worker
    copy = laptop.start_patchkit("model", "sync", SPEC, log="sync")
    aside = worker.file(f"{HOME}/models/.sync/{Path(PLACE).name}/{WEIGHTS}")
    deadline = time.monotonic() + CUT_SECONDS
    while not aside.exists():
        insist(time.monotonic() < deadline, f"nothing is copied: {laptop.said('sync')}")
        time.sleep(0.01)
    worker.kill()
    copy.wait()
    worker.boot()
    missing = f"{SPEC} is not whole: spark2: no such folder"
    cluster.expect(
        "up", SPEC, status=REFUSED, says=(missing, f"patchkit model sync {SPEC}")
    )
    listed = cluster.patchkit("model", "list").output
    insist(f"spark2  {SPEC}" not in listed, f"list: {listed}")
    cluster.expect("model", "sync", SPEC)
    cluster.up(SPEC)
    cluster.down()

    good = _hash(worker)
    weights = f"{PLACE}/{WEIGHTS}"
    kept = f"touch -r {weights} kept && printf x | dd of={weights} bs=1 seek=999 conv=notrunc"
    fake_venv.insist_user(
        cluster.head, "sh", "-c", f"{kept} && touch -r kept {weights}"
    )
    insist(_hash(cluster.head) != good, "the head's copy is as before")
    says = (f"spark1: {WEIGHTS} has the hash", "the copy of spark2 is taken")
    cluster.expect("model", "sync", SPEC, says=says)
    hashes = [_hash(node) for node in cluster.nodes.values()]
    insist(hashes == [good, good], f"hashes: {hashes}")
    return "cut short it is no model, and is gone on with; a rotten source gets the good copy"


def _put_model(cluster: EmulatedCluster) -> None:
    """Put a pinned model on the head alone, as a fetch leaves it."""
    size = 4 * NUMBERS
    tensor = {"dtype": "F32", "shape": [NUMBERS], "data_offsets": [0, size]}
    header = json.dumps({"a": tensor}).encode()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    folder = cluster.folder / Path(PLACE).name
    (folder / RECORD).parent.mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(
        struct.pack("<Q", len(header)) + header + os.urandom(size)
    )
    text = json.dumps(config)
    (folder / "config.json").write_text(text)
    files = {
        WEIGHTS: {
            "size": 8 + len(header) + size,
            "digest": sha256_of(folder / WEIGHTS),
        },
        "config.json": {"size": len(text), "digest": digest(text)},
    }
    made = {"repo": SPEC, "commit": COMMIT, "files": files}
    (folder / RECORD).write_text(json.dumps(made))
    _send_folder(cluster.head, folder, "models")
    with (cluster.home / "cluster.toml").open("a") as file:
        file.write(f'\n[models]\n"{SPEC}" = "{COMMIT}"\n')


def _hash(node: SystemdNode) -> str:
    return fake_venv.insist_user(node, "sha256sum", f"{PLACE}/{WEIGHTS}").split()[0]


def _release(cluster: EmulatedCluster) -> str:
    """Return the release that serves, by its own word."""
    ask = ("curl", "--silent", "--fail", f"{URL}/version")
    return str(json.loads(cluster.head.user(*ask).output)["version"])


def _send_folder(node: SystemdNode, folder: Path, place: str = ".") -> None:
    """Copy a folder of this machine's to the home of a node's user."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, folder.name)
    words = ("tar", "--extract", "--no-same-owner", f"--directory={place}")
    fake_venv.insist_user(node, *words, input=packed.getvalue())


def _share_python(node: SystemdNode) -> None:
    """Let the node's user run the Python that this runs in, whose folder it sees."""
    for parent in Path(sys.base_prefix).parents:
        node.root("chmod", "o+x", str(parent))


def _patchkit(node: SystemdNode, *words: str) -> Completed:
    """Run `patchkit …` on a node, as its user."""
    env = (f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1", "TERM=dumb")
    return node.user("env", *env, sys.executable, "-m", "patchkit", *words, seconds=300)
