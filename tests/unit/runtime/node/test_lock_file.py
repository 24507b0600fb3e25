"""Versions that a node will have, from the lock of a wheelhouse."""

from __future__ import annotations

import pytest

from patchkit.errors import UsageError
from patchkit.runtime.envfile.env_file import locked_versions

HASH = f"--hash=sha256:{'0' * 64}"
LOCK = f"""\
# Written by patchkit wheelhouse fill
nvidia-nccl-cu13==2.30.7+gb10.abc ; platform_machine == "aarch64" {HASH}
nvidia-nccl-cu13==2.30.7+gb10.def ; platform_machine == "x86_64" {HASH}
torch==2.11.0 {HASH}
triton==3.6.0 {HASH}
vllm==0.25.1+cu130.gb10.052ae12432 {HASH}
"""


def test_public_versions_by_file_and_by_folder(tmp_path):
    (tmp_path / "requirements.txt").write_text(LOCK)
    known = {"vllm": "0.25.1", "triton": "3.6.0", "nccl": "2.30.7"}
    assert locked_versions(tmp_path) == known
    assert locked_versions(tmp_path / "requirements.txt") == known


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("torch==2.11.0\n", "locks none of vllm, triton, nccl"),
        ("vllm==0.25.1\nvllm==0.28.0\n", r"locks vllm 0\.25\.1 and 0\.28\.0"),
        (None, "name a wheelhouse"),
    ],
)
def test_what_is_no_lock(text, says, tmp_path):
    if text is not None:
        (tmp_path / "requirements.txt").write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        locked_versions(tmp_path)
    assert caught.value.hint
