"""Serve a model that computes nothing, in steps of a fixed time, with the metrics of vLLM.

    decoding_server.py PORT MODEL [--max-num-seqs N] [--odd JSON] [further flags of vLLM]

A second process is the engine: it counts steps. Standard output is a log as vLLM writes it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

STEP = 0.02  # seconds
WORK = 0.01  # seconds of a core that a step takes
LOG = """\
INFO 11-29 22:00:00 [core.py:115] Initializing a V1 LLM engine (v0.25.1) with config: \
model='{model}', speculative_config=None, tensor_parallel_size=1, enforce_eager={eager}, \
compilation_config={{'mode': 3, 'cudagraph_capture_sizes': [1, 2, 4, 8], \
'max_cudagraph_capture_size': 8}}
INFO 11-29 22:00:01 [cuda.py:477] Using FLASH_ATTN attention backend out of potential backends: \
['FLASH_ATTN', 'TRITON_ATTN'].
INFO 11-29 22:00:02 [gpu_model_runner.py:5307] Model loading took 0.5 GiB memory and 1.5 seconds"""


class Handler(BaseHTTPRequestHandler):
    """Answer as vLLM does, to one client a thread."""

    lock = threading.Lock()
    present = 0
    limit = 256
    model = ""
    odd: ClassVar[dict[str, object]] = {}  # figures in place of others
    steps = multiprocessing.Value("d", 0.0)

    def do_GET(self) -> None:
        running = min(self.present, self.limit)
        if self.path == "/metrics":
            rows = {
                "iteration_tokens_total_count": self.steps.value,
                "generation_tokens_total": self.steps.value * max(running, 1),
                "num_requests_running": running,
                "num_requests_waiting": self.present - running,
                "kv_cache_usage_perc": 0.1,
            }
            rows |= self.odd
            self.reply(
                "".join(f"vllm:{name} {value}\n" for name, value in rows.items())
            )
        else:
            row = {"id": "toy", "root": self.model, "max_model_len": 4096}
            self.reply(json.dumps({"data": [row]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            Handler.present += 1
        time.sleep(4)
        with self.lock:
            Handler.present -= 1
        self.reply(json.dumps({"choices": [{"text": "one"}]}))

    def reply(self, text: str) -> None:
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
        except OSError:
            pass  # the client has all that it wanted

    def log_message(self, *_words: object) -> None:
        pass


def run_engine(steps: multiprocessing.Value) -> None:
    server = os.getppid()
    while os.getppid() == server:
        end = time.process_time() + WORK
        while time.process_time() < end:
            pass
        time.sleep(STEP - WORK)
        steps.value += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--odd", type=json.loads, default={})
    given, _others = parser.parse_known_args()
    sys.stdout.write(LOG.format(model=given.model, eager=given.enforce_eager) + "\n")
    sys.stdout.flush()
    Handler.model = given.model
    Handler.limit = given.max_num_seqs
    Handler.odd = given.odd
    engine = multiprocessing.Process(
        target=run_engine, args=[Handler.steps], daemon=True
    )
    engine.start()
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()
