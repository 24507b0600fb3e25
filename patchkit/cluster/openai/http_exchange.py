"""Ask an HTTP server that may be slow, broken or hostile: an answer ends, in time and in size.

No proxy of the environment is asked and no redirection followed: what is asked is the server at
this address, and its key goes nowhere else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from patchkit.errors import UsageError

_CONNECT = 5.0  # seconds: the server is on this machine, or at the other end of a cable
_MASK = "(masked)"
_SHORT = 8  # characters: a shorter key may be any word of an answer
_SAID = 500  # characters of what an answer says
_LARGEST = 8 << 20  # bytes of an answer; /metrics of eight engines has some hundred thousand


@dataclass(frozen=True, slots=True, kw_only=True)
class PathAnswer:
    """Say how a path answered, or why not: then ``status`` is 0. ``ms`` is how long it took."""

    status: int = 0
    ms: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer(PathAnswer):
    """An answer with what came."""

    body: bytes = b""

    @property
    def outcome(self) -> PathAnswer:
        """Return how it went, without what came."""
        return PathAnswer(status=self.status, ms=self.ms, trouble=self.trouble)

    def value(self, *keys: str | int) -> Any:
        """Return what the body, as JSON, has below these keys; None where it has nothing."""
        try:
            found = json.loads(self.body)
            for key in keys:
                found = found[key]
        except (ValueError, RecursionError, LookupError, TypeError):
            return None
        return found


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server by its URL, without /v1; ``key`` is sent to it, and never comes back in a text."""

    url: str
    key: str = ""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            _ = parts.port  # raises, too
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            # Behind @: what stands before it may be a password.
            raise UsageError(
                f"{clean(self.url).rpartition('@')[2]!r} is not the address of a server",
                why="every user of a host could see a login in it" if "@" in parts.netloc else "",
                hint="write it as http://ADDRESS:PORT",
            )

    def ask(
        self, path: str, body: dict[str, Any] | None = None, seconds: float = 10.0
    ) -> HttpAnswer:
        """Return the whole answer, or what came of it within ``seconds``."""
        began = time.monotonic()
        status, found, trouble = 0, bytearray(), ""
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=min(seconds, _CONNECT))
        late = threading.Event()
        # The connection itself forgets the socket of an answer whose end is the connection's.
        sockets: list[socket.socket] = []

        def end() -> None:
            late.set()
            with contextlib.suppress(OSError):
                for opened in sockets:
                    opened.shutdown(socket.SHUT_RDWR)

        # A time-out of the socket's own starts anew with each byte that comes.
        alarm = threading.Timer(seconds, end)
        alarm.daemon = True
        alarm.start()
        try:
            connection.connect()
            connection.sock.settimeout(seconds + 1)  # the alarm comes first
            sockets.append(connection.sock)
            data = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"} if data else {}
            if self.key:
                headers["Authorization"] = f"Bearer {self.key}"
            method = "GET" if data is None else "POST"
            connection.request(method, f"{parts.path.rstrip('/')}{path}", data, headers)
            # The answer holds the socket as well: open, the server would go on for nobody.
            with connection.getresponse() as answer:
                status = answer.status
                while len(found) <= _LARGEST and (part := answer.read1(1 << 16)):
                    found += part
            if len(found) > _LARGEST:
                trouble = f"more than {_LARGEST >> 20} MiB"
            if late.is_set():
                trouble = f"not done after {seconds:.0f} s"
        except (OSError, http.client.HTTPException, ValueError) as error:
            timed_out = late.is_set() or isinstance(error, TimeoutError)
            said = getattr(error, "strerror", None) or str(error) or type(error).__name__
            trouble = f"no answer in {seconds:.0f} s" if timed_out else self.clean(said)
        finally:
            alarm.cancel()
            connection.close()
        ms = round((time.monotonic() - began) * 1000, 1)
        return HttpAnswer(status=status, ms=ms, body=bytes(found), trouble=trouble)

    def clean(self, text: str, longest: int = _SAID) -> str:
        """Return a text of the server without the key, no longer than ``longest``."""
        if len(self.key) >= _SHORT:
            text = text.replace(self.key, _MASK)
        return clean(text, longest)


def clean(text: str, longest: int = _SAID) -> str:
    """Return a text that can be written as UTF-8: JSON can name half a surrogate pair."""
    return text[:longest].encode("utf-8", "replace").decode()
