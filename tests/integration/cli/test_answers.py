"""What a person is answered: ten lines, the next command, and patchkit as it was started."""

import re
import shlex

import pytest

from patchkit.errors import UsageError
from patchkit.patching.recipe import load_recipe
from support import hosts, run_program, write_files

RELEASE = "0.24.0"
LINES = 12  # ten, and the words that a terminal of 80 columns breaks off


@pytest.mark.releases
def test_apply_and_status_say_it_in_ten_lines_and_all_with_v(cli, tree):
    root = tree(RELEASE)
    before = cli("fixes", root).stdout
    applied = cli("apply", root).stdout
    after = cli("fixes", root).stdout

    for said in (before, applied, after):
        assert len(said.splitlines()) <= LINES
    assert (
        "→ to apply, required: arch_lists, arch_autodetect, deepgemm_sm12x\n" in before
    )
    assert (
        "✓ applied, required: arch_lists, arch_autodetect, deepgemm_sm12x\n" in applied
    )
    assert re.search(r"✓ \d+ files changed in ", applied)
    assert "✓ applied, required: arch_lists" in after
    # What was not done and not asked for is a number; -v has every fix.
    ids = [fix.id for fix in load_recipe("vllm").fixes]
    assert "sm100_lists" not in applied
    whole = cli("fixes", root, "-v").stdout
    assert [line.split()[1] for line in whole.splitlines()[2:]] == ids
    applied = cli("apply", root, "-v").stdout
    assert not [fix for fix in ids if fix not in applied]


def nexts(said, word="next"):
    """The commands after ``next:``, that are for this machine."""
    return [
        line.partition(": ")[2]
        for line in said.splitlines()
        if line.startswith(f"{word}:")
    ]


@pytest.fixture
def paste(tmp_path, environment):
    """Run a command as if it were pasted; what it printed."""

    return lambda line: (
        run_program("bash", "-c", line, cwd=tmp_path, env=environment).stdout
    )


@pytest.mark.releases
def test_what_is_named_is_pasted_to_apply_and_to_undo(cli, tree, tmp_path, paste):
    root = tree(RELEASE, name="sp ace $(touch x) `touch y` 'q' \x1b[2J")
    options = (root, "--only", "version_label")
    (applies,) = nexts(cli("apply", *options, "--dry-run").stdout)
    assert nexts(cli("fixes", *options).stdout) == [applies]
    said = paste(applies)
    assert "1 file changed" in said
    assert (root / ".patchkit" / "ledger.json").is_file()

    (undo,) = nexts(said, "undo")
    assert "as upstream shipped" in paste(undo)
    assert not (root / ".patchkit" / "ledger.json").exists()
    assert {place.name for place in tmp_path.iterdir()} == {root.name}


def test_what_env_names_is_pasted_and_serves(cli, tmp_path, paste):
    root = hosts.build(tmp_path, "single")
    done = cli(
        "env", "--role", "single", "--root", root, "--vllm", "0.25.1", "-o", "a b.env"
    )
    (serves,) = nexts(done.stdout)
    assert "vllm serve" in paste(f"{serves} --root {root}")


def test_patchkit_is_named_as_it_was_started(cli, tmp_path, environment):
    """Of an environment that PATH does not lead to, as of ``python -m patchkit``."""
    started = (
        "#!/bin/sh\n"
        f"exec {shlex.quote(cli('--version').args[0])} -c \"import sys; sys.argv[0] = '$0'\n"
        'from patchkit.cli import main; main()" "$@"\n'
    )
    write_files(tmp_path, {"venv/bin/patchkit": started}, mode=0o755)
    words = ["venv/bin/patchkit", "verify", "nowhere"]
    done = run_program(*words, rc=UsageError.exit_code, cwd=tmp_path, env=environment)
    assert (
        f"or make it: {words[0]} repack vllm=={load_recipe('vllm').newest} --dir nowhere"
        in done.stderr
    )
