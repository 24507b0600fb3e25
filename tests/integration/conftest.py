"""`patchkit build`, run as its users run it, but for where it builds."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest

from patchkit.proof import upstream_code
from support.building import PATCHKIT, QUIET, SMALL, SMALL_VLLM
from support.layout import compiled
from support.needed import need_toolchain


@pytest.fixture(scope="module")
def run_here():
    """Run the code of releases, which are locked by hash, in this process.

    A child for each of some thousand questions would take long.
    """
    with upstream_code.permitted():
        yield


@pytest.fixture(scope="session")
def toolchain():
    """What builds for a CPU, or a skip that says what is missing: ``toolchain("aarch64")``."""
    return need_toolchain


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """Small stand-ins of libnccl and of torch's libraries, linked as in their wheels."""
    return compiled(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def project():
    """What a module builds: nccl, unless it has a fixture of this name."""
    return "nccl"


@pytest.fixture
def sources(project, tmp_path):
    """A tree of the stand-in with one text replaced: ``sources(path, before, after)``."""

    def change(path, before, after):
        root = tmp_path / "sources"
        shutil.copytree({"nccl": SMALL, "vllm": SMALL_VLLM}[project], root)
        text = (root / path).read_text()
        assert text.count(before) == 1
        (root / path).write_text(text.replace(before, after))
        return root

    return change


@pytest.fixture
def run(project, environment, tmp_path):
    """Start `patchkit build` in a process group of its own, building below ``work``."""

    def start(work, *arguments, env=None, **how):
        return subprocess.Popen(
            [*PATCHKIT, str(work), "build", project, *map(str, arguments)],
            cwd=tmp_path,
            env={
                k: v
                for k, v in {**environment, **QUIET, **(env or {})}.items()
                if v is not None
            },
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
        assert process.returncode in (rc if isinstance(rc, tuple) else (rc,)), (
            stdout + stderr
        )
        return SimpleNamespace(stdout=stdout, stderr=stderr)

    return done
