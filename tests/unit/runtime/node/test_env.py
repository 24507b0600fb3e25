"""`patchkit env`, for machines of every kind, and what it does to files."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from patchkit.cli import group
from patchkit.errors import SourceError, UsageError
from patchkit.patching.recipe import load_recipe
from patchkit.runtime.envfile.env_file import locked_versions, read_head
from patchkit.runtime.host.probe import probe
from patchkit.runtime.host.software import find_ptxas
from patchkit.runtime.node.cluster_env import make_cluster_env
from patchkit.runtime.node.decision import NodeOptions, decide_node
from patchkit.runtime.rules.rule import load_variable_rules, select_entries
from support import hosts, write_files
from support.checked import check_text
from support.selection import SUPPORTED
from tools import golden_env

TABLE = json.loads(golden_env.TABLE.read_text(encoding="utf-8"))
HEAD = ("env", "--role=head", "--vllm=0.33.0", "--nccl=2.30.7", "--triton=3.8.0")


HASH = f"--hash=sha256:{'0' * 64}"
LOCK = f"""\
# Written by patchkit wheelhouse fill
nvidia-nccl-cu13==2.30.7+gb10.abc ; platform_machine == "aarch64" {HASH}
nvidia-nccl-cu13==2.30.7+gb10.def ; platform_machine == "x86_64" {HASH}
torch==2.11.0 {HASH}
triton==3.6.0 {HASH}
vllm==0.25.1+cu130.gb10.052ae12432 {HASH}
"""


@pytest.mark.parametrize("name", golden_env.CASES)
def test_a_machine_gets_what_its_case_says(name, tmp_path):
    text, facts = golden_env.run(name, tmp_path)
    assert facts == TABLE[name], "look at it, then run tools/golden_env.py"
    if name in golden_env.WHOLE:
        stored = golden_env.DATA / f"{name.replace(' ', '-')}.env"
        assert text == stored.read_text(encoding="utf-8")


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(group, list(arguments))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_what_a_wheelhouse_will_install_counts_before_it_is_installed(tmp_path):
    """NCCL 2.28.9 deadlocks; where an override takes 2.30.7 there is nothing to beware of."""
    root = hosts.build(tmp_path, "cable_port0")
    head = ("env", "--role=head", f"--root={root}")
    pinned = invoke(*head, "--vllm=0.25.1", "--triton=3.6.0", "--nccl=2.28.9")
    assert "can deadlock between nodes" in pinned
    assert "`patchkit wheelhouse override nvidia-nccl-cu13==2.30.7`" in pinned
    lock = tmp_path / "requirements.txt"
    lock.write_text(LOCK)
    locked = invoke(*head, f"--lock={tmp_path}")
    assert "can deadlock" not in locked
    assert locked == invoke(*head, "--vllm=0.25.1", "--triton=3.6.0", "--nccl=2.30.7")
    assert "can deadlock" in invoke(*head, f"--lock={lock}", "--nccl=2.28.9")


def test_the_rule_and_the_recipe_tell_of_one_bug():
    rules = load_variable_rules()
    (advice,) = (each for each in rules.advice if each.id == "nccl-deadlock")
    (bug,) = (each for each in load_recipe("nccl").facts.bugs if each.take)
    assert advice.when["nccl"] == bug.versions
    assert f"nvidia-nccl-cu13=={bug.take}`" in advice.instead


@pytest.mark.parametrize("quantization", ["fp8", "nvfp4"])
def test_what_is_written_is_what_the_check_lets_pass(quantization, tmp_path):
    root = hosts.build(tmp_path, "single")
    for version in SUPPORTED:
        file = tmp_path / f"{version}.env"
        asked = (
            f"--vllm={version}",
            f"--quantization={quantization}",
            "--with=fp8-block",
        )
        invoke(
            "env",
            "--role=single",
            f"--root={root}",
            "--triton=3.8.0",
            f"-o{file}",
            *asked,
        )
        found = check_text(file.read_text(), file.name, role="single", vllm=version)
        # What no variable mends in a release is told of every file for it.
        advice = {rule.id for rule in load_variable_rules().advice}
        wrong = [each for each in found if each.id not in advice]
        assert [f"{version}: {each.level} {each.what}" for each in wrong] == []


def test_a_value_that_the_release_does_not_take_is_refused(tmp_path):
    root = hosts.build(tmp_path, "single")
    arguments = ("env", "--role=single", "--vllm=0.12.0", f"--root={root}")
    with pytest.raises(UsageError, match="does not take VLLM_USE_DEEP_GEMM=no") as no:
        invoke(*arguments, "--set=VLLM_USE_DEEP_GEMM=no")
    assert no.value.hint == "it takes a whole number"
    assert "VLLM_USE_DEEP_GEMM=1\n" in invoke(*arguments, "--set=VLLM_USE_DEEP_GEMM=1")


def test_without_a_gpu_everything_is_for_a_gb10_and_says_so(tmp_path):
    """A file for a Spark may be written on a laptop; `check` and `serve-args` mean a Spark, too."""
    arguments = (f"--root={tmp_path}", "--role=single", "--vllm=0.33.0")
    (tmp_path / "sys").mkdir()
    written = invoke("env", *arguments)
    assert "\nMAX_JOBS=4\n" in written
    assert (
        "no GPU is found here, so this is for a GB10; `target` names another" in written
    )
    line = invoke("serve-args", "openai/gpt-oss-20b", *arguments)
    assert "no GPU is found here: sized for a Spark" in line
    assert "MAX_JOBS" not in invoke("env", *arguments, "--target=h200")


def test_what_is_no_head_file_is_refused(tmp_path):
    file = tmp_path / "head.env"
    for text, kind, says in (
        (None, UsageError, "no such file"),
        ("", SourceError, "not an env file of patchkit"),
        ("NCCL_DEBUG=WARN\n", SourceError, "not an env file of patchkit"),
        (
            "# patchkit env: role=head digest=0123456789abcdef\n",
            SourceError,
            "topology, executor",
        ),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(kind) as caught:
            read_head(file, "worker")
        assert says in str(caught.value)


def test_ptxas_is_that_of_a_toolkit_that_knows_the_device(tmp_path):
    both = {"usr/local/cuda": "12.8.1", "usr/local/cuda-13.0": "13.0.2"}
    for number, (toolkits, home, found) in enumerate(
        (
            ({}, "", ""),
            ({"usr/local/cuda": "13.0.2"}, "", "/usr/local/cuda/bin/ptxas"),
            (both, "", "/usr/local/cuda-13.0/bin/ptxas"),
            ({"opt/cuda": "13.1.0"}, "/opt/cuda", "/opt/cuda/bin/ptxas"),
            ({"usr/local/cuda": "not a version"}, "", ""),
        )
    ):
        root = tmp_path / str(number)
        for place, version in toolkits.items():
            facts = json.dumps({"cuda": {"name": "CUDA SDK", "version": version}})
            write_files(root / place, {"bin/ptxas": "", "version.json": facts})
        assert find_ptxas(root, {"CUDA_HOME": home}) == found


def test_json_has_no_secret(tmp_path):
    root = hosts.build(tmp_path, "single")
    arguments = (
        "env",
        "--vllm=0.33.0",
        f"--root={root}",
        "--json",
        "--set=NCCL_DEBUG=INFO",
    )
    printed = invoke(*arguments, "--set=HF_TOKEN=", "--with=caches")
    # Notes come before the document.
    document = json.loads(printed[printed.index("{") :])
    variables = document["variables"]
    assert variables["NCCL_DEBUG"] == "INFO"
    assert variables["CUDA_CACHE_PATH"].endswith(
        "/.local/state/patchkit/vllm-0.33.0/cuda"
    )
    assert "HF_TOKEN" not in variables
    with pytest.raises(UsageError, match="value of a secret") as raised:
        invoke(*arguments, "--set=HF_TOKEN=hf_abcdef")
    assert "hf_abcdef" not in str(raised.value)


def test_two_rules_that_set_a_variable_are_both_named(tmp_path):
    host = probe(hosts.build(tmp_path, "single"), environment={})
    node = decide_node(NodeOptions(role="single", vllm="0.33.0"), host, None)
    rules = load_variable_rules()
    rule = next(
        each
        for each in select_entries(rules.rules, node.situation)
        if each.default and each.set
    )
    both = replace(rules, rules=(*rules.rules, replace(rule, id="the-other")))
    with pytest.raises(UsageError, match=f"is set twice, by {rule.id} and the-other"):
        make_cluster_env(node, host, both)


def test_what_is_no_lock(tmp_path):
    with pytest.raises(UsageError, match="name a wheelhouse"):
        locked_versions(tmp_path)
    for text, says in (
        ("torch==2.11.0\n", "locks none of vllm, triton, nccl"),
        ("vllm==0.25.1\nvllm==0.28.0\n", r"locks vllm 0\.25\.1 and 0\.28\.0"),
    ):
        (tmp_path / "requirements.txt").write_text(text)
        with pytest.raises(UsageError, match=says):
            locked_versions(tmp_path)
