"""What a person is answered: ten lines, the next command, and what is meant by a slip."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from patchkit.patching.recipe import load_recipe
from support import hosts
from support.terminal import piped

RELEASE = "0.24.0"
LINES = 12  # ten, and the words that a terminal of 80 columns breaks off


@pytest.fixture
def house(tmp_path):
    place = tmp_path / "house"
    place.mkdir()
    return place


# Ten lines


@pytest.mark.releases
def test_apply_and_status_say_it_in_ten_lines_and_all_with_v(cli, tree):
    root = tree(RELEASE)
    before = cli("status", root).stdout
    applied = cli("apply", root).stdout
    after = cli("status", root).stdout

    for said in (before, applied, after):
        assert len(said.splitlines()) <= LINES
    assert "→ to apply, required: arch_lists, arch_autodetect, deepgemm_sm12x\n" in before
    assert "✓ applied, required: arch_lists, arch_autodetect, deepgemm_sm12x\n" in applied
    assert re.search(r"✓ \d+ files changed in ", applied)
    assert "✓ applied, required: arch_lists" in after
    # What was not done and not asked for is a number; -v has every fix.
    ids = [fix.id for fix in load_recipe().fixes]
    assert "sm100_lists" not in applied
    whole = cli("status", root, "-v").stdout
    assert [line.split()[1] for line in whole.splitlines()[2:]] == ids
    applied = cli("apply", root, "-v").stdout
    assert not [fix for fix in ids if fix not in applied]


# The next command


def nexts(said):
    """The commands after ``next:``, that are for this machine."""
    return [line.partition(": ")[2] for line in said.splitlines() if line.startswith("next:")]


def paste(line, cwd, environment):
    done = subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done


@pytest.mark.releases
def test_what_status_and_a_dry_run_name_is_pasted_and_applies(cli, tree, tmp_path, environment):
    root = tree(RELEASE, name="sp ace")
    options = (root, "--only", "version_label")
    (applies,) = nexts(cli("apply", *options, "--dry-run").stdout)
    assert nexts(cli("status", *options).stdout) == [applies]
    assert "1 file changed" in paste(applies, tmp_path, environment).stdout


def test_what_env_names_is_pasted_and_serves(cli, tmp_path, environment):
    root = hosts.build(tmp_path, "single")
    done = cli("env", "--role", "single", "--root", root, "--vllm", "0.25.1", "-o", "a b.env")
    (serves,) = nexts(done.stdout)
    assert "vllm serve" in paste(f"{serves} --root {root}", tmp_path, environment).stdout


def test_patchkit_is_named_as_it_was_started(cli, tmp_path, environment):
    """Of an environment that PATH does not lead to, as of ``python -m patchkit``."""
    started = tmp_path / "venv" / "bin" / "patchkit"
    started.parent.mkdir(parents=True)
    started.write_text(
        "#!/bin/sh\n"
        f"exec {shlex.quote(cli('--version').args[0])} -c \"import sys; sys.argv[0] = '$0'\n"
        'from patchkit.cli import main; main()" "$@"\n'
    )
    started.chmod(0o755)
    relative = "venv/bin/patchkit"
    done = subprocess.run(
        [relative, "verify", "nowhere"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"or make it: {relative} repack vllm==X.Y.Z --dir nowhere" in done.stderr


# Lists


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("9.9", "vllm 9.9 is not one of the 32 known releases, 0.11.1 to "),
        ("0.25.1", ""),
    ],
)
def test_fixes_of_a_release_that_is_none(version, says):
    said = piped(["fixes", "--version", version], 0)
    assert says in said
    assert said.startswith("note ") == bool(says)
    assert "version_label" in said


# Slips


@pytest.mark.parametrize(
    ("arguments", "rc", "says"),
    [
        (["aply", "x y"], 2, "patchkit apply 'x y'\n"),
        (["xyz"], 2, "`patchkit --help` lists them"),
        (["apply", "vlm==0.25.1"], 2, "did you mean vllm==0.25.1?"),
        (["apply", "0.25.1"], 2, "did you mean vllm==0.25.1 or nccl==0.25.1?"),
        (["repack", "vlm==0.25.1"], 2, "did you mean vllm==0.25.1?"),
        (["apply", "vllm==banana"], 2, "next: for example vllm==0.24.0"),
        (["revert", "vllm==0.23.0"], 2, "nothing of it is patched in build/vllm-0.23.0"),
        (["apply", "--trget", "gb10", "x"], 2, "`patchkit apply --help` lists"),
        (["build", "nccl", "--cpu", "sparc"], 2, "not one of 'aarch64', 'x86_64'"),
        (["fixes", "--json", "--nosuch"], 2, '"exit_code": 2'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_is_answered_with_what_may_be_meant(arguments, rc, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in piped(arguments, rc)
