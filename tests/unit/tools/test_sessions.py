"""Read noxfile and the workflows that write: what they run, for whom, with what rights."""

import re
from collections import ChainMap
from pathlib import Path

import pytest
import yaml

import noxfile
from patchkit.errors import PatchkitError, UsageError
from patchkit.patching.recipe import load_recipe
from patchkit.source.releases import load_facts
from support import readme
from tools.build import shared_out
from tools.new_releases import new_releases
from tools.nightly import PARTS
from tools.wheel_jobs import jobs

BOTH = ("vllm", "nccl")
ROOT = Path(__file__).parents[3]
FILES = [
    ROOT / ".github/workflows" / name
    for name in ("wheels.yml", "releases.yml", "nightly.yml")
]
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")
needs_workflow = pytest.mark.skipif(
    not FILES[0].exists(), reason="an sdist has no .github/"
)


def workflow():
    files = [yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"] for file in FILES]
    return dict(ChainMap(*files))


def steps():
    for name, job in workflow().items():
        for step in job["steps"]:
            yield name, step


def test_each_release_is_a_wheelhouse():
    assert jobs("0.33.0, 0.25.1  0.33.0\n", "2.30.7") == [
        {"name": "vllm-0.33.0", "vllm": "0.33.0", "nccl": ""},
        {"name": "vllm-0.25.1", "vllm": "0.25.1", "nccl": ""},
        {"name": "nccl-2.30.7", "vllm": "", "nccl": "2.30.7"},
    ]
    assert [job["vllm"] for job in jobs("", "2.30.7")] == [""]
    assert [job["vllm"] for job in jobs(" ", "")] == [str(load_recipe("vllm").newest)]


def test_what_cannot_be_built_is_refused_before_a_machine_starts():
    for vllm, nccl, says in (
        ("$(id)", "", "'$(id)' is not a version"),
        ("0.25.1;id", "", "'0.25.1;id' is not a version"),
        ("0.25.1+a", "", "vllm 0.25.1+a is not a release"),
        ("0.99.0", "", "vllm 0.99.0 is not a release"),
        ("0.10.0", "", "vllm 0.10.0 is not supported"),
        ("0.19.0", "", "torch 2.10.0 for CUDA 13 is not on the package index"),
        ("", "2.28.3", "nccl 2.28.3 is not supported"),
        ("", "--help", "'--help' is not a version"),
    ):
        with pytest.raises(PatchkitError, match=f"^{re.escape(says)}"):
            jobs(vllm, nccl)


def test_what_is_new_on_the_index_is_entered_once():
    default = load_facts("nccl").default
    offered = [
        f"vllm-{load_recipe('vllm').newest}-py3-none-any.whl",
        "vllm-0.99.0.tar.gz",
    ]
    offered += [f"vllm-0.99.{end}-py3-none-any.whl" for end in ("0", "0", "1rc1", "1")]
    offered += [
        f"torch-9.{end}-py3-none-any.whl" for end in ("7.0", "7.1+cu132", "8.0rc1")
    ]
    offered += [
        f"nvidia_nccl_cu13-{version}-py3-none-any.whl"
        for version in (default, "2.99.1")
    ]
    assert new_releases(offered, ["refs/heads/release/vllm-0.99.1"]) == [
        {"name": "nccl-2.99.1", "release": "nccl 2.99.1"},
        {"name": "torch-9.7", "release": f"nccl {default}"},
        {"name": "vllm-0.99.0", "release": "vllm 0.99.0"},
    ]


@needs_workflow
def test_its_steps_are_sessions_that_run_anywhere():
    sessions = {
        named or function
        for named, function in re.findall(
            r'@nox\.session(?:\((?:name="([\w-]+)"|[^)]*)\))?\ndef (\w+)', NOXFILE
        )
    }
    assert {"tests", "lint", "build-vllm", "wheel-jobs"} <= sessions
    runs = [step["run"] for _, step in steps() if "run" in step]
    named = re.findall(r"bin/nox -s ([\w-]+)", "\n".join(runs))
    expected = {
        "build-vllm",
        "build-nccl",
        "repro",
        "cross-proof",
        "new-releases",
        "add-release",
    }
    expected |= {"nightly"}
    assert expected <= {*named, *PARTS}
    assert {*named, *PARTS} <= sessions
    assert workflow()["part"]["strategy"]["matrix"]["part"] == [*PARTS]
    assert f"repack vllm=={readme.release()}\n" in "\n".join(runs)


@needs_workflow
def test_nothing_of_the_repository_runs_with_the_right_to_write():
    """Who changes the code of a build cannot make a release of it, or sign something else."""
    writing = {
        name: {right for right, level in job["permissions"].items() if level == "write"}
        for name, job in workflow().items()
        if "write" in job["permissions"].values()
    }
    assert writing == {
        "attest": {"id-token", "attestations"},
        "release": {"contents"},
        "propose": {"contents", "pull-requests"},
    }
    code = ("actions/checkout", "nox", "pip ")
    for name, step in steps():
        assert name not in writing or not any(each in str(step) for each in code), step


@needs_workflow
def test_no_text_of_somebody_becomes_a_script_and_no_action_can_change():
    taken = set()
    for _, step in steps():
        assert "${{" not in step.get("run", ""), step
        if action := step.get("uses"):
            taken.add(action)
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action)
    assert len({action.partition("@")[0] for action in taken}) == len(taken) == 4


def test_every_program_that_a_session_runs_is_there():
    modules = re.findall(r'_module\(session, "([\w.]+)"', NOXFILE)
    assert len(modules) > 10
    for name in modules:
        folder = ROOT if name.startswith("tools.") else ROOT / "tests"
        place = folder / name.replace(".", "/")
        assert (
            place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()
        ), name


class NotedSession:
    """A session of nox that only notes what it is to install and to run."""

    def __init__(self, *words):
        self.posargs = [*words]
        self.steps = []

    def log(self, _text):
        pass

    def install(self, *_words):
        self.steps.append("install")

    def run(self, *words, **_options):
        self.steps.append(" ".join(words[3:]))


@pytest.mark.parametrize("project", BOTH)
def test_a_plan_of_a_build_installs_nothing(project):
    session = NotedSession("--dry-run")
    noxfile._build(session, project)
    assert session.steps == [f"{project} {project} -- --dry-run"]

    session = NotedSession()
    noxfile._build(session, project)
    assert session.steps == ["install", "install", f"{project} {project} --"]


def test_an_option_goes_to_who_takes_it():
    for words, vllm, nccl in (
        ("--vllm 1 --nccl 2 --jobs 8", "--version 1 --jobs 8", "--version 2 --jobs 8"),
        ("--vllm=0.25.1 --offline", "--version=0.25.1 --offline", "--offline"),
        ("--extensions a,b --functions f", "--extensions a,b", "--functions f"),
        ("--dry-run", "--dry-run", "--dry-run"),
    ):
        assert shared_out(words.split(), BOTH) == {
            "vllm": vllm.split(),
            "nccl": nccl.split(),
        }
    for words, projects, message in (  # what none or both would take
        (
            "--nonsense 1",
            BOTH,
            "--nonsense: neither `patchkit build vllm` nor `patchkit build n",
        ),
        (
            "--version 0.25.1",
            BOTH,
            "both builds take it\n  next: say --vllm X.Y.Z and --nccl X.Y",
        ),
        ("--nccl 2.30.7", ["vllm"], "--nccl: `patchkit build vllm` does not take it"),
    ):
        with pytest.raises(UsageError, match=message):
            shared_out(words.split(), projects)
