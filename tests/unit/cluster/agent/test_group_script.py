"""What the units of a cluster run: caches that go from the head to a worker, by a real rsync."""

import os
import time

from patchkit.cluster.agent.group_script import spread
from support import write_files
from support.needed import need

GRAPH = "models/m/vllm/torch_compile_cache/torch_aot_compile/H/inductor_cache/fxgraph/g"
# Stands for ssh: the worker is this machine.
SSH = '#!/bin/sh\nwhile [ "$1" != rsync ]; do shift; done\nexec "$@"\n'


def test_a_worker_gets_what_it_lacks_and_keeps_what_it_has(tmp_path, capsys):
    need("rsync")
    head, worker, ssh = tmp_path / "a head", tmp_path / "worker", tmp_path / "ssh"
    kept = {"triton/K/k.cubin": "head's", GRAPH: "graph", "flashinfer/a.so": "head's"}
    write_files(head, {**kept, "models/m/vllm/startup_plan/p": "rank 0's", "triton/new": "half"})
    (head / "triton" / "link").symlink_to(write_files(tmp_path / "other", {"secret": "x"}))
    write_files(worker, {"flashinfer/a.so": "its own", "cuda/its": "own"})
    write_files(tmp_path, {"ssh": SSH}, mode=0o755)
    for path in kept:  # what was written just now may not be whole
        os.utime(head / path, (time.time() - 99,) * 2)
    told = {"node": "spark-2", "ssh": [str(ssh), "--", "spark@spark-2"], "caches": str(worker)}
    for files in ("2 files of compiled code", "0 files of compiled code"):
        spread({"caches": str(head), "workers": {"1": told}})
        assert capsys.readouterr().out == f"spark-2: {files}\n"
    found = {str(path.relative_to(worker)): path for path in worker.rglob("*") if path.is_file()}
    assert {name: path.read_text() for name, path in found.items()} == {
        **kept,
        "flashinfer/a.so": "its own",
        "cuda/its": "own",
    }
    assert int(found["triton/K/k.cubin"].stat().st_mtime) == int(
        (head / "triton/K/k.cubin").stat().st_mtime
    )
    told["ssh"][0] = "/bin/false"
    spread({"caches": str(head), "workers": {"1": told}})
    assert "rsync error" in capsys.readouterr().out
