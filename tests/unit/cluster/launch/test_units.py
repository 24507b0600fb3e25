"""Units of a group: what is written for each node, and that systemd takes it."""

import json
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def read_back(line):
    """Split a command line as systemd.syntax(7) says: quotes, C escapes, %% and $$."""
    words, word, quote, at = [], None, "", 0
    escapes = {"n": "\n", "t": "\t", "s": " ", "\\": "\\", '"': '"', "'": "'"}
    raw = b""
    while at < len(line):
        c = line[at]
        if c == "\\":
            kind = line[at + 1]
            if kind == "x":
                raw += bytes([int(line[at + 2 : at + 4], 16)])
                at += 4
            else:
                raw += escapes[kind].encode()
                at += 2
            word = True
        elif quote and c == quote:
            quote, at = "", at + 1
        elif not quote and c in "\"'":
            quote, word, at = c, True, at + 1
        elif not quote and c in " \t":
            if word:
                words.append(raw)
            raw, word, at = b"", None, at + 1
        else:
            raw, word, at = raw + c.encode(), True, at + 1
    if word:
        words.append(raw)
    return [each.decode().replace("%%", "%").replace("$$", "$") for each in words]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@given(st.lists(TEXT, min_size=1, max_size=4))
def test_any_words_come_back(words):
    line = unit_line(["/bin/vllm", *words])
    assert "\n" not in line
    assert read_back(line) == ["/bin/vllm", *words]
