"""Which words of one call of nox go to which build."""

from __future__ import annotations

import pytest

from patchkit.errors import UsageError
from tools.build import shared_out

BOTH = ("vllm", "nccl")


def test_an_option_goes_to_who_takes_it():
    for words, vllm, nccl in (
        (
            "--vllm 0.25.1 --nccl 2.30.7 --jobs 8",
            "--version 0.25.1 --jobs 8",
            "--version 2.30.7 --jobs 8",
        ),
        ("--vllm=0.25.1 --offline", "--version=0.25.1 --offline", "--offline"),
        (
            "--extensions a,b --functions f",
            "--extensions a,b",
            "--functions f",
        ),
        ("--dry-run", "--dry-run", "--dry-run"),
    ):
        assert shared_out(words.split(), BOTH) == {"vllm": vllm.split(), "nccl": nccl.split()}


@pytest.mark.parametrize(
    ("words", "projects", "message"),
    [
        (
            "--nonsense 1",
            BOTH,
            "--nonsense: neither `patchkit build vllm` nor `patchkit build nccl` takes it",
        ),
        (
            "--version 0.25.1",
            BOTH,
            "both builds take it\n  next: say --vllm X.Y.Z and --nccl X.Y.Z",
        ),
        ("--nccl 2.30.7", ["vllm"], "--nccl: `patchkit build vllm` does not take it"),
    ],
)
def test_what_none_or_both_would_take_is_an_error(words, projects, message):
    with pytest.raises(UsageError, match=message):
        shared_out(words.split(), projects)
