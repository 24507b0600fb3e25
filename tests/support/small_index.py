"""A package index with a password on loopback, which says what was asked of it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from base64 import b64encode
from pathlib import Path
from zipfile import ZipFile

from patchkit.digests import sha256_of
from support.local_server import LocalServer, QuietHandler


class SmallIndex(LocalServer):
    """An index (PEP 691, 658) of the wheels in a folder, for ``me`` with the password ``s3cret``.

    ``asked`` lists every wheel that was asked for, with the byte it is to begin at; ``stopped``
    names the one whose second half does not come, and ``reached`` is set then. ``arguments`` are
    the command lines of all processes while it was asked.
    """

    def __init__(self, files: Path) -> None:
        super().__init__(_Handler)
        self.files = files
        self.asked: list[tuple[str, int]] = []
        self.stopped, self.reached = "", threading.Event()
        self.arguments = b""
        self.url = f"http://me:s3cret@127.0.0.1:{self.server_port}/simple/"


class _Handler(QuietHandler):
    server: SmallIndex

    def do_GET(self) -> None:
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it ended
                self.server.arguments += line.read_bytes()
        if self.headers["Authorization"] != f"Basic {b64encode(b'me:s3cret').decode()}":
            self.send_error(401)
            return
        body, begin = self._body(), 0
        if self.path.endswith(".whl"):
            begin = int(self.headers.get("Range", "bytes=0-").strip("bytes=-"))
            self.server.asked.append((self.path.strip("/"), begin))
        self.send_response(206 if begin else 200)
        self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
        self.send_header("Content-Length", str(len(body) - begin))
        if begin:
            self.send_header(
                "Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}"
            )
        self.end_headers()
        if self.server.stopped and self.path.endswith(self.server.stopped):
            self.wfile.write(body[: len(body) // 2])
            self.server.reached.set()
            time.sleep(60)
        self.wfile.write(body[begin:])

    def _body(self) -> bytes:
        files = self.server.files
        path = self.path.strip("/").removesuffix(".metadata")
        if self.path.endswith(".metadata"):
            with ZipFile(files / path) as wheel:
                return wheel.read(
                    next(n for n in wheel.namelist() if n.endswith("/METADATA"))
                )
        if not self.path.endswith("/"):
            return (files / path).read_bytes()
        project = path.rpartition("/")[2]
        offers = [
            {
                "filename": file.name,
                "url": f"/{file.name}",
                "hashes": {"sha256": sha256_of(file)},
                "size": file.stat().st_size,
                "core-metadata": True,
            }
            for file in sorted(files.glob(f"{project.replace('-', '_')}-*"))
        ]
        page = {"meta": {"api-version": "1.1"}, "name": project, "files": offers}
        return json.dumps(page).encode()
