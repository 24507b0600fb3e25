"""What `patchkit verify` finds, in terminals and in pipes."""

from __future__ import annotations

import click

from patchkit.cli.render import finding_blocks
from patchkit.errors import UsageError
from patchkit.finding import finding

NAME = "nvidia_nccl_cu13-2.30.7+gb10.0123456789-py3-none-manylinux_2_35_aarch64.whl"
DROP = f"patchkit wheelhouse prune --dir /srv/wheelhouse --drop {NAME}"
WHAT = f"is for torch 2.13.0, which pins NCCL 2.29.7; here is nvidia-nccl-cu13==2.30.7 [{'x' * 40}]"
FOUND = (
    finding(UsageError, NAME, WHAT, DROP, "beside that torch pip takes stock's"),
    finding(UsageError, "other.whl", "is not in manifest.json", DROP),
    finding(UsageError, NAME, "needs torch==2.13.0", DROP, "beside that torch pip takes stock's"),
)


def test_in_a_pipe_each_thing_is_a_line(monkeypatch):
    # How patchkit was started is how its commands are spelled.
    monkeypatch.setattr("sys.argv", ["patchkit", "verify"])
    assert list(map(click.unstyle, finding_blocks(FOUND))) == [
        *(f"✗ {NAME}", f"  {WHAT}", "  needs torch==2.13.0"),
        *("  why:   beside that torch pip takes stock's", f"  next:  {DROP}"),
        *("✗ other.whl  is not in manifest.json", f"  next:  {DROP}"),
    ]
