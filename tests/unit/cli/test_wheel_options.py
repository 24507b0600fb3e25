"""One word for the CPU in all verbs about wheels; the former ones go on working, unseen."""

from __future__ import annotations

from click.testing import CliRunner

from patchkit.cli.wheel import build, build_vllm, repack, wheelhouse

CASES = [
    (repack.command, ["a.whl"], "--cpu", "--platform", "x86_64"),
    (build.nccl, [], "--cpu", "--host", "x86_64"),
    (build_vllm.command, [], "--cpu", "--host", "x86_64"),
    (wheelhouse.fill_wheels, [], "--python-version", "--python", "3.11"),
]


def test_former_spellings_mean_the_same():
    for command, arguments, option, former, value in CASES:
        now, then = (
            command.make_context("x", [*arguments, spelling, value]).params
            for spelling in (option, former)
        )
        assert now == then
        assert value in now.values()
        words = CliRunner().invoke(command, ["--help"]).output.split()
        assert (option in words, former in words) == (True, False)
