"""An installed vLLM: its Python is patched in place, and pip still knows every file."""

import csv
import json
import sys

import pytest

from patchkit.apply import apply
from support import run_program, wheels, write_files
from support.vllm_wheels import python_of

pytestmark = pytest.mark.releases
# Release → the fixes that an installed package of it gets.
_NVFP4 = ("nvfp4_linear_marlin", "nvfp4_moe_marlin")
PYTHON_FIXES = {
    "0.11.1": {*_NVFP4, "mxfp4_moe_marlin", "fastsafetensors_rank"},
    # Wheels: FP8 kernels may be traps, and Marlin MoE is PTX.
    "0.19.1": {
        *(
            "fp8_grouped_gemm",
            "marlin_w4a8_fp8",
            "fp8_linear_torch",
            "nvfp4_linear_marlin",
        ),
        "shm_spin",
    },
    "0.24.0": {*_NVFP4, "deepgemm_sm12x", "shm_spin"},
}


@pytest.fixture(params=PYTHON_FIXES)
def version(request):
    return request.param


@pytest.fixture
def wheel(release, version, recipe, tmp_path):
    """A wheel of the Python files of a release, and of what its MoE layers look up."""
    root = release(version)
    files = {
        "vllm/__init__.py": (root / "vllm/__init__.py").read_bytes(),
        **python_of(root),
    }
    return wheels.write_wheel(
        tmp_path, version, project="vllm", tag="py3-none-any", files=files
    )


@pytest.fixture
def environment_folder(tmp_path):
    folder = tmp_path / "venv"
    run_program(sys.executable, "-m", "venv", "--without-pip", folder)
    return folder


@pytest.fixture
def pip(environment_folder):
    """This interpreter's pip, working on an environment of its own."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(environment_folder / "bin/python"),
    ]

    return lambda *arguments: run_program(*command, *arguments).stdout


@pytest.fixture
def package(pip, wheel, environment_folder):
    """site-packages/vllm, installed by pip, beside a torch of which proofs shall know nothing."""
    pip("install", "--no-deps", "--no-index", wheel)
    package = next(environment_folder.glob("lib/python*/site-packages/vllm"))
    names = ("torch/__init__.py", "flashinfer/__init__.py")
    write_files(
        package.parent, dict.fromkeys(names, "from .lazily import everything\n")
    )
    return package


def wrong_hashes(site_packages):
    """Rows of RECORD that do not describe what lies there."""
    (record,) = site_packages.glob("vllm-*.dist-info/RECORD")
    rows = list(csv.reader(record.read_text().splitlines()))
    listed = {row[0] for row in rows}
    there = {
        str(path.relative_to(site_packages))
        for folder in (site_packages / "vllm", record.parent)
        for path in folder.rglob("*")
        if path.is_file()
    }
    wrong = [f"{path} is not listed or not there" for path in sorted(there ^ listed)]
    for path, digest, size in rows:
        data = (site_packages / path).read_bytes() if path in there else b""
        line = wheels.record("", {path: data}).decode().partition("\n")[0]
        if digest and [[path, digest, size]] != [*csv.reader([line])]:
            wrong.append(f"{path} has another hash or size")
    return wrong


def test_python_is_patched_and_pip_agrees_at_every_step(
    cli, pip, package, version, snapshot, recipe, ask
):
    site_packages = package.parent
    source = ["--vllm-src", package]
    installed = snapshot(site_packages)
    assert not wrong_hashes(site_packages)

    first = json.loads(cli("apply", *source, "--json").stdout)
    patched = snapshot(site_packages)

    states = {fix["id"]: fix["state"] for fix in first["fixes"]}
    assert (first["kind"], first["version"]) == ("installed", version)
    assert {fix for fix, state in states.items() if state == "applied"} == PYTHON_FIXES[
        version
    ]
    assert {states[fix.id] for fix in recipe.fixes if fix.layer == "build"} == {
        "not-applicable"
    }
    assert [path for path in first["written"] if path.endswith(".py")]
    assert patched != installed
    assert not wrong_hashes(site_packages)
    assert "No broken requirements" in pip("check")

    again = apply(package, recipe, ask())
    assert (again.written, snapshot(site_packages)) == ((), patched)

    cli("revert", *source)
    assert snapshot(site_packages) == installed
    assert not wrong_hashes(site_packages)
