"""Inspection against NVIDIA's own tool, on wheels from the package index; and the command itself.

tests/data/wheels.toml locks the wheels. PATCHKIT_ALL_WHEELS=1 reads the large ones too.
"""

import json
import os
import platform
import re
import subprocess
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from patchkit.source.releases import LockEntry
from patchkit.wheel.device.inspect import LIVE
from support.wheels import inspected_wheel

DATA = Path(__file__).parents[2] / "data"
LIBRARIES = DATA / "libraries"
GOLDEN = DATA / "inspected.json"
TABLE = tomllib.loads((DATA / "wheels.toml").read_text(encoding="utf-8"))["wheel"]
EVERY = os.environ.get("PATCHKIT_ALL_WHEELS") == "1"
WHEELS = {
    re.sub(r"-py3-.*(aarch64|x86_64)\.whl", r"-\1", wheel["filename"]): wheel
    for wheel in TABLE
    if "machine" not in wheel and (EVERY or not wheel.get("session"))
}
BLOCK = re.compile(
    r"^Fatbin (?P<kind>elf|ptx|nvvm) code:\n=+\narch = sm_(?P<arch>\w+)\n"
    r"(?P<rest>(?:\w.*\n)*)",
    re.MULTILINE,
)
KINDS = {"elf": "sass", "ptx": "ptx", "nvvm": "lto"}


@pytest.fixture(scope="module")
def wheel_of(fetched):
    """The wheel of a row of the table."""
    keys = ("version", "filename", "sha256", "size")
    return lambda row: fetched(
        row["project"], LockEntry(**{key: row[key] for key in keys})
    )


@pytest.fixture(scope="module")
def cuobjdump(wheel_of, tmp_path_factory):
    """What NVIDIA's tool lists of a library: kind, arch, compressed; None if it refuses it."""
    machine = platform.machine()
    wheel = next((each for each in TABLE if each.get("machine") == machine), None)
    if wheel is None:
        pytest.skip(f"there is no cuobjdump for {machine}")
    folder = tmp_path_factory.mktemp("cuobjdump")
    with zipfile.ZipFile(wheel_of(wheel)) as bundle:
        program = Path(bundle.extract("nvidia/cu13/bin/cuobjdump", folder))
    program.chmod(0o755)

    def listed(library, *options):
        command = [str(program), *options, str(library)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if "Invalid ELF" in done.stderr:
            return None
        empty = "does not contain device code" in done.stdout + done.stderr
        assert done.returncode == 0 or empty, done.stderr
        return Counter(
            (
                KINDS[block["kind"]],
                block["arch"],
                "compressed" in block["rest"].split("\n"),
            )
            for block in BLOCK.finditer(done.stdout)
        )

    return listed


@pytest.mark.e2e
@pytest.mark.parametrize("name", WHEELS)
def test_cuobjdump_lists_the_same(name, wheel_of, cuobjdump, tmp_path):
    path = wheel_of(WHEELS[name])
    binaries = inspected_wheel(path)
    assert (
        sum(bool(b.live or b.relocatable) for b in binaries) == WHEELS[name]["binaries"]
    )
    refused = WHEELS[name].get("refused", [])

    def found(entries):
        return Counter(
            (e.kind, e.arch.gencode, e.compression != "none") for e in entries
        )

    with zipfile.ZipFile(path) as bundle:
        for binary in binaries:
            library = bundle.extract(binary.name, tmp_path)
            # Without -all it leaves __nv_relfatbin out, unless there is nothing else.
            live, everything = cuobjdump(library), cuobjdump(library, "-all")
            Path(library).unlink()
            if binary.name in refused:
                assert live is everything is None, binary.name
            else:
                assert live == found(binary.live or binary.relocatable), binary.name
                assert everything == found(binary.live + binary.relocatable), (
                    binary.name
                )


@pytest.mark.parametrize(
    ("name", "target", "says"),
    [
        ("stock", "gb10", "(GB10): compatible ("),
        (
            "archs",
            "h200",
            "on NVIDIA H200: none (",
        ),
        (
            "gb10",
            "thor",
            "on NVIDIA Jetson AGX Thor: none (",
        ),
    ],
)
def test_the_conclusion(cli, name, target, says):
    assert says in cli("inspect", LIBRARIES / f"{name}.so", "--target", target).stdout


def test_the_command_as_json(cli):
    done = json.loads(cli("inspect", LIBRARIES / "gb10.so", "--json").stdout)
    assert (done["target"], done["wheel"], done["findings"]) == ("gb10", None, [])
    (binary,) = done["binaries"]
    assert (binary["name"], binary["machine"], binary["loads"]) == (
        "gb10.so",
        "aarch64",
        "exact",
    )
    assert binary["at_least"] == {"GLIBC": "GLIBC_2.29"}
    code = {
        "section": LIVE,
        "kind": "sass",
        "arch": "sm_100f",
        "count": 1,
        "size": 1328,
    }
    assert binary["codes"][0] == {**code, "compression": "zstd"}


# Wheels


def shortened(said):
    """Of what `inspect --json` says of a wheel, what the golden table keeps."""
    kept = (
        "name",
        "size",
        "machine",
        "needed",
        "rpath",
        "runpath",
        "cuda",
        "loads",
        "use",
    )
    kept += ("at_least", "fat_binaries")
    return {
        "wheel": {
            key: value for key, value in said["wheel"].items() if key != "requires"
        },
        "findings": [[each["where"], each["what"]] for each in said["findings"]],
        "binaries": {
            each["name"]: {key: each[key] for key in kept}
            | {
                "live": {
                    c["arch"]: c["count"] for c in each["codes"] if c["section"] == LIVE
                }
            }
            for each in said["binaries"]
        },
    }


@pytest.mark.parametrize(
    "name", [name for name in WHEELS if name.startswith(("vllm", "torchv"))]
)
def test_a_wheel_is_as_recorded(name, wheel_of, cli):
    """PATCHKIT_RECORD=1 writes the table anew."""
    table = json.loads(GOLDEN.read_text())
    said = shortened(
        json.loads(cli("inspect", wheel_of(WHEELS[name]), "--json").stdout)
    )
    if os.environ.get("PATCHKIT_RECORD") == "1":
        GOLDEN.write_text(
            json.dumps({**table, name: said}, indent=1, sort_keys=True) + "\n"
        )
    assert table[name] == said


def test_what_speaks_against_a_wheel(wheel_of, cli):
    """A released torchvision, as a person is shown it; the table has it as JSON."""
    wheel = wheel_of(WHEELS["torchvision-0.29.2-aarch64"])
    shown = cli("inspect", wheel).stdout
    rows = {
        line.split()[3]: line.split()
        for line in shown.splitlines()
        if ".so" in line[20:]
    }
    stable = rows["torchvision/_C_stable.so"]
    assert (stable[:2], stable[4:7]) == (["compatible", "13"], ["80", "90", "100"])
    assert rows["torchvision.libs/libnvjpeg.4a0b5c81.so.13"][:2] == ["exact", "-"]
    assert "of 2 libraries with device code: 1 exact, 1 compatible" in shown
    assert "section" not in shown
