"""A receiver and a sender on loopback: by a connection, and by a program in ib_write_bw's place."""

import contextlib
import os
import socket
import threading

import pytest

from patchkit.cluster.agent.bandwidth import has_tool, receive, transmit
from patchkit.cluster.net.checks import judge_rate
from patchkit.errors import HostError
from support import write_files
from support.needed import need

TOKEN = "0123456789abcdef" * 2
HERE, LO = "127.0.0.2", "lo"
# It listens or connects as perftest 24.01 does, and prints the table of NVIDIA's guide.
TOOL = """\
#!/usr/bin/env python3
import socket, sys
words = sys.argv[1:]
if "--help" in words:
    sys.exit(print("      --bind_source_ip  Source IP"))
port = int(words[words.index("-p") + 1])
if "--bind_source_ip" in words:
    listener = socket.create_server(("PLACE" or words[-1], port))
    listener.accept()[0].recv(1)
else:
    socket.create_connection((words[-1], port), 5).send(b"x")
print(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
print(" 65536      1768045          0.00               92.57              0.176564")
"""


def finish(parts):
    """Go on to the end, which is an error if a stranger came."""
    with contextlib.suppress(OSError):
        list(parts)


@contextlib.contextmanager
def receiving(*words):
    """The port of a receiver that another thread runs; it has ended after the block."""
    parts = receive(HERE, TOKEN, 0.5, *words)
    port = next(parts)
    rest = threading.Thread(target=finish, args=[parts])
    rest.start()
    yield port
    rest.join(20)
    assert not rest.is_alive()


def listening(address, port):
    """Whether somebody takes a connection."""
    try:
        socket.create_connection((address, port), 1).close()
    except OSError:
        return False
    return True


def test_one_sender_with_the_token_is_taken():
    with receiving() as port:
        assert not listening("127.0.0.4", port)
        assert 0.01 < transmit(HERE, port, LO, TOKEN, 0.5) < 2000
        assert not listening(HERE, port)


def test_a_sender_without_the_token_is_sent_away_and_no_other_one_is_taken():
    with receiving() as port:
        with pytest.raises(HostError, match=f"{HERE} port {port}: another program"):
            transmit(HERE, port, LO, TOKEN[::-1], 0.5)
        assert not listening(HERE, port)


def test_a_receiver_that_is_ended_does_not_listen():
    parts = receive(HERE, TOKEN, 0.5)
    port = next(parts)
    assert listening(HERE, port)
    parts.close()
    assert not listening(HERE, port)


def test_a_stranger_in_the_receivers_place_gets_no_data():
    with socket.create_server((HERE, 0)) as stranger:
        stranger.settimeout(5)
        port = stranger.getsockname()[1]
        with pytest.raises(HostError, match="timed out"):
            transmit(HERE, port, LO, TOKEN, 0.5)


@pytest.mark.parametrize("place", ["", "0.0.0.0"])
def test_ib_write_bw(tmp_path, monkeypatch, place):
    need("ss")
    tool = write_files(tmp_path, {"ib_write_bw": TOOL.replace("PLACE", place)}, 0o755)
    monkeypatch.setenv("PATH", f"{tool}:{os.environ['PATH']}")
    assert has_tool()
    words = ["-d", "rocep1s0f0", "-x", "3"]
    if place:
        with pytest.raises(HostError, match=f"does not listen at {HERE} alone"):
            next(receive(HERE, TOKEN, 1, words))
        return
    with receiving(words) as port:
        assert transmit(HERE, port, LO, TOKEN, 1, words) == 92.57


@pytest.mark.parametrize(
    ("gbits", "halves", "by", "level", "words"),
    [
        (13.23, 1, "ib_write_bw", "error", "13 Gb/s of a cable plugged in"),
        (24.3, 2, "ib_write_bw", "warning", "24 Gb/s of an owner"),
        (92.57, 1, "ib_write_bw", "ok", "92 to 112"),
        (98, 2, "ib_write_bw", "warning", "185 to 200"),
        (189.85, 2, "ib_write_bw", "ok", "185 to 200"),
        (12.86, 1, "sockets", "warning", "or a busy core"),
        (96, 1, "sockets", "note", "does not tell"),
        (0, 1, "ib_write_bw", "error", "less than"),
    ],
)
def test_classes_that_owners_measured(gbits, halves, by, level, words):
    found = judge_rate(gbits, halves, by, "a to b")
    assert (found.level, words in found.what) == (level, True)
