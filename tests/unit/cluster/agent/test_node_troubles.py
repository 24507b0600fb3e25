"""What a node tells of full disks, processes that the kernel killed, and a lost address."""

import time

from patchkit.cluster.agent.node_troubles import look_for_troubles, memory_kills
from support import write_files

NOW = time.mktime((2026, 11, 28, 18, 0, 0, 0, 0, -1))
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


def test_a_user_who_may_not_read_the_kernel_s_log_is_told_by_systemd(tmp_path, monkeypatch):
    told = "2026-11-28T17:24:01+0000 a systemd[9]: x: A process of this unit has been killed by the"
    programs = {
        "dmesg": "#!/bin/sh\necho 'not permitted' >&2\nexit 1\n",
        "journalctl": f"#!/bin/sh\ncase $* in *USER_UNIT=x*) echo '{told} OOM killer.';; esac\n",
        "ip": "#!/bin/sh\necho []\n",
    }
    write_files(tmp_path, programs, mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = look_for_troubles({"unit": "x"})
    assert found.killed == ("a process of x at 2026-11-28 17:24:01",)
