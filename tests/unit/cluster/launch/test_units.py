"""Units of a group: what is written for each node, and that systemd takes it."""

import json
import shutil
import subprocess

import pytest

from patchkit.cluster.launch.units import unit_line
from tools import golden_units
from tools.golden_units import CASES


@pytest.mark.parametrize("case", CASES)
def test_files_are_those_of_the_golden(case, tmp_path):
    stored = golden_units.DATA / f"{case}.txt"
    found = golden_units.text(golden_units.units(case, tmp_path))
    assert found == stored.read_text(), "look at it, then run tools/golden_units.py"


@pytest.mark.parametrize("case", CASES)
def test_systemd_takes_the_units(case, tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    for number, files in enumerate(golden_units.units(case, tmp_path).node_files()):
        folder = tmp_path / f"rank{number}"
        folder.mkdir()
        names = [name for name in files if name.endswith(".service")]
        for name in names:
            # The programs are on the nodes alone.
            text = files[name].replace("/home/spark/.local/share/patchkit/venv/bin/", "/bin/sh #")
            (folder / name).write_text(text.replace("/bin/sh #", "/usr/bin/env "))
        for name in names:
            asked = [str(folder / name.replace("@.", "@1."))]
            done = subprocess.run(
                ["systemd-analyze", "--user", "verify", *asked],
                capture_output=True,
                text=True,
                env={
                    "SYSTEMD_UNIT_PATH": f"{folder}:",
                    "PATH": "/usr/bin:/bin",
                    "HOME": str(tmp_path),
                    "XDG_RUNTIME_DIR": str(tmp_path),
                },
            )
            said = [line for line in done.stderr.splitlines() if "patchkit" in line]
            assert (done.returncode, said) == (0, [])


def test_one_id_for_all_nodes_and_another_for_another_start(tmp_path):
    def ids(case):
        files = golden_units.units(case, tmp_path).node_files()
        return {json.loads(each["group.json"])["id"] for each in files}

    assert len(ids("pair")) == 1
    assert ids("pair") == ids("pair")
    assert ids("pair") != ids("pair-ray")


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("a b", '"a b"'),
        ('say "$x"', '"say \\"$$x\\""'),
        ("50%", "50%%"),
        ("a\\b\n", '"a\\\\b\\x0a"'),
    ],
)
def test_words_are_written_as_systemd_reads_them(word, written):
    assert unit_line(["/bin/vllm", word]) == f"/bin/vllm {written}"
