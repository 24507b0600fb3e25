"""`patchkit native` and `--native` on small wheels and environments with real libraries."""

import json
import shutil

import pytest

from support import write_files
from support.needed import need_ptxas
from support.vllm_wheels import LIBRARIES
from support.wheels import write_wheel

PTX, STOCK = (
    (LIBRARIES / f"{name}.so").read_bytes() for name in ("ptx-aarch64", "stock")
)
TAG = "py3-none-manylinux_2_24_aarch64"
FILES = {"kernels/ptx.so": PTX, "kernels/stock.so": STOCK, "kernels/__init__.py": b""}


@pytest.fixture(autouse=True)
def _ptxas():
    need_ptxas()


@pytest.fixture
def wheel(tmp_path):
    return write_wheel(tmp_path / "in", "1.2", project="kernels", tag=TAG, files=FILES)


@pytest.fixture
def site(tmp_path, wheel):
    """An environment that has the wheel, and a library of NVIDIA's."""
    folder = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    own = {"nvidia/cu13/lib/libcublas.so.13": PTX}
    nvidia = write_wheel(
        tmp_path / "in", "13.0", project="nvidia-cublas", tag=TAG, files=own
    )
    for each in (wheel, nvidia):
        shutil.unpack_archive(each, folder, "zip")
    return folder


def test_a_wheel_is_listed(cli, wheel):
    listed = json.loads(cli("native", wheel, "--json").stdout)["libraries"]
    assert {each["name"]: each["compiled"] for each in listed} == {
        "kernels/ptx.so": 3,
        "kernels/stock.so": 0,
    }
    shown = cli("native", wheel).stdout
    assert "3 fat binaries are compiled at first use" in shown
    assert "--write" not in shown


@pytest.mark.parametrize("name", ["ours.so", "kernels-1.2-py3-none-any.whl"])
def test_only_an_environment_is_written(cli, tmp_path, name):
    (tmp_path / name).write_bytes(PTX)
    refused = cli("native", name, "--write", rc=2).stderr
    assert "takes an environment" in refused
    assert "patchkit repack NAME==X.Y.Z --native" in refused


def test_a_library_alone_is_listed(cli, tmp_path):
    library = tmp_path / "ours.so"
    library.write_bytes(PTX)
    listed = cli("native", library)
    assert "are compiled at first use" in listed.stdout
    assert "--write" not in listed.stdout


@pytest.mark.parametrize("target", ["gb10", "thor"])
def test_the_next_step_compiles_for_the_device_that_was_judged(cli, site, target):
    shown = cli("native", site, "--target", target).stdout
    assert f"native {site} --target {target} --write" in " ".join(shown.split())


def test_an_environment(cli, site, snapshot):
    before = snapshot(site)
    done = json.loads(cli("native", site.parents[2], "--write", "--json").stdout)
    assert [library["name"] for library in done["libraries"]] == ["kernels/ptx.so"]
    assert (site / "kernels/ptx.so").read_bytes() != PTX
    assert (site / "nvidia/cu13/lib/libcublas.so.13").read_bytes() == PTX
    left = json.loads(cli("native", site, "--json").stdout)["libraries"]
    assert {each["name"] for each in left if each["compiled"]} == {
        "nvidia/cu13/lib/libcublas.so.13"
    }
    assert "nothing to do" in cli("native", site, "--write").stdout
    cli("native", site, "--revert")
    assert snapshot(site) == before


def test_a_line_of_an_environment_that_leads_out_of_it_is_passed_over(
    cli, site, tmp_path
):
    outside = tmp_path / "outside.so"
    outside.write_bytes(PTX)
    (record,) = site.glob("kernels-*.dist-info/RECORD")
    lines = (outside, "../outside.so", f"{'a' * 256}.so", f"{'a/' * 2100}b.so")
    before = "".join(f"{line},,\n" for line in lines)
    record.write_text(before + record.read_text())
    done = json.loads(cli("native", site, "--write", "--json").stdout)
    assert [library["name"] for library in done["libraries"]] == ["kernels/ptx.so"]
    assert outside.read_bytes() == PTX
    cli("native", site, "--revert")
    assert (site / "kernels/ptx.so").read_bytes() == PTX


DAMAGED = "damaged/ptx.so"


@pytest.mark.parametrize(
    ("files", "assembled"),
    [
        ({"RECORD": bytes(range(256))}, []),
        ({"METADATA": b"Name: ../../outside\nVersion: 1.0\n"}, [DAMAGED]),
        ({"METADATA": b"Name: other\nVersion: 1.0\n"}, [DAMAGED]),
    ],
)
def test_a_damaged_package_leaves_the_others_of_an_environment(
    cli, site, files, assembled
):
    home = {"METADATA": b"Name: damaged\nVersion: 1.0\n", "RECORD": f"{DAMAGED},,\n"}
    write_files(site / "damaged-1.0.dist-info", {**home, **files})
    write_files(site, {DAMAGED: PTX})
    done = json.loads(cli("native", site, "--write", "--json").stdout)
    names = [library["name"] for library in done["libraries"]]
    assert names == [*assembled, "kernels/ptx.so"]
    cli("native", site, "--revert")
    for name in (DAMAGED, "kernels/ptx.so"):
        assert (site / name).read_bytes() == PTX
