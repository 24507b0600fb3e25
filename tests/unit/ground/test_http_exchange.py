"""The one client that asks a server: where the key goes, and that every answer ends."""

import time

import pytest

from patchkit.http_exchange import HttpServer
from support.local_server import LocalServer, QuietHandler

KEY = "sk-CANARY-0123456789"


class Hostile(QuietHandler):
    """Answers by the path, and keeps what was asked, with which key."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.seen.append((self.path, self.headers["Authorization"]))
        path, _, rest = self.path.lstrip("/").partition("/")
        self.close_connection = True
        if path == "redirect":
            self.send(302, b"", Location=f"{self.server.other}/v1/stolen")
        elif path == "continue":
            self._write_for_ever(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif path == "head":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            self._write_for_ever(b"X", 0.05)
        elif path in ("body", "slow"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            pause = 0.05 if path == "slow" else 0
            self._write_for_ever(b"x" * (1 if pause else 65536), pause)
        elif path == "short":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx 12")
        else:
            self.send(200, self.server.bodies.get(rest, b"{}"))

    do_POST = do_GET

    def _write_for_ever(self, piece, pause=0.0):
        try:
            while not self.server.over:
                self.wfile.write(piece)
                time.sleep(pause)
        except OSError:
            return


@pytest.fixture
def hostile():
    with LocalServer(Hostile) as server, LocalServer(Hostile) as other:
        for each in (server, other):
            each.seen, each.over, each.bodies = [], False, {}
        server.other, server.stranger = other.url, other
        yield server
        server.over = other.over = True


def test_no_redirection_is_followed_and_the_key_stays(hostile):
    answer = HttpServer(hostile.url, KEY).ask("/redirect")
    assert (answer.status, hostile.stranger.seen) == (302, [])


@pytest.mark.parametrize(
    ("path", "keyed"),
    [
        ("/health", False),
        ("/metrics", False),
        ("/version", False),
        ("/is_paused", False),
        ("/v1evil", False),
        ("/v1/models", True),
        ("/v1/completions", True),
        ("/pooling", True),
    ],
)
def test_the_key_goes_to_the_paths_that_want_it(hostile, path, keyed):
    HttpServer(hostile.url, KEY).ask(path)
    assert hostile.seen == [(path, f"Bearer {KEY}" if keyed else None)]


def test_no_proxy_of_the_environment_is_asked(hostile, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, hostile.other)
    assert HttpServer(hostile.url, KEY).ask("/v1/models").status == 200
    assert (hostile.stranger.seen, len(hostile.seen)) == ([], 1)


@pytest.mark.parametrize(
    ("path", "trouble"),
    [
        ("/continue", "no answer in 1 s"),
        ("/head", "no answer in 1 s"),
        ("/slow", "not done after 1 s"),
    ],
)
def test_one_clock_ends_an_answer_without_an_end(hostile, path, trouble):
    answer = HttpServer(hostile.url).ask(path, seconds=1)
    assert (answer.trouble, answer.text) == (trouble, "")


def test_an_answer_is_no_larger_than_it_may_be(hostile):
    answer = HttpServer(hostile.url).ask("/body", seconds=60)
    assert answer.trouble == "more than 8 MiB"
    assert len(answer.body) < 9 << 20
    assert answer.text == ""


def test_what_is_shorter_than_promised_is_no_whole_answer(hostile):
    answer = HttpServer(hostile.url).ask("/short")
    assert (answer.trouble, answer.text) == ("it ended 5 bytes early", "")


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[" * 100_000, b'{"a": NaN}', b'{"a": 1e999}']
)
def test_a_body_that_is_no_json_has_no_value(hostile, body):
    hostile.bodies["x"] = body
    answer = HttpServer(hostile.url).ask("/json/x")
    assert (answer.status, answer.value("a"), answer.value()) == (200, None, None)


def test_nobody_listens():
    with LocalServer(Hostile) as server:
        url = server.url
    answer = HttpServer(url).ask("/health", seconds=2)
    assert (answer.status, answer.closed, answer.trouble) == (
        0,
        True,
        "Connection refused",
    )


@pytest.mark.parametrize(
    "url", ["http://a:b@h:1", "ftp://h", "h:8000", "http://h:x", "http://[", ""]
)
def test_what_is_no_server(url):
    with pytest.raises(ValueError, match=r"."):
        HttpServer(url)
