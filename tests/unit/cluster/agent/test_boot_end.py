"""The end of an earlier boot, by journals and figures that are whole, foreign or missing."""

import json
import os
import time
import uuid

import pytest

from patchkit.cluster.agent.boot_end import read_boot_end
from patchkit.cluster.agent.memory_record import open_record, put_record, record_path
from patchkit.doctor.boot import boot_findings
from support import write_files

BOOT = "0123456789ab4cdefedcba9876543210"
AT = 1_795_964_690  # seconds since 1970
JOURNAL = """\
#!/bin/sh
case $* in
  *--boot=-1*--dmesg*) cat kernel;;
  *--boot=-1*) cat entries;;
  *) echo "No such boot" >&2; exit 1;;
esac
"""
KERNEL = """\
2026-11-29T03:11:58+00:00 spark NVRM: nvAssertFailedNoLog: NV_ERR_NO_MEMORY (0x00000051)
2026-11-29T03:11:59+00:00 spark usb 1-1: new device
"""
SHUTDOWN = "Reached target shutdown.target - System Shutdown."


@pytest.fixture
def journal(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, {"journalctl": JOURNAL}, mode=0o755)

    def write(*texts, kernel=""):
        entries = [
            {"_BOOT_ID": BOOT, "__REALTIME_TIMESTAMP": f"{AT}000000", "MESSAGE": text}
            for text in texts
        ]
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        write_files(tmp_path, {"entries": lines + "no JSON\n", "kernel": kernel})

    write()
    yield write
    monkeypatch.undo()
    time.tzset()


def figures(*lines, boot=None):
    boot = boot or str(uuid.UUID(BOOT))
    put_record(
        open_record("vllm", boot), "".join(f"{line}\n" for line in lines).encode()
    )


@pytest.mark.parametrize(
    ("texts", "lines", "about", "says"),
    [
        (
            ["x"],
            [],
            "boot-reset",
            "at 2026-11-29 15:04:50; how much memory was left is not known",
        ),
        (
            ["x"],
            [f"{AT - 9} 4000", f"{AT - 1} 1126"],
            "boot-reset",
            "1.1 GiB of memory were left 1 s",
        ),
        (
            ["x"],
            [f"{AT + 5} 1126"],
            "boot-reset",
            "at 2026-11-29 15:04:55; 1.1 GiB of memory were left 0",
        ),
        (["x"], [f"{AT - 99} 1126 ended"], "boot-reset", "is not known"),
        (
            ["x", SHUTDOWN, "y"],
            [f"{AT} 9 ended"],
            "boot-orderly",
            "in order at 2026-11-29 15:04:50",
        ),
        ([["x"], "Journal stopped"], [], "boot-orderly", "in order"),
        # Nobody knows which boot figures are of: the one asked for may have none.
        (
            [],
            [f"{AT} 2048"],
            "boot-unread",
            "in some earlier boot 2.0 GiB of memory were left at 2026-11-29 15:04:50",
        ),
        ([], ["-1 nan"], "boot-unread", "there are no figures of an earlier boot"),
        ([], [], "boot-unread", "there are no figures of an earlier boot"),
    ],
)
def test_how_a_boot_ended(journal, texts, lines, about, says):
    if lines:
        figures(*lines)
    journal(*texts)
    (finding,) = boot_findings("spark-1", read_boot_end("vllm", -1))
    assert (finding.about, says in finding.what) == (about, True), finding.what


def test_lines_of_the_driver_are_named(journal):
    journal("x", kernel=KERNEL)
    _reset, driver = boot_findings("spark-1", read_boot_end("vllm", -1))
    assert driver.what.startswith(
        "1 lines of trouble in the kernel's log of that boot; the first: "
    )
    assert "NV_ERR_NO_MEMORY" in driver.what


def test_a_boot_that_nobody_kept_is_told_with_journalctl_s_reason(journal):
    figures(f"{AT} 2048")  # of the one before
    (finding,) = boot_findings("spark-1", read_boot_end("vllm", -2))
    assert "No such boot" in finding.what


def test_the_newest_figures_are_told(journal):
    for number, age in enumerate((300, 100, 200)):
        boot = str(uuid.UUID(int=number))
        figures(f"{AT + number} 2048", boot=boot)
        path = record_path("vllm", boot)
        os.utime(path, (time.time() - age,) * 2)
    assert "at 2026-11-29 15:04:51" in read_boot_end("vllm", -1).unread
