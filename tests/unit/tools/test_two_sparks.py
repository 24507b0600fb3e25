"""The page about a workstation and two Sparks: stand-ins, and what is left out, are told."""

from __future__ import annotations

import subprocess

import pytest

from e2e.proofs import two_sparks
from e2e.proofs.build_proof import reduced_options


def steps(folder):
    for title in two_sparks.TITLES:
        yield from two_sparks.PAGE.steps(title, folder)


def test_what_does_not_run_here_is_named(tmp_path):
    told = [*steps(tmp_path)]
    left_out = [step for step in told if not step.runs]
    assert {step.text.split()[0] for step in left_out} == {"sudo", "rsync", "scp", "patchkit"}
    assert all(step.why for step in left_out)
    assert len(left_out) < len(told) / 2
    script = "\n".join(two_sparks.PAGE.script(title, tmp_path) for title in two_sparks.TITLES)
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    assert script.count("SKIPPED: ") == len(left_out)


def test_both_sparks_get_the_same_from_the_workstation(tmp_path):
    """Each is named in every way that wheels take, and takes them by hash."""
    for title in ("Both Sparks get the same files", "Or from a server"):
        lines = [step.text for step in two_sparks.PAGE.steps(title, tmp_path)]
        one, two = ([each for each in lines if name in each] for name in ("spark-1", "spark-2"))
        assert [each.replace("spark-1", "spark-2") for each in one] == two != []
    installs = [step.text for step in steps(tmp_path) if "pip install -" in step.text]
    assert len(installs) == 3
    assert all("--require-hashes" in each for each in installs)


def test_the_reduced_build_is_the_one_of_the_proof():
    options = two_sparks.SMALL_VLLM.split()
    assert sorted(options) == sorted(reduced_options(two_sparks.release()))


@pytest.mark.parametrize("package", ["g++-aarch64-linux-gnu", "make", "python3-venv"])
def test_the_machine_of_the_proof_has_what_the_page_installs(package):
    assert package in two_sparks.packages()
