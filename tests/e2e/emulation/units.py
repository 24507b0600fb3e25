"""Real vLLM on two nodes with a real systemd, under the units that `patchkit up` writes."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from e2e.emulation.lab import QUIET, Answers, Lab
from e2e.lifecycle import fake_venv, freezing, image, rack, rootfs
from e2e.lifecycle.cluster import URL, EmulatedCluster, Engine, insist, wait
from e2e.lifecycle.nodes import HOME, SystemdNode
from patchkit.follow import Completed
from patchkit.process import attempt

COMPILER = ("g++", "python3-dev")  # torch compiles while vLLM starts
IN_IMAGE = (
    *(*image.PACKAGES, *COMPILER, "libnuma1", "libgomp1"),
    *("openssl", "util-linux", "libc-bin", "procps"),
)
DISK, IMAGES = "1g", "5g"  # of a node's /home: what vLLM compiles; the image, too
SERVE_SECONDS = 400
MODELS = (f"{HOME}/models/one", f"{HOME}/models/other")
# On CPUs vLLM has no pipelines, and counts the cores itself.
ARGS = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager")
SHARDS = ("--pipeline-parallel-size", "1", "--tensor-parallel-size", "2")
ON_CPU = ("omp-threads",)
PROGRAM = """\
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
RELEASE = "import sys; print('%d.%d' % sys.version_info[:2])"
OWN = ".".join(map(str, sys.version_info[:2]))
ASK, LOAD = (Path(__file__).with_name(name) for name in ("ask.py", "load.py"))
# Prompts that take many steps: of a model for 1024 words.
LONG = (
    "--hf-overrides",
    '{"max_position_embeddings": 16384}',
    "--max-model-len",
    "16384",
)
SOAK_MINUTES = float(os.environ.get("PATCHKIT_SOAK_MINUTES", "60"))


def obstacle() -> str:
    """Return why this cannot be run here; empty if nothing is in the way."""
    release = attempt("/usr/bin/python3", "-c", RELEASE).output.strip()
    if release != OWN:
        return f"the nodes' Python would be {release or 'none'}, and vLLM is installed for {OWN}"
    return rootfs.obstacle()


def units(lab: Lab, engine: Engine = "venv") -> str:
    """Two nodes with systemd: up, the answers, each rank killed, another model, down."""
    with _cluster(lab, f"units-{engine}", engine) as cluster:
        first, other = MODELS
        cluster.up(first)
        _insist_on(lab.expected, cluster, first)
        told = []
        for name in reversed(cluster.names):
            before = cluster.ranks()
            cluster.kill(name, "main")
            told.append(f"`kill -9` of {name}'s: {cluster.heals(before)}")
        _insist_on(lab.expected, cluster, first)
        cluster.expect("switch", other)
        _insist_on(lab.expected, cluster, other)
        cluster.down()
    return f"same answers; {'; '.join(told)}; switch; nothing is left"


def units_podman(lab: Lab) -> str:
    """The same with each rank in a container of podman's."""
    return units(lab, "podman")


def soak(lab: Lab) -> str:
    """An hour of mixed load, or PATCHKIT_SOAK_MINUTES: nothing is restarted; then a real freeze."""
    args = [*ARGS, *SHARDS, *LONG, "--max-num-batched-tokens", "256"]
    with _cluster(
        lab, "soak", args=args, set={**QUIET, "OMP_NUM_THREADS": "1"}
    ) as cluster:
        cluster.expect("up", MODELS[0])
        before, head = cluster.ranks(), cluster.head
        minutes = (
            "systemd-run",
            "--user",
            "--quiet",
            "--unit=load",
            "python3",
            LOAD,
            MODELS[0],
            URL,
        )
        head.user(*minutes, f"{SOAK_MINUTES}")
        running = ("systemctl", "--user", "is-active", "load")
        wait(
            lambda: bool(head.user(*running).status),
            60 * SOAK_MINUTES + 600,
            "the load goes on",
        )
        insist(
            cluster.ranks() == before, f"it was restarted: {freezing.said_by(cluster)}"
        )
        loaded = freezing.said_by(cluster, "load")
        found = [line for line in loaded.splitlines() if line.startswith("{")]
        insist("failed" not in loaded, f"an answer failed: {loaded}")
        head.user("pkill", "-STOP", "-f", "^VLLM::EngineCore")
        freezing.ask(cluster)
        cured = freezing.is_cured(cluster, before, "spark1", "since one was asked for")
        cluster.down()
    told = "; ".join((f"{SOAK_MINUTES:.0f} minutes, no restart", *found))
    return f"{told}; SIGSTOP of the engine: {cured}"


class RandomCluster(EmulatedCluster):
    """A cluster whose models have random weights: `up` says that they compute garbage."""

    def patchkit(self, *words: str) -> Completed:
        done = super().patchkit(*words)
        is_garbage = "the model computes garbage" in done.output + done.errors
        return replace(done, status=0) if is_garbage else done


@contextmanager
def _cluster(
    lab: Lab, log: str, engine: Engine = "venv", **choices: object
) -> Iterator[EmulatedCluster]:
    """Boot two nodes that have this session's vLLM and two models."""
    site, folder = Path(sysconfig.get_path("purelib")), lab.work / "logs" / log
    if engine == "venv":
        root, home, archive = rootfs.ready(lab.work, COMPILER), DISK, lab.model
    else:
        root, home, archive = rootfs.ready(lab.work), IMAGES, _image(lab.work, site)
    shared = {Path(sys.prefix), lab.model, archive.parent}
    with rack.up(root, folder, home=home, shared=shared) as parts:
        cluster = RandomCluster(
            *parts, folder, patience=SERVE_SECONDS, engine=engine, archive=archive
        )
        for node in cluster.nodes.values():
            if engine == "venv":
                _install(node, site)
            else:
                cluster.install(node)
            fake_venv.insist_user(node, "mkdir", "-p", f"{HOME}/models")
            for each in MODELS:
                fake_venv.insist_user(node, "cp", "-r", str(lab.model), each)
        said = {"args": [*ARGS, *SHARDS], "set": QUIET, "without": ON_CPU, **choices}
        cluster.describe(**said)
        yield cluster


def _install(node: SystemdNode, site: Path) -> None:
    """Let an environment of the node's own Python use this session's packages."""
    venv = fake_venv.VENV
    fake_venv.insist_user(node, "python3", "-m", "venv", "--without-pip", venv)
    own = f"{venv}/lib/python{OWN}/site-packages"
    fake_venv.write(node, f"{own}/emulation.pth", f"{site}\n")
    fake_venv.write(node, f"{venv}/bin/vllm", f"#!{venv}/bin/python\n{PROGRAM}")
    node.user("chmod", "+x", f"{venv}/bin/vllm")


def _image(work: Path, site: Path) -> Path:
    """Return the archive of an image with this session's packages; it is written once."""
    archive = work / image.FOLDER / "vllm.tar"
    if not archive.is_file():
        folders = {"": image.unpack(work, IN_IMAGE), f"{image.SITE}/": site}
        text = f"#!/usr/bin/python3\n{PROGRAM}"
        image.write_archive(archive, folders, {"usr/local/bin/vllm": text.encode()})
    return archive


def _insist_on(expected: Answers, cluster: EmulatedCluster, model: str) -> None:
    done = cluster.head.user("python3", ASK, model, URL, "60", seconds=180)
    insist(not done.trouble, f"no answer: {done.trouble}")
    found = [
        (text, tokens) for text, tokens in json.loads(done.output.splitlines()[-1])
    ]
    insist(found == expected, f"{json.dumps(found)} is not {json.dumps(expected)}")
