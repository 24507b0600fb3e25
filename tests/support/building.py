"""How tests build libnccl and vLLM: from small stand-ins, below a folder that they name."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

_DATA = Path(__file__).parents[1] / "data"
SMALL = _DATA / "nccl_small"
VERSION = "2.27.7"
SMALL_VLLM = _DATA / "vllm_small"
VLLM_VERSION, TORCH = "0.27.99", "2.15.0"
HERE = platform.machine()
QUIET = {"CCACHE_DISABLE": "1"}
PATCHKIT = [
    sys.executable,
    "-c",
    """\
import sys
from pathlib import Path
from patchkit.wheel.build import work
work.WORK = Path(sys.argv.pop(1))
from patchkit.cli import main
main()
""",
]


def wheels(house):
    """What is in a wheelhouse, half-written wheels under any name included."""
    if not house.exists():
        return []
    assert not [path for path in house.rglob("*") if path.name.endswith((".part", ".tmp", ".new"))]
    return sorted(house.glob("*.whl"))


def until(text, log, process):
    """Wait until the log says so; the build must still be running then."""
    deadline = time.monotonic() + 120
    while not (log.exists() and text in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def interrupted(start, log, text, sent, *, everything):
    """Start a build, wait for its log to say ``text``, and end all of it or patchkit alone."""
    process = start()
    until(text, log, process)
    (os.killpg if everything else os.kill)(process.pid, sent)
    stderr = process.communicate()[1]
    assert process.returncode
    assert "Traceback" not in stderr


def gone_on_with(start):
    """The same command again, once nothing of the first run holds the folder any more."""
    for _ in range(60):
        process = start()
        said = process.communicate()[1]
        if process.returncode != 6:  # what patchkit started holds the folder until it ends
            break
        assert "another patchkit is working" in said
        time.sleep(0.5)
    assert process.returncode == 0, said


def a_disk_that_fills_up(build, arguments, disk, rooms):
    """Wherever the files (``rooms``) end, the error says so; with more of them the build goes on.

    ``disk`` is a tmpfs where it builds, ``arguments`` end with the wheelhouse.
    """
    house = Path(arguments[-1])
    for room in rooms:
        subprocess.run(["mount", "-o", f"remount,nr_inodes={room}", disk], check=True)
        said = build(*arguments, work=disk, rc=(7, 10)).stderr
        assert "No space left on device" in said or f"the disk of {disk}" in said
        assert "run " in said.rpartition("next:")[2]
        assert wheels(house) == []
    subprocess.run(["mount", "-o", "remount,nr_inodes=0", disk], check=True)
    build(*arguments, work=disk)
