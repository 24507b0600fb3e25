"""Complete command lines as bash asks for it."""

from __future__ import annotations

import subprocess

import pytest


@pytest.mark.parametrize(
    ("words", "count", "completed"),
    [
        ("patchkit rev", "1", "revert"),
        ("patchkit build vllm --exte", "3", "--extensions"),
        ("patchkit explain deepgemm_s", "2", "deepgemm_sm12x"),
        ("patchkit apply --target th", "3", "thor"),
        ("patchkit build nccl --version 2.29.7", "4", "2.29.7"),
        ("patchkit env --role head --with ptxas-t", "5", "ptxas-thor"),
        ("patchkit serve-args openai/gpt-oss-120", "2", "openai/gpt-oss-120b"),
    ],
)
def test_the_bash_completion_script_completes(cli, tmp_path, words, count, completed):
    script = tmp_path / "completion.bash"
    script.write_text(cli("completion", "bash").stdout)
    asked = {"COMP_WORDS": words, "COMP_CWORD": count, "_PATCHKIT_COMPLETE": "bash_complete"}

    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert cli(env=asked).stdout.split() == [f"plain,{completed}"]
