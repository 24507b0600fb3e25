"""A server on loopback, which answers as long as a `with` lasts."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class QuietHandler(BaseHTTPRequestHandler):
    """Answers without a word on standard error."""

    def log_message(self, *_said: object) -> None: ...

    def send(self, status: int, data: bytes = b"", **headers: str) -> None:
        """Send an answer; to HEAD without its data."""
        self.send_response(status)
        for name, each in {**headers, "Content_Length": str(len(data))}.items():
            self.send_header(name.replace("_", "-"), each)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class LocalServer(ThreadingHTTPServer):
    """Answer at ``url``, on a port that is free, in threads of this process."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler] | Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        super().__exit__(*error)
