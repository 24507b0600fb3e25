"""`patchkit build nccl`, run as its users run it, but for where it builds."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from building import PATCHKIT, QUIET
from patchkit.errors import PatchkitError
from patchkit.wheel.toolchain import find_toolchain


@pytest.fixture(scope="session")
def toolchain():
    """What builds for a CPU, or a skip that says what is missing: ``toolchain("aarch64")``."""

    def find(machine):
        try:
            return find_toolchain(machine)
        except PatchkitError as error:
            return pytest.skip(f"{error.what}; {error.hint}")

    return find


@pytest.fixture
def run(environment, tmp_path):
    """Start `patchkit build nccl` in a process group of its own, building below ``work``."""

    def start(work, *arguments, env=None, **how):
        return subprocess.Popen(
            [*PATCHKIT, str(work), "build", "nccl", *map(str, arguments)],
            cwd=tmp_path,
            env={k: v for k, v in {**environment, **QUIET, **(env or {})}.items() if v is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **how,
        )

    return start


@pytest.fixture
def build(run, tmp_path):
    """The same, waited for: what it said. A traceback is never right."""

    def done(*arguments, rc=0, work=tmp_path / "work", **how):
        process = run(work, *arguments, **how)
        stdout, stderr = process.communicate(timeout=300)
        assert "Traceback" not in stderr, stderr
        assert process.returncode in (rc if isinstance(rc, tuple) else (rc,)), stdout + stderr
        return SimpleNamespace(stdout=stdout, stderr=stderr)

    return done
