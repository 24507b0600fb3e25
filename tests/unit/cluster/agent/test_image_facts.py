"""Check what a node says of an engine and an image, and how GPUs get into containers.

tests/data/engines has what real programs printed, less what nothing reads: docker 28.2.2 with
dockerd 20.10.24 (whose daemon.json has a runtime nvidia), podman 4.3.1 of a user; and what a test
of nvidia-container-toolkit 1.20.0 has nvidia-ctk write, with kind nvidia.com/gpu in the place of
example.com/device. The programs on PATH are stand-ins that print it, and run commands outside.
"""

import json
import os
from pathlib import Path

import pytest

from patchkit.cluster.agent.image_facts import find_image, look_at_image
from patchkit.runtime.host.software import read_software
from support import write_files
from support.needed import need

ENGINE = """\
#!/bin/sh
echo "$@" >> {folder}/asked
case $1 in
  info) cat {folder}/info; exit {status};;
  image) [ "$4" = "{tag}" ] && cat {folder}/image;;
  run) while [ $# -gt 1 ]; do shift; done; exec sh -c "$1";;
esac
"""
AS_A_UNIT = '#!/bin/sh\nshift 5\nexec "$@"\n'  # systemd-run
TAG = "localhost/patchkit:012345678901"
SAID = Path(__file__).parents[3] / "data" / "engines"
LAYERS = {"RootFS": {"Layers": ["sha256:1"]}}  # which are left out there
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


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Put an engine on PATH; ``info`` and ``image`` change what it says."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(name="docker", info=(), image=(), files=(), status=0):
        def said(what):
            return json.loads(
                (SAID / f"{name}-{what}.json").read_text(encoding="utf-8")
            )

        said_of = {
            "info": info
            if isinstance(info, str)
            else json.dumps(said("info") | dict(info)),
            "image": json.dumps([said("image")[0] | LAYERS | dict(image)]),
        }
        write_files(tmp_path, {"dev/infiniband/uverbs0": "", **said_of, **dict(files)})
        program = ENGINE.format(folder=tmp_path, status=status, tag=TAG)
        write_files(tmp_path, {name: program, "systemd-run": AS_A_UNIT}, mode=0o755)
        return name, [TAG, "a/b@sha256:x"]

    return install


@pytest.mark.parametrize(
    ("name", "info", "files", "version", "spec", "driver"),
    [
        ("docker", {}, OLD, "20.10.24+dfsg1", "", ""),
        ("docker", CDI, OLD, "20.10.24+dfsg1", "/etc/cdi/nvidia.yaml", "999.88.77"),
        (
            "docker",
            CDI,
            {"etc/cdi/a.json": JSON},
            "20.10.24+dfsg1",
            "/etc/cdi/a.json",
            "",
        ),
        (
            "podman",
            {},
            OLD | FRESH | OTHERS,
            "4.3.1",
            "/var/run/cdi/nvidia.yaml",
            "580.95.05",
        ),
        ("podman", {}, OTHERS, "4.3.1", "", ""),
    ],
)
def test_what_containers_get(
    name, info, files, version, spec, driver, engine, tmp_path
):
    found = find_image(*engine(name, info, files=files), root=str(tmp_path))
    assert (found.problem, found.program) == ("", f"{tmp_path}/{name}")
    assert (found.version, found.spec, found.driver) == (version, spec, driver)
    assert (found.cpu, found.cuda, found.hook) == ("amd64", "13.0", name == "docker")
    assert found.storage.free
    assert (found.infiniband, found.closed) == (
        True,
        (),
    )  # whose owner opens it, inside as well


def test_a_user_without_an_entry_is_a_number(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    monkeypatch.setattr(os, "getgid", lambda: 54322)
    image = find_image(*engine(), root=str(tmp_path))
    assert (image.problem, image.user, image.login) == ("", "54321:54322", "54321")


def test_the_podman_of_this_machine(tmp_path, monkeypatch):
    need("podman")
    write_files(tmp_path, {"systemd-run": AS_A_UNIT}, mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = find_image("podman", ["0" * 64], str(tmp_path))
    assert (found.problem, found.spec, int(found.version[0]) > 2) == (
        "image-missing",
        "",
        True,
    )


def test_its_own_python_says_what_is_in_it(engine, tmp_path, monkeypatch):
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    found = look_at_image(*engine())
    own = read_software(None, {"PATH": "/usr/bin:/bin"}).python
    assert (found.problem, found.contents.software.python) == ("", own)
    assert found.contents.glibc
    assert (
        f"--network=none --entrypoint= {found.id} sh -c "
        in (tmp_path / "asked").read_text()
    )


@pytest.mark.parametrize(
    ("entry", "wraps"),
    [
        (None, False),
        (["vllm"], False),
        (["/usr/bin/python3.12", "-m", "vllm.entrypoints.openai.api_server"], False),
        (["/bin/bash", "-c"], False),
        (["/opt/nvidia/nvidia_entrypoint.sh"], True),
        (["tini", "--", "/workspace/vllm_entry.sh"], True),
    ],
)
def test_an_entry_point_around_a_command_is_kept(entry, wraps, engine, tmp_path):
    found = look_at_image(*engine(image={"Config": {"Entrypoint": entry}}))
    assert found.wraps is wraps
    assert ("--entrypoint=" in (tmp_path / "asked").read_text()) is not wraps


def test_contents_are_the_same_in_every_store(engine):
    one, same = (
        find_image(*engine(image={"Id": f"sha256:{n * 64}"})).content for n in "01"
    )
    assert (
        one == same != find_image(*engine(image={"RootFS": {"Layers": ["x"]}})).content
    )


@pytest.mark.parametrize(
    "said",
    [
        *(
            {"image": {"Id": "--privileged"}},
            {"image": {"Config": 1}},
            {"image": {"Size": []}},
        ),
        *({"info": text} for text in ("", "[]", "{}", '{"host": 1}', "[" * 9999)),
        {"info": {"DockerRootDir": []}},
        *(
            {"image": {"Size": size}}
            for size in (float("inf"), float("nan"), -5, 10**400, "5")
        ),
    ],
)
def test_what_an_engine_says_is_checked(said, engine):
    found = find_image(*engine(**said))
    assert found.problem == "engine-refuses"
    assert "cannot be read" in found.said


DOWN = "Cannot connect to the Docker daemon"


@pytest.mark.parametrize(
    "said",
    [{"info": {"ServerErrors": [DOWN]}}, {"info": f"first\n{DOWN}\n", "status": 1}],
)
def test_an_engine_that_refuses_says_why(said, engine):
    found = find_image(*engine(**said))
    assert (found.problem, found.said) == ("engine-refuses", DOWN)


def test_a_rootless_docker_is_refused_and_one_that_maps_users_is_not(engine):
    remapped = {"SecurityOptions": ["name=seccomp,profile=default", "name=userns"]}
    assert find_image(*engine(info=remapped)).problem == ""
    rootless = {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}
    image = find_image(*engine(info=rootless))
    assert (image.problem, image.said) == ("engine-refuses", "docker is rootless")


def test_an_image_or_an_engine_that_is_not_there(engine, monkeypatch):
    name, _names = engine()
    assert find_image(name, ["other"]).problem == "image-missing"
    monkeypatch.setattr("shutil.which", lambda *_given, **_path: None)
    assert find_image(name, ["other"]).problem == "engine-missing"
