"""Ranks in containers: what an engine is told, beside the golden units; what is in the way."""

from dataclasses import replace

import pytest

from patchkit.cluster.launch.start_plan import make_plan
from patchkit.cluster.launch.survey import survey_nodes
from patchkit.cluster.launch.units import mount
from patchkit.errors import HostError, StorageError, UsageError
from support.checked import check_text
from support.clusters import cluster, image_facts, node_facts, units_of
from tools.golden_units import IMAGE

SNAPSHOT = "/data/hub/models--a--b/snapshots/0123"
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
DOWN_29 = "failed to connect to the docker API at unix:///var/run/docker.sock; check if"
FULL = "crun: write: No space left on device"


def files_of(tmp_path, model=SNAPSHOT, set=None, **image):
    """Return the unit and the env file of a single node; ``image`` is what its image is."""
    facts = node_facts(tmp_path, image=image_facts(**image))
    file = cluster("a", image=IMAGE, set=set or {})
    (files,) = units_of(file, [facts], model).node_files()
    return files["patchkit-vllm.service"], files["node.env"]


def test_check_asks_for_nothing_that_up_does_not_tell_an_engine(tmp_path):
    text, env = files_of(tmp_path)
    assert check_text(text, "x.service") == check_text(env, "node.env") == ()
    (found,) = check_text(text.replace(" --port ", " --prot "), "x.service")
    assert found.id == "unknown-flag"  # so it has read what runs in the container


@pytest.mark.parametrize(
    ("changes", "says", "never"),
    [
        ({}, ["--device=nvidia.com/gpu=all", "--device=/dev/infiniband"], "--gpus"),
        ({"spec": ""}, ["--gpus=all"], "nvidia.com"),
        ({"spec": "", "engine": "podman"}, ["--device=nvidia.com/gpu=all"], "--gpus"),
        ({"infiniband": False, "wraps": True}, [" sha256:0123"], "--entrypoint"),
        ({}, [mount("/data/hub/models--a--b", "readonly")], "snapshots/0123,"),
        ({"set": {"HF_HOME": "/hf"}}, [mount("/hf")], "--env=HF_HOME"),
        # The model lies in HF_HOME itself: engines refuse two mounts at one path.
        (
            {"set": {"HF_HOME": "/data/hub/models--a--b"}},
            [mount("/data/hub/models--a--b")],
            "readonly",
        ),
        (
            {},
            ["--env=VLLM_API_KEY ", "--env=HF_HOME=/home/spark/.cache/hugg"],
            "--privileged",
        ),
        (
            {"set": {"VLLM_CACHE_ROOT": "/t"}},
            ["--env=TRITON_CACHE_DIR "],
            "--env=VLLM_CACHE_ROOT",
        ),
    ],
)
def test_what_an_engine_is_told(changes, says, never, tmp_path):
    text, _env = files_of(tmp_path, **changes)
    (line,) = (each for each in text.splitlines() if each.startswith("ExecStart="))
    assert [each for each in says if each not in line] == []
    assert never not in line


def test_a_folder_of_any_name_is_one_field():
    assert mount('/a,"b') == '--mount=type=bind,"src=/a,""b","dst=/a,""b"'


@pytest.mark.parametrize(
    ("changes", "about", "hint"),
    [
        (
            {"problem": "engine-refuses", "said": "permission denied"},
            "engine-refuses",
            "usermod",
        ),
        (
            {"problem": "engine-refuses", "said": "no daemon"},
            "engine-refuses",
            "docker version",
        ),
        (
            {"problem": "engine-refuses", "said": DOWN},
            "engine-stopped",
            "systemctl start dock",
        ),
        (
            {"problem": "engine-refuses", "said": DOWN_29},
            "engine-stopped",
            "systemctl start dock",
        ),
        (
            {"problem": "engine-refuses", "said": f"permission denied while {DOWN_29}"},
            "engine-refuses",
            "usermod",
        ),
        (
            {"problem": "engine-refuses", "said": "docker is rootless"},
            "engine-rootless",
            "docker context use default",
        ),
        (
            {"problem": "image-silent", "said": FULL},
            "image-disk-full",
            "docker system df",
        ),
        ({"problem": "image-missing"}, "image-missing", "patchkit cluster install"),
        ({"content": "d" * 64}, "images", "patchkit cluster install"),
        (
            {"content": "d" * 64, "by_tag": True},
            "image-other",
            "patchkit cluster install",
        ),
        (
            {
                "content": "d" * 64,
                "by_tag": True,
                "problem": "image-silent",
                "said": "no sh",
            },
            "image-other",
            "patchkit cluster install",
        ),
    ],
)
def test_what_keeps_containers_from_being_started(changes, about, hint, tmp_path):
    # Root's daemon is not bound by the memory that the user's units may lock.
    facts = [
        node_facts(tmp_path, node=it, image=image_facts(), memlock=1 << 23)
        for it in (0, 1)
    ]
    assert list(survey_nodes(["a", "b"], facts)) == []
    wrong = replace(facts[1], image=image_facts(**changes))
    (found,) = survey_nodes(["a", "b"], [facts[0], wrong])
    assert found.about == about
    assert hint in found.hint
    assert found.kind is (StorageError if about == "image-disk-full" else HostError)


def test_other_contents_name_the_image_of_each_node(tmp_path):
    images = [image_facts(), image_facts(id=f"sha256:{'b' * 64}", content="d" * 64)]
    facts = [
        node_facts(tmp_path, node=number, image=image, memlock=1 << 23)
        for number, image in enumerate(images)
    ]
    (found,) = survey_nodes(["a", "b"], facts)
    assert found.about == "images"
    assert f"{images[0].id} on a" in found.what
    assert f"{images[1].id} on b" in found.what


@pytest.mark.parametrize(
    ("choices", "what", "hint"),
    [
        (
            {"image": "vllm/vllm-openai:v0.25.1"},
            "is not pinned",
            "patchkit cluster install",
        ),
        ({"executor": "ray"}, "patchkit starts no Ray", "leave `executor` out; or"),
    ],
)
def test_what_is_refused_before_a_node_is_asked(choices, what, hint):
    with pytest.raises(UsageError, match=what) as caught:
        make_plan(cluster("a", **choices), "a/b")
    assert caught.value.hint.startswith(hint)
