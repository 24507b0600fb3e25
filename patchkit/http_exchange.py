"""Ask an HTTP server that may be slow, broken or hostile, within limits of time and size.

A request uses no proxy from the environment and follows no redirection, so it goes only to the
server at the address. The key is sent only for paths that need it. Before it hands over the key,
the caller must check who listens at the address. This file is copied to nodes beside their scripts,
so it needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from patchkit.foreign import read_json

_CONNECT = 5.0  # seconds to connect, on this machine or over a cable
_ENDS = 1.0  # seconds for the thread to notice that its connection was cut
_MASK = "(masked)"
_SHORT = 8  # characters; a shorter key is not masked, since any word may contain it
_SAID = 500  # characters of a server's text that are shown
# Bytes of an answer; /metrics of eight engines has some hundred thousand.
_LARGEST = 8 << 20
_PIECE = 1 << 16
_KEYED = ("/v1/", "/pooling")  # beginnings of paths that need the key


@dataclass(frozen=True, slots=True, kw_only=True)
class PathAnswer:
    """How a server answered for a path, after ``ms`` milliseconds.

    ``status`` is the status of HTTP, 0 without an answer. ``trouble`` says what went wrong, "" for
    nothing. ``closed`` says that no program listens at the address.
    """

    status: int = 0
    ms: float = 0.0
    trouble: str = ""
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer(PathAnswer):
    """An answer with its body, or with the part of the body that came."""

    body: bytes

    @property
    def outcome(self) -> PathAnswer:
        """Return the answer without its body."""
        return PathAnswer(
            status=self.status,
            ms=self.ms,
            trouble=self.trouble,
            closed=self.closed,
        )

    @property
    def text(self) -> str:
        """Return the body of a complete answer with status 200, else ""."""
        went_well = self.status == 200 and not self.trouble
        return self.body.decode(errors="replace") if went_well else ""

    def value(self, *keys: str | int) -> Any:
        """Return the value that ``keys`` lead to in a JSON body; None if there is no such value."""
        try:
            value = read_json(self.body)
            for key in keys:
                value = value[key]
        except (ValueError, LookupError, TypeError):
            return None
        return value


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server; its ``url`` is without /v1. ``key`` is masked in every text of the server.

    Raises ValueError for a URL that names no server or contains a login.
    """

    url: str
    key: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        _ = parts.port  # raises ValueError for a wrong port
        is_server = parts.scheme in ("http", "https") and parts.hostname
        has_login = "@" in parts.netloc
        if has_login or not is_server:
            # The text before @ may be a password.
            shown = clean(self.url).rpartition("@")[2]
            raise ValueError(f"{shown!r} is not the address of a server")

    def ask(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float = 10.0,
    ) -> HttpAnswer:
        """Return the answer for a path, or the part of it that came within ``seconds``.

        With a ``body`` the request is a POST of this JSON, else a GET. A failure is in the answer's
        ``trouble``; nothing is raised.
        """
        key = self.key if path.startswith(_KEYED) else ""
        exchange = _Exchange(urlsplit(self.url), path, body, key)
        began = time.monotonic()

        # A thread, for one time limit over all steps: look-up of the name, connection, TLS, head
        # and body. The timeout of a socket starts anew with each byte, and not for the look-up.
        worker = threading.Thread(target=exchange.run, args=[seconds], daemon=True)
        worker.start()
        try:
            worker.join(seconds)
            late = worker.is_alive()
            # Read before the cut, since http.client takes a head that is cut short for complete.
            status = exchange.status
        finally:
            exchange.cut()
        elapsed = time.monotonic() - began
        worker.join(_ENDS)

        trouble = self.clean(exchange.trouble)
        if late or exchange.timed_out:
            waited = "not done after" if status else "no answer in"
            trouble = f"{waited} {elapsed:.0f} s"
        return HttpAnswer(
            status=status,
            ms=round(elapsed * 1000, 1),
            body=bytes(exchange.body),
            trouble=trouble,
            closed=exchange.closed,
        )

    def clean(self, text: str, longest: int = _SAID) -> str:
        """Return a text of the server with the key masked, and at most ``longest`` characters."""
        if len(self.key) >= _SHORT:
            text = text.replace(self.key, _MASK)
        return clean(text, longest)


class _Exchange:
    """One request and the part of its answer that has come; ``run`` runs in a thread."""

    def __init__(
        self,
        place: SplitResult,
        path: str,
        body: dict[str, Any] | None,
        key: str,
    ) -> None:
        self.place = place
        self.path = f"{place.path.rstrip('/')}{path}"
        self.data = None if body is None else json.dumps(body).encode()
        self.headers = {"Content-Type": "application/json"} if self.data else {}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

        self.status = 0
        self.body = bytearray()
        self.trouble = ""
        self.timed_out = False
        self.closed = False
        # A duplicate of the socket, to end the connection from outside: the socket itself is handed
        # on to TLS and http.client.
        self._handle: socket.socket | None = None
        self._over = False

    def run(self, seconds: float) -> None:
        """Send the request and keep what comes of the answer. A failure is kept in ``trouble``."""
        try:
            self._talk(seconds)
        except TimeoutError:
            self.timed_out = True
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.closed = isinstance(error, ConnectionRefusedError)
            strerror = getattr(error, "strerror", None)
            self.trouble = strerror or str(error) or type(error).__name__

    def cut(self) -> None:
        """End the connection; another thread may be in ``run``."""
        self._over = True
        if self._handle:
            with contextlib.suppress(OSError):
                self._handle.shutdown(socket.SHUT_RDWR)
            self._handle.close()

    def _talk(self, seconds: float) -> None:
        host = self.place.hostname or ""
        secure = self.place.scheme == "https"
        port = self.place.port or (443 if secure else 80)
        connection = http.client.HTTPConnection(host, port)
        with socket.create_connection((host, port), min(seconds, _CONNECT)) as plain:
            self._handle = plain.dup()
            if self._over:  # `cut` was called before there was a handle
                self.cut()

            plain.settimeout(seconds)
            line: socket.socket = plain
            if secure:
                context = ssl.create_default_context()
                line = context.wrap_socket(plain, server_hostname=host)
            with line:
                connection.sock = line
                method = "GET" if self.data is None else "POST"
                connection.request(method, self.path, self.data, self.headers)
                with connection.getresponse() as answer:
                    self._read(answer)

    def _read(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        while piece := answer.read1(_PIECE):
            self.body += piece
            if len(self.body) > _LARGEST:
                self.trouble = f"more than {_LARGEST >> 20} MiB"
                return
        # The head promised more bytes, but http.client takes a closed connection for the end.
        if answer.length:
            self.trouble = f"it ended {answer.length} bytes early"


def usable_key(key: str) -> str:
    """Return a server's key, or "" if a header cannot hold it."""
    return key if key.isascii() and key.isprintable() else ""


def clean(text: str, longest: int = _SAID) -> str:
    """Return at most ``longest`` characters of a text, in a form that UTF-8 can hold.

    "?" replaces half a surrogate pair, which JSON can contain.
    """
    return text[:longest].encode("utf-8", "replace").decode()
