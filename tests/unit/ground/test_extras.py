"""Which libraries are missing, and the command that installs them."""

import importlib.metadata
import os
import platform
import sys
import tomllib
from pathlib import Path

from patchkit.errors import HostError
from patchkit.extras import BASE, BUILD, require_libraries
from support import run_program
from support.needed import need

REPOSITORY = Path(__file__).parents[3]


def test_the_libraries_are_those_of_the_dependencies():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    distributions = {line.partition(">")[0] for line in project["dependencies"]}
    brought = importlib.metadata.packages_distributions()
    assert {brought[name][0].lower() for name in BASE} == distributions - {"click"}
    extra = {
        line.partition(">")[0] for line in project["optional-dependencies"]["build"]
    }
    names = {name.replace("_", "-") for name in BUILD}
    assert names - {"tvm-ffi"} == extra - {"apache-tvm-ffi==0.1.11"}
    require_libraries(BASE)


def test_a_verb_that_needs_the_extra_says_so_first(cli, tmp_path):
    """Before it resolves, downloads or reads anything: there is no network, and no folder."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.modules['auditwheel'] = None\n"
    )
    blocked = {"PYTHONPATH": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"}
    said = cli("build", "nccl", "--dir", tmp_path / "none", env=blocked, rc=9).stderr
    assert "not installed: auditwheel" in said
    assert "its extra 'build'" in said
    assert " -m pip install " in said
    assert "[build]" in said


def test_a_plan_takes_no_extra(cli, tmp_path):
    """What the build itself will want is told, and stops nothing."""
    need("make")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.modules['auditwheel'] = None\n"
    )
    blocked = {"PYTHONPATH": str(tmp_path), "CXX": "/bin/true"}
    words = (
        "build",
        "nccl",
        "--cpu",
        platform.machine(),
        "--dir",
        tmp_path / "none",
        "--dry-run",
    )
    said = cli(*words, env=blocked).stdout
    assert "not installed: auditwheel" in said
    assert "[build]" in said
    assert "it could start" in said


def test_a_library_that_an_import_misses_is_no_internal_error(tmp_path):
    """``requests`` comes with pypi-simple, which is there."""
    code = "import sys; sys.modules['requests'] = None; import patchkit.cli; patchkit.cli.main()"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    words = (sys.executable, "-c", code, "fetch", "vllm==0.24.0")
    done = run_program(*words, rc=HostError.exit_code, env=env)
    assert done.stdout == ""
    assert done.stderr.startswith("error: not installed: requests\n")
