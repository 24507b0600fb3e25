"""Check what units run: compiled code that goes to a worker, by a real rsync."""

import os
import time

from patchkit.cluster.agent.group_script import spread
from support import write_files
from support.needed import need

GRAPH = "models/m/vllm/torch_compile_cache/torch_aot_compile/H/inductor_cache/fxgraph/g"
# Stands for ssh: the worker is another home.
SSH = '#!/bin/sh\ncd worker\nwhile [ "$1" != rsync ]; do shift; done\nexec "$@"\n'


def test_a_worker_gets_what_it_lacks_and_keeps_what_it_has(tmp_path, monkeypatch, capsys):
    need("rsync")
    head, worker, own = tmp_path / "a head", tmp_path / "worker", {"cuda/index": "its own"}
    given = {"triton/K/k.cubin": "head's", GRAPH: "graph", "cuda/a/b": "code"}
    not_given = {"models/m/vllm/startup_plan/p": "rank 0's", "triton/new": "half written"}
    write_files(head / "caches", {**given, **not_given, "cuda/index": "head's"})
    (head / "caches/triton/link").symlink_to(write_files(tmp_path / "other", {"secret": "x"}))
    write_files(worker / "caches", own)
    write_files(tmp_path, {"ssh": SSH}, mode=0o755)
    for path in given:  # what was written just now may not be whole
        os.utime(head / "caches" / path, (time.time() - 99,) * 2)
    monkeypatch.setenv("HOME", str(head))
    monkeypatch.chdir(tmp_path)
    settings = {"caches": "caches", "workers": {}}
    for ssh, says in (("./ssh", "3 files"), ("./ssh", "0 files"), ("/bin/false", "rsync error")):
        settings["workers"]["1"] = {"node": "spark-2", "ssh": [ssh, "--", "spark@spark-2"]}
        spread(settings)
        assert says in capsys.readouterr().out
    found = [path for path in (worker / "caches").rglob("*") if path.is_file()]
    texts = {str(path.relative_to(worker / "caches")): path.read_text() for path in found}
    assert texts == {**given, **own}
