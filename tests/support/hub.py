"""A Hub in small: a real HTTP server that answers what huggingface_hub asks of the real one.

``model_info`` with sizes and digests, the tree of a commit, and files with the headers from which
hf takes their ETag, with ranges for what goes on where it was. ``asked`` lists the requests;
``cut`` breaks the connection after so many bytes of a file, once; ``held`` files are not sent.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
import time
from urllib.parse import unquote, urlsplit

from patchkit.runtime.memory.checkpoint import find_checkpoint
from support.local_server import LocalServer, QuietHandler

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 200  # bytes from which a file has a sha256, as LFS files do


def safetensors(seed: int, size: int = 4096) -> bytes:
    """Return a whole safetensors file, its tensor filled with a byte."""
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes([seed]) * size


def checkpoint(folder, header, config):
    """Return what a checkpoint without its weights says."""
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / "config.json").write_text(json.dumps(config))
    return find_checkpoint(str(folder), {})


def index(*shards: str) -> bytes:
    return json.dumps(
        {"metadata": {}, "weight_map": {f"w{n}": s for n, s in enumerate(shards)}}
    ).encode()


def digest(data: bytes) -> str:
    if len(data) >= LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


SHARDS = tuple(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
MODEL = {
    "config.json": b'{"model_type": "small"}',
    "tokenizer.json": b"{}" * 300,
    "model.safetensors.index.json": index(*SHARDS),
    SHARDS[0]: safetensors(1),
    SHARDS[1]: safetensors(2, 9000),
    "original/consolidated.00.pth": b"o" * 5000,
    "metal/model.bin": b"m" * 5000,
    "README.md": b"a model",
    "pytorch_model.bin": b"p" * 3000,
}
CHOSEN = sorted(
    ["config.json", "tokenizer.json", "model.safetensors.index.json", *SHARDS]
)


class HubServer(LocalServer):
    """Repositories by name, each with its files; ``private`` ones are for a token's bearer."""

    def __init__(self) -> None:
        super().__init__(HubAnswers)
        self.repos: dict[str, dict[str, bytes]] = {"org/small": dict(MODEL)}
        self.token = ""  # what a request has to bear
        self.asked: list[str] = []
        self.cut = 0
        self.held = threading.Event()  # set: whoever asks for a file waits


class HubAnswers(QuietHandler):
    """Answer one request."""

    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_said):
        self.server.asked.append(
            f"{self.command} {self.path} {self.headers.get('Range', '')}".strip()
        )

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        words = [
            unquote(each) for each in urlsplit(self.path).path.strip("/").split("/")
        ]
        api = words[:2] == ["api", "models"]
        repo = "/".join(words[2:4] if api else words[:2])
        rest = words[4:] if api else words[2:]
        if (
            self.server.token
            and self.headers.get("Authorization") != f"Bearer {self.server.token}"
        ):
            self.refuse(401, "GatedRepo", "Access to this model is restricted")
        elif repo not in self.server.repos:
            self.refuse(404, "RepoNotFound", "Repository not found")
        elif len(rest) > 1 and rest[1] not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {rest[1]}")
        elif not api:
            self.file(self.server.repos[repo], "/".join(rest[2:]))
        else:
            self.info(repo, tree=rest[:1] == ["tree"])

    def info(self, repo, tree=False):
        """Send what is known of a model, or of the files of a commit: in other words."""
        oid, digests, path = (
            ("oid", "oid", "path") if tree else ("blobId", "sha256", "rfilename")
        )
        files = []
        for name, data in self.server.repos[repo].items():
            own = {path: name, "size": len(data), oid: digest(data), "type": "file"}
            if len(data) >= LARGE:
                lfs = {digests: digest(data), "size": len(data), "pointerSize": 130}
                own |= {oid: "f" * 40, "lfs": lfs}
            files.append(own)
        whole = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": files}
        text = json.dumps(files if tree else whole)
        self.send(200, text.encode(), Content_Type="application/json")

    def file(self, files, name):
        if name not in files:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        data = files[name]
        begin, _, end = (
            self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        )
        part = data[int(begin) : int(end) + 1 if end else None]
        self.send_response(206 if "Range" in self.headers else 200)
        large = len(data) >= LARGE
        self.send_header("ETag", f'"{"f" * 40 if large else digest(data)}"')
        if large:
            self.send_header("X-Linked-ETag", f'"{digest(data)}"')
            self.send_header("X-Linked-Size", str(len(data)))
        if "Range" in self.headers:
            last = int(begin) + len(part) - 1
            self.send_header("Content-Range", f"bytes {begin}-{last}/{len(data)}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "GET":
            while self.server.held.is_set() and not name.endswith(".index.json"):
                time.sleep(0.05)
            if 0 < self.server.cut < len(part):
                part, self.server.cut = part[: self.server.cut], 0
                self.close_connection = True
            self.wfile.write(part)

    def refuse(self, status, code, message):
        self.send(status, X_Error_Code=code, X_Error_Message=message)
