"""Jobs for Ray: what they hold."""

import json
import shlex

import pytest

from patchkit.errors import UsageError
from patchkit.measure.ray_job import own_variables, ray_job
from support.manifests import planned
from tools import golden_manifests

LARGE = "openai/gpt-oss-120b"


def test_text_is_that_of_the_golden(tmp_path):
    stored = (golden_manifests.DATA / "ray-2.json").read_text()
    assert golden_manifests.job(tmp_path) == stored, (
        "look at it, then run tools/golden_manifests.py"
    )


@pytest.mark.parametrize("model", ["/srv/$(id)", '/srv/a": x', "/srv/a'b", "/srv/a b;c", "/srv/é"])
def test_a_hostile_folder_is_one_word_of_the_shells(model, tmp_path):
    job = ray_job(*planned(tmp_path, model, executor="ray", args=("--x", "$HOME `id`")))
    words = shlex.split(json.loads(json.dumps(job))["entrypoint"])
    assert (words[:3], words[-2:]) == (["vllm", "serve", model], ["--x", "$HOME `id`"])


def test_what_a_node_owns_is_not_the_jobs(tmp_path):
    """Ray gives a job's variables to every node alike."""
    _file, ranks, _model = plan = planned(tmp_path, LARGE, 3, executor="ray", set={"HF_TOKEN": ""})
    variables = ray_job(*plan)["runtime_env"]["env_vars"]
    assert own_variables(ranks) == ["HF_TOKEN", "VLLM_HOST_IP"]
    assert not variables.keys() & {"HF_TOKEN", "VLLM_HOST_IP"}
    assert variables["NCCL_SOCKET_IFNAME"] == "enp1s0f0np0"


def test_a_plan_without_ray(tmp_path):
    with pytest.raises(UsageError, match="no Ray"):
        ray_job(*planned(tmp_path, LARGE))
