"""What engines say, and how GPUs get into containers.

tests/data/engines has what real programs printed, less what nothing reads: docker 28.2.2 with
dockerd 20.10.24 (whose daemon.json has a runtime nvidia), podman 4.3.1 of a user; and what a test
of nvidia-container-toolkit 1.20.0 has nvidia-ctk write, with kind nvidia.com/gpu in the place of
example.com/device. The programs on PATH are stand-ins that print it.
"""

import json
from pathlib import Path

import pytest

from patchkit.cluster.agent.engine_facts import EngineFacts, look_at_engine
from patchkit.cluster.ssh.node import Remote
from patchkit.errors import HostError
from support import write_files
from support.needed import need

SAID = Path(__file__).parents[3] / "data" / "engines"
SPEC = (SAID / "nvidia.yaml").read_text(encoding="utf-8")
JSON = '{"kind": "nvidia.com/gpu", "devices": [{"name": "all"}]}'
OLD = {"etc/cdi/nvidia.yaml": SPEC}
FRESH = {"var/run/cdi/nvidia.yaml": SPEC.replace("999.88.77", "580.95.05")}
# Of another kind; without a device for all; put aside.
OTHERS = {
    "var/run/cdi/z.yaml": SPEC.replace("kind: nvidia", "kind: management.nvidia"),
    "etc/cdi/x.yaml": SPEC.replace("name: all", "name: GPU-1"),
    "etc/cdi/y.yaml.off": SPEC,
}
# As docker says from 25 on where it reads them: moby, SystemInfo.
CDI = {"CDISpecDirs": ["/etc/cdi", "/var/run/cdi"]}


def look(folder, engine, files=(), **changes):
    """Return what is seen of an engine that says this, with these files on its machine."""
    said = json.loads((SAID / f"{engine}-info.json").read_text(encoding="utf-8")) | changes
    shows = f"case $1 in info) cat {folder}/info;; *) cat {SAID}/{engine}-image.json;; esac"
    write_files(folder, {"info": json.dumps(said), "dev/infiniband/uverbs0": "", **dict(files)})
    write_files(folder, {engine: f"#!/bin/sh\n{shows}\n"}, mode=0o755)
    asked = {"program": str(folder / engine), "image": "0" * 64, "root": str(folder)}
    return Remote("localhost").call(EngineFacts, look_at_engine, **asked)


@pytest.mark.parametrize(
    ("engine", "changes", "files", "version", "spec", "driver"),
    [
        ("docker", {}, OLD, "20.10.24+dfsg1", "", ""),
        ("docker", CDI, OLD, "20.10.24+dfsg1", "/etc/cdi/nvidia.yaml", "999.88.77"),
        ("docker", CDI, {"etc/cdi/a.json": JSON}, "20.10.24+dfsg1", "/etc/cdi/a.json", ""),
        ("podman", {}, OLD | FRESH | OTHERS, "4.3.1", "/var/run/cdi/nvidia.yaml", "580.95.05"),
        ("podman", {}, OTHERS, "4.3.1", "", ""),
    ],
)
def test_what_containers_get(tmp_path, engine, changes, files, version, spec, driver):
    found = look(tmp_path, engine, files, **changes)
    assert (found.version, found.spec, found.driver) == (version, spec, driver)
    assert (found.cpu, found.cuda, found.hook) == ("amd64", "13.0", engine == "docker")
    assert found.storage[0].free
    assert found.closed == ()  # whose owner opens it, in a container as well


def test_the_podman_of_this_machine(tmp_path):
    need("podman")
    found = look_at_engine("podman", "", str(tmp_path))
    assert (found.cpu, found.spec, int(found.version[0]) > 2) == ("", "", True)
    with pytest.raises(HostError, match="image inspect"):
        look_at_engine("podman", "0" * 64)
