"""Read the health of this very machine: whatever it is, what cannot be read has a reason."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from patchkit.cluster.health.compilers import find_compilers
from patchkit.cluster.health.limits import container_limits, process_limits
from patchkit.cluster.health.node_health import NodeHealth, collect_health, package_versions
from patchkit.cluster.ssh.node import Remote
from support.needed import need


def asked(**given):
    return Remote("localhost").call(NodeHealth, collect_health, **given)


def test_this_machine():
    health = asked(venv=sys.prefix, no_main="nobody.service does not run")
    facts = {each.name for each in fields(NodeHealth)}

    assert set(health.unread) <= facts
    assert all(health.unread.values())
    assert health.unread["unit"] == "nobody.service does not run"
    # What is not known has a reason; whether the manager answers is asked by who looks.
    unknown = {name for name in facts - {"manager"} if getattr(health, name) is None}
    assert unknown == {*health.unread}
    assert health.page_cache is not None
    assert 0 <= health.page_cache < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 10
    assert all(Path(place).exists() for _, place in health.compilers.programs)
    assert health.container is not None


def written(root, files):
    for name, text in files.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "kind", "pids"),
    [
        ({".dockerenv": ""}, "docker", None),
        ({"run/systemd/container": "podman\n"}, "podman", None),
        # A machine of its own, with a systemd that starts the ranks.
        ({"run/systemd/container": "systemd-nspawn\n"}, "", None),
        ({"proc/1/cgroup": "0::/kubepods.slice/cri-containerd-1.scope\n"}, "kubernetes", None),
        ({"proc/1/cgroup": "0::/init.scope\n"}, "", None),
        ({"run/.containerenv": "", "sys/fs/cgroup/pids.max": "2048\n"}, "podman", 2048),
        ({"run/.containerenv": "", "sys/fs/cgroup/pids.max": "max\n"}, "podman", None),
    ],
)
def test_containers_and_their_limits(tmp_path, files, kind, pids):
    found = container_limits(written(tmp_path, files))
    assert (found.kind, found.pids, found.pids_now) == (kind, pids, None)


def test_the_capability_to_lock_memory(tmp_path):
    limit = "Limit\nMax locked memory         8388608              8388608              bytes\n"
    for word, may in (("0000000000004000", True), ("00000000a80425fb", False)):
        status = f"Name:\tx\nCapEff:\t{word}\n"
        written(tmp_path, {"proc/self/limits": limit, "proc/self/status": status})
        found = process_limits("self", tmp_path)
        assert (found.memlock, found.locks) == (8 << 20, may)


def environment(folder, project, version):
    home = folder / "lib" / "python3.12" / "site-packages" / f"{project}-{version}.dist-info"
    home.mkdir(parents=True)
    (home / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {project}\n\nprose\n")


def test_packages_and_those_that_are_there_twice(tmp_path):
    environment(tmp_path, "vllm", "0.25.1")
    environment(tmp_path, "torch", "2.11.0+cu130")
    environment(tmp_path, "torch", "2.10.0+cu130")
    environment(tmp_path, "flashinfer_python", "0.6.13")
    found = package_versions(str(tmp_path))

    assert found.versions["flashinfer-python"] == "0.6.13"
    assert found.twice == {"torch": ("2.10.0+cu130", "2.11.0+cu130")}
    assert package_versions("").versions == {}


def test_compilers_and_caches_are_those_of_the_variables(tmp_path):
    need("sh")
    program = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
    for name in ("toolkit/bin/nvcc", "other/ptxas"):
        written(tmp_path, {name: program})
        (tmp_path / name).chmod(0o755)
    caches = tmp_path / "home/.cache/flashinfer/0.6.13/121a"
    caches.mkdir(parents=True)
    (tmp_path / "venv/lib/python3.12/site-packages").mkdir(parents=True)
    found = find_compilers(
        str(tmp_path / "venv"),
        {
            "HOME": str(tmp_path / "home"),
            "CUDA_HOME": str(tmp_path / "toolkit"),
            "TRITON_PTXAS_BLACKWELL_PATH": str(tmp_path / "other/ptxas"),
            "PATH": "/nonexistent",
        },
    )

    assert dict(found.programs) == {"nvcc": str(tmp_path / "toolkit/bin/nvcc")}
    assert found.nvcc == "13.0"
    (ptxas,) = found.ptxas
    assert (ptxas.name, ptxas.cuda) == ("ptxas-blackwell", "13.0")
    assert ptxas.named == "TRITON_PTXAS_BLACKWELL_PATH"
    cache = next(each for each in found.caches if each.owner == "flashinfer")
    assert cache.names == ("0.6.13",)
    assert not cache.locked


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_another_user_made(tmp_path):
    locked = tmp_path / ".triton" / "cache"
    locked.mkdir(parents=True)
    locked.chmod(0o555)
    found = find_compilers("", {"HOME": str(tmp_path)})

    assert next(each.locked for each in found.caches if each.owner == "triton") == str(locked)
