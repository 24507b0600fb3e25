"""`patchkit cluster install` on two nodes: real sshd, rsync, venv and pip, small real wheels."""

import json

import pytest

from patchkit.wheel.wheelhouse.storage import add_wheel
from support import write_files
from support.filling import FACTS, OURS, THIS, fill
from support.layout import NCCL, TORCH, VERSION, link
from support.needed import need
from support.ssh_server import obstacle, ssh_server
from support.wheels import HERE, write_wheel

NODES = ("spark-1", "spark-2")
LINK = ".local/share/patchkit/venv"
SO = "libnccl.so.2"
LOADED = f"lib/python{THIS}/site-packages/nvidia/nccl/lib/{SO}"


@pytest.fixture
def house(tmp_path, cli):
    """A filled wheelhouse: a vLLM, an NCCL, and the torch that they need."""
    folder, house = tmp_path / "made", tmp_path / "wheelhouse"
    offered = folder / "offered"
    vllm = write_wheel(folder, "0.25.1", project="vllm", requires=["torch==2.11.0"])
    add_wheel(house, vllm, FACTS)
    add_wheel(house, nccl_wheel(folder, OURS), FACTS)
    library = link(
        folder / "libtorch_cuda.so", TORCH, needs=[folder / SO], soname="t.so"
    )
    files = {
        "torch/__init__.py": b"",
        "torch/lib/libtorch_cuda.so": library.read_bytes(),
    }
    files["torch/version.py"] = (VERSION % "'13.0'").encode()
    needs = ["nvidia-cudnn-cu13", "nvidia-nccl-cu13==2.28.9"]
    write_wheel(
        offered, "2.11.0", project="torch", tag=HERE, files=files, requires=needs
    )
    write_wheel(offered, "9.0", project="nvidia-cudnn-cu13", tag="py3-none-any")
    fill(cli, offered, "--python-version", THIS)
    return house


def nccl_wheel(folder, version):
    """Return a wheel with a real library, which says its version."""
    release = version.partition("+")[0]
    source = NCCL % (22809, release) + f'const char build[] = "{version}";'
    library = link(folder / SO, source, soname=SO)
    files = {f"nvidia/nccl/lib/{SO}": library.read_bytes()}
    return write_wheel(folder, version, files=files)


@pytest.fixture
def homes(tmp_path):
    """The home folder of each node."""
    for name in NODES:
        (tmp_path / name).mkdir()
    return {name: tmp_path / name for name in NODES}


@pytest.fixture
def install(homes, house, cli, tmp_path):
    """Run `patchkit cluster install`: what it printed."""
    need("rsync")
    if why := obstacle():
        pytest.skip(why)
    describe(tmp_path, *NODES)
    with ssh_server(tmp_path / "ssh", *NODES, homes=homes) as path:
        env = {
            "PATH": path,
            "XDG_RUNTIME_DIR": str(tmp_path),
            "HOME": str(tmp_path / "launcher"),
        }

        def run(*words, rc=0):
            done = cli("cluster", "install", *words, rc=rc, env=env)
            return (
                json.loads(done.stdout)
                if "--json" in words
                else done.stdout + done.stderr
            )

        yield run


def describe(folder, *nodes):
    """Write cluster.toml; without nodes there is none."""
    text = "".join(f'[[node]]\nssh = "{name}"\n' for name in nodes)
    file = folder / "cluster.toml"
    if text:
        file.write_text(text)
    else:
        file.unlink()


def leads(homes):
    return [(home / LINK).resolve().name for home in homes.values()]


def test_fresh_again_and_another(install, homes, house, cli, tmp_path):
    fresh = install("--json")
    first = fresh["nodes"][0]["name"]
    assert [each["changed"] for each in fresh["nodes"]] == [True, True]
    assert [(c["node"], c["wheels"]) for c in fresh["copies"]] == [
        ("spark-1", 4),
        ("spark-2", 4),
    ]
    versions = {"vllm": "0.25.1", "torch": "2.11.0", "nvidia_cudnn_cu13": "9.0"}
    assert fresh["nodes"][1]["versions"] == {**versions, "nvidia_nccl_cu13": OURS}
    assert {each["nccl"] for each in fresh["nodes"]} == {LOADED}
    assert [each["warnings"] for each in fresh["nodes"]] == [[], []]
    assert leads(homes) == [first, first]
    again = install("--json")
    assert (again["copies"], [each["changed"] for each in again["nodes"]]) == (
        [],
        [False, False],
    )
    assert "as it is" in install()
    add_wheel(house, nccl_wheel(tmp_path / "later", "2.28.9+gb10.def456"), FACTS)
    fill(cli, tmp_path / "made/offered", "--python-version", THIS)
    later = install("--json")
    second = later["nodes"][0]["name"]
    assert [each["wheels"] for each in later["copies"]] == [1, 1]
    assert (leads(homes), second != first) == ([second] * 2, True)


@pytest.mark.parametrize(
    "nodes",
    [(), ("localhost",), ("localhost", "spark-2"), ("spark-1", "localhost")],
    ids=["no file", "this machine", "as head", "as worker"],
)
def test_this_machine_is_a_node_like_others(install, homes, tmp_path, nodes):
    describe(tmp_path, *nodes)
    homes["localhost"] = tmp_path / "launcher"
    first, again = install("--json"), install("--json")
    names = nodes or ("localhost",)
    assert [each["node"] for each in first["nodes"]] == [*names]
    assert [(copy["node"], copy["wheels"]) for copy in first["copies"]] == [
        (n, 4) for n in names
    ]
    assert again["copies"] == []
    assert leads({name: homes[name] for name in names}) == [
        first["nodes"][0]["name"]
    ] * len(names)


SMI = """\
#!/bin/sh
case $HOME in */spark-2) echo 'NVIDIA Thor, 11.0, 580.00, [N/A], 00000000:01:00.0';; esac
"""


def test_a_node_with_another_device_is_told(install, tmp_path):
    write_files(tmp_path / "ssh/bin", {"nvidia-smi": SMI}, mode=0o755)
    note = "NVIDIA Thor (11.0) is no gb10, for which the wheels were made"
    assert [each["note"] for each in install("--json")["nodes"]] == ["", note]
    assert note in install()


@pytest.mark.parametrize("state", ["active", "inactive"])
def test_an_environment_from_which_a_unit_runs_is_not_made_anew(
    install, homes, tmp_path, state
):
    """Another pip changed it; systemd is a stand-in, that says how the unit is."""
    name = install("--json")["nodes"][0]["name"]
    venv = homes["spark-2"] / ".local/share/patchkit/venvs" / name
    unit = {
        "patchkit-vllm.service": f"[Service]\nExecStart={venv}/bin/vllm serve a/b\n"
    }
    write_files(homes["spark-2"] / ".config/systemd/user", unit)
    write_files(
        tmp_path / "ssh/bin", {"systemctl": f"#!/bin/sh\necho {state}\n"}, mode=0o755
    )
    (record,) = venv.glob("lib/python3*/site-packages/vllm-*.dist-info/RECORD")
    with record.open("a") as file:
        file.write("x.py,sha256=a,1\n")
    if state == "active":
        assert "patchkit-vllm.service runs from it" in install(rc=9)
        assert "x.py" in record.read_text()
    else:
        install()
        assert "x.py" not in record.read_text()


def test_a_disk_without_room(install, homes, small_disk):
    """It fills up meanwhile: then no half is left."""
    disk = small_disk("size=200m,nr_inodes=500,mode=755")
    homes["spark-2"].rmdir()
    homes["spark-2"].symlink_to(disk)
    assert "spark-2: " in (found := install(rc=7))
    assert "the disk is full; the environment takes" in found
    assert not (homes["spark-1"] / LINK).exists()
    assert not list(disk.glob(".local/share/patchkit/venvs/*"))


def test_another_python_and_an_unfilled_wheelhouse_are_said_before_a_copy(
    install, homes, house, cli, tmp_path
):
    other = "3.12" if THIS != "3.12" else "3.13"
    fill(cli, tmp_path / "made/offered", "--python-version", other)
    said = install(rc=9)
    assert f"has Python {THIS}, and the wheels are for {other}" in said
    assert not (homes["spark-1"] / ".local").exists()
