"""Read what a node tells of full disks, processes that the kernel killed, and a lost address."""

import json
import os
from datetime import UTC, datetime

import pytest

from patchkit.cluster.agent.health import look_for_troubles, memory_kills
from patchkit.cluster.agent.node_state import end_group, read_units
from patchkit.doctor.symptoms.findings import explain_failed_start
from support import write_files

NOW = datetime(2026, 11, 28, 18, tzinfo=UTC).timestamp()
# As `dmesg --time-format=iso` and `journalctl --output=short-iso` write them.
KERNEL = (
    "2026-11-28T16:30:00,000001+00:00 Out of memory: Killed process 7 (an hour ago) total-vm:9kB",
    "2026-11-28T17:24:01,500000+00:00 Memory cgroup out of memory: Killed process 123 (VLLM::W) t",
    "2026-11-28T17:25:00+0000 spark1 kernel: Out of memory: Killed process 9 (python3) total-vm:9",
    "2026-11-28T17:26:00,000000+00:00 oom_reaper: reaped process 9 (python3), now anon-rss:0kB",
    "Killed process of another form",
)


def test_what_the_kernel_killed_for_memory():
    assert list(memory_kills(KERNEL, NOW)) == [
        "VLLM::W (process 123) at 2026-11-28 17:24:01",
        "python3 (process 9) at 2026-11-28 17:25:00",
    ]


def test_an_address_of_the_start_that_the_node_has_lost():
    found = look_for_troubles({"address": "203.0.113.9"})
    assert found.lost == ("203.0.113.9" if found.addresses else "")
    assert look_for_troubles({"address": next(iter(found.addresses), "")}).lost == ""
    assert look_for_troubles({}).lost == ""
    assert found.disks


UNREAD = "echo 'not permitted' >&2\nexit 1"


@pytest.mark.parametrize(
    ("kernel", "told", "count"),
    [
        (UNREAD, "A process of this unit has been killed by the OOM killer.", 1),
        ("", "A process of this unit has been killed by the OOM killer.", 0),
        (UNREAD, "systemd-oomd killed 12 process(es) in this unit.", 1),
        ("", "systemd-oomd killed 12 process(es) in this unit.", 1),
    ],
)
def test_systemd_tells_of_kills_that_the_kernel_s_log_does_not_show(
    tmp_path, monkeypatch, kernel, told, count
):
    """The log may be for root alone, and has nothing of systemd-oomd."""
    line = f"2026-11-28T17:24:01+0000 a systemd[9]: x: {told}"
    programs = {
        "dmesg": f"#!/bin/sh\n{kernel}\n",
        "journalctl": f"#!/bin/sh\ncase $* in *USER_UNIT=x*) echo '{line}';; esac\n",
        "ip": "#!/bin/sh\necho []\n",
    }
    write_files(tmp_path, programs, mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = look_for_troubles({"unit": "x"})
    assert found.killed == ("a process of x at 2026-11-28 17:24:01",) * count


def test_the_kernel_s_line_stands_where_it_belongs_in_the_journal(
    tmp_path, monkeypatch
):
    """Between a unit's own lines, and only what was this user's, so that it is the first cause."""
    user, zone = os.getuid(), "+00:00"
    kills = [
        f"2026-11-28T17:00:00,000000{zone} Out of memory: Killed process 1 (old) UID:{user} x",
        f"2026-11-28T18:00:05,000000{zone} Out of memory: Killed process 2 (VLLM::W) UID:{user} x",
        f"2026-11-28T18:00:05,000000{zone} Out of memory: Killed process 3 (else) UID:{user + 1} x",
    ]
    begun = datetime(2026, 11, 28, 18, tzinfo=UTC).timestamp()
    texts = {0: "loading", 10: "Worker proc VllmWorker-1 died unexpectedly"}
    entries = [
        json.dumps(
            {
                "USER_UNIT": "x",
                "MESSAGE": text,
                "__REALTIME_TIMESTAMP": str(round(at * 1e6)),
            }
        )
        for at, text in ((begun + second, text) for second, text in texts.items())
    ]
    write_files(
        tmp_path, {"kernel": "\n".join(kills), "entries": "\n".join([*entries, ""])}
    )
    programs = {
        "dmesg": f"#!/bin/sh\ncat {tmp_path}/kernel\n",
        "journalctl": f"#!/bin/sh\ncat {tmp_path}/entries\n",
    }
    write_files(tmp_path, programs, mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    lines = list(read_units(["x"]))
    killed = f"Out of memory: Killed process 2 (VLLM::W) UID:{user} x"
    assert [line.text for line in lines] == [texts[0], killed, texts[10]]
    assert (
        explain_failed_start([("a", line) for line in lines], "").what == f"a: {killed}"
    )


def test_a_node_that_ends_its_units_is_looked_at_once(tmp_path, monkeypatch):
    """The kernel's log takes seconds, and so does nvidia-smi."""
    units = ["patchkit-x.service", "patchkit-x-alive.service"]
    fields = "ActiveState=inactive\\nSubState=dead\\nNRestarts=0"
    shown = "\\n\\n".join(f"Id={unit}\\n{fields}" for unit in units)
    text = "frozen: it was killed"
    entry = {"USER_UNIT": units[1], "__REALTIME_TIMESTAMP": "1000000", "MESSAGE": text}
    programs = {
        "dmesg": f"#!/bin/sh\necho dmesg >> {tmp_path}/calls\n",
        "nvidia-smi": f"#!/bin/sh\necho nvidia-smi >> {tmp_path}/calls\n",
        "systemctl": f"#!/bin/sh\nprintf '{shown}\\n'\n",
        "journalctl": f"#!/bin/sh\ncat {tmp_path}/entry\n",
    }
    write_files(tmp_path, programs, mode=0o755)
    write_files(tmp_path, {"entry": json.dumps(entry) + "\n"})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    state = end_group("x", units, disable=False)
    assert state.frozen.endswith(text)
    assert sorted((tmp_path / "calls").read_text().split()) == ["dmesg", "nvidia-smi"]
