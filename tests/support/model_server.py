"""A server of the OpenAI API in small: real HTTP, in the shapes that releases of vLLM send.

``release`` picks the shape: 0.10 (``reasoning_content``; other names of figures), 0.12 (both
fields), 0.17 (``reasoning`` alone) and 0.33. The figures are lines of `/metrics` with the names of
their `loggers.py`. What goes wrong is an attribute: set it before asking.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

from support.local_server import LocalServer, QuietHandler

REASONING = {
    "0.10": ("reasoning_content",),
    "0.12": ("reasoning", "reasoning_content"),
    "0.17": ("reasoning",),
    "0.33": ("reasoning",),
}
VERSIONS = {"0.10": "0.10.2", "0.12": "0.12.0", "0.17": "0.17.1", "0.33": "0.33.0"}
ANSWER = "ready"
LABELS = 'engine="0",model_name="small"'


def metrics(release, **changes):
    """Return the text of /metrics: ``changes`` by the figure's name without its prefix."""
    prefix = "gpu_" if release == "0.10" else ""
    said = {
        "usage": 0.25,
        "running": 1,
        "waiting": 0,
        "preemptions": 0,
        "queries": 0,
        "hits": 0,
    }
    said |= {"caching": True, "failed": None} | changes
    usage = f"vllm:{prefix or 'kv_'}cache_usage_perc"
    figures = {
        usage: said["usage"],
        "vllm:num_requests_running": said["running"],
        "vllm:num_requests_waiting": said["waiting"],
        "vllm:num_preemptions_total": said["preemptions"],
        "vllm:num_preemptions_created": 1.7638e09,
        f"vllm:{prefix}prefix_cache_queries_total": said["queries"],
        f"vllm:{prefix}prefix_cache_hits_total": said["hits"],
    }
    lines = [
        f"# HELP {usage} KV-cache usage. 1 means 100 percent usage.",
        f"# TYPE {usage} gauge",
    ]
    lines += [f"{name}{{{LABELS}}} {float(value)}" for name, value in figures.items()]
    lines += [
        f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{said["caching"]}"}} 1.0',
        'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 7.0',
    ]
    if said["failed"]:
        row = 'handler="/v1/chat/completions",method="POST",status="5xx"'
        lines.append(f"http_requests_total{{{row}}} {float(said['failed'])}")
    return "\n".join(lines) + "\n"


@dataclass
class Faults:
    """What is wrong with a server, and what it answers."""

    health: int = 200
    key: str = ""
    models: tuple[str, ...] = ("small",)
    reasoning: str = ""
    refuse: tuple[int, object] | None = None  # status and JSON of a chat
    silent: bool = False  # no token ever comes
    raw: bytes | None = (
        None  # sent in the place of an answer, whose end is the connection's
    )
    metrics: str | list[str] | None = None  # a list: one after the other
    endless: bool = False
    other_engine: bool = False  # which has no /version
    listing: int = 200  # status of /v1/models
    embeds: bool = False  # and generates nothing


class ModelServer(LocalServer):
    """Serves one release's shape; ``asked`` lists the bodies of the questions."""

    def __init__(self, release="0.33", **faults):
        super().__init__(_ModelRequest)
        self.release, self.faults = release, Faults(**faults)
        self.asked, self.headers_seen = [], []
        self.over = threading.Event()

    def __exit__(self, *error):
        self.over.set()
        super().__exit__(*error)

    def handle_error(self, *_):
        pass  # who asks may go away in the middle


class _ModelRequest(QuietHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, faults = self.server, self.server.faults
        server.headers_seen.append(dict(self.headers))
        if self.path == "/health":
            self.send(faults.health, b"")
        elif self.path == "/version" and faults.other_engine:
            self._json(404, {"detail": "Not Found"})
        elif self.path == "/version":
            self._json(200, {"version": VERSIONS[server.release]})
        elif self.path == "/metrics":
            text = metrics(server.release) if faults.metrics is None else faults.metrics
            if isinstance(text, list):
                text = text.pop(0) if len(text) > 1 else text[0]
            self.send(200 if text else 404, text.encode())
        elif self._allowed():
            cards = [
                {"id": each, "object": "model", "max_model_len": 4096}
                for each in faults.models
            ]
            self._json(faults.listing, {"object": "list", "data": cards})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        faults = self.server.faults
        if not self._allowed():
            return
        if faults.refuse:
            self._json(*faults.refuse)
        elif faults.embeds and self.path == "/v1/embeddings":
            self._json(200, {"data": [{"index": 0, "embedding": [0.5]}]})
        elif faults.embeds or self.path not in (
            "/v1/chat/completions",
            "/v1/completions",
        ):
            self._json(404, {"detail": "Not Found"})
        elif faults.raw is not None:
            self.close_connection = True
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(faults.raw)
            while faults.endless:
                self.wfile.write(faults.raw)
        else:
            self._whole(body)

    def _allowed(self):
        key = self.server.faults.key
        if key and self.headers["Authorization"] != f"Bearer {key}":
            self._json(401, {"error": "Unauthorized"})
            return False
        return True

    def _json(self, status, value):
        self.send(status, json.dumps(value).encode())

    def _whole(self, body):
        faults, names = self.server.faults, REASONING[self.server.release]
        if faults.silent:
            self.server.over.wait(30)
            return
        message = dict.fromkeys(names, faults.reasoning) | {"content": ANSWER}
        said = {"message": message} if "messages" in body else {"text": ANSWER}
        choice = {"index": 0, "finish_reason": "stop", **said}
        self._json(200, {"choices": [choice], "usage": {"completion_tokens": 5}})
