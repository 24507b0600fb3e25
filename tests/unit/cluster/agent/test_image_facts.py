"""What a node says of an image; its engine is a stand-in that runs commands outside."""

import json

import pytest

from patchkit.cluster.agent.image_facts import look_at_image
from patchkit.runtime.host.software import software
from support import write_files

ENGINE = """\
#!/bin/sh
echo "$@" >> {folder}/asked
case $1 in
  version) echo Client;;
  info) echo '{{"ServerVersion": "28.3", "DockerRootDir": "/"}}';;
  image) [ "$4" = localhost/patchkit:012345678901 ] && cat {folder}/said;;
  run) while [ $# -gt 1 ]; do shift; done; exec sh -c "$1";;
esac
"""
SAID = {
    "Id": "sha256:" + "0" * 64,
    "Architecture": "arm64",
    "Config": {"Entrypoint": ["vllm", "serve"], "Env": ["A=b"]},
    "RootFS": {"Layers": ["sha256:1"]},
}


def look(folder, monkeypatch, **changes):
    """Return what is seen of an image that is so, and what the engine was asked."""
    files = {
        "docker": ENGINE.format(folder=folder),
        "systemd-run": '#!/bin/sh\nshift 5\nexec "$@"\n',
    }
    write_files(folder, files, mode=0o755)
    write_files(folder, {"said": json.dumps([SAID | changes])})
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    found = look_at_image("docker", "a/b@sha256:x", "localhost/patchkit:012345678901")
    return found, (folder / "asked").read_text()


def test_its_own_python_says_what_is_in_it(tmp_path, monkeypatch):
    found, asked = look(tmp_path, monkeypatch)
    assert (found.problem, found.id, found.program) == ("", SAID["Id"], f"{tmp_path}/docker")
    assert found.software.python == software(None, {"PATH": "/usr/bin:/bin"}).python
    assert f"--network=none --entrypoint= {found.id} sh -c " in asked


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
def test_an_entry_point_around_a_command_is_kept(entry, wraps, tmp_path, monkeypatch):
    found, asked = look(tmp_path, monkeypatch, Config={"Entrypoint": entry})
    assert found.wraps is wraps
    assert ("--entrypoint=" in asked) is not wraps


def test_contents_are_the_same_in_every_store(tmp_path, monkeypatch):
    def content(**changes):
        return look(tmp_path, monkeypatch, **changes)[0].content

    assert content() == content(Id="sha256:" + "1" * 64) != content(RootFS={"Layers": ["x"]})


@pytest.mark.parametrize("changes", [{"Id": "--privileged"}, {"Config": 1}])
def test_what_an_engine_says_is_checked(changes, tmp_path, monkeypatch):
    found, _asked = look(tmp_path, monkeypatch, **changes)
    assert found.problem == "engine-refuses"
    assert "cannot be read" in found.said


def test_an_image_or_an_engine_that_is_not_there(tmp_path, monkeypatch):
    assert look(tmp_path, monkeypatch)[0].problem == ""
    assert look_at_image("docker", "other", "").problem == "image-missing"
    monkeypatch.setattr("shutil.which", lambda *_given, **_path: None)
    assert look_at_image("docker", "other", "").problem == "engine-missing"
