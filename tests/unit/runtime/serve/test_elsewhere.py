"""A line for a node that this host is not: two nodes must not take the same rank unnoticed."""

from __future__ import annotations

import pytest

from patchkit.errors import HostError
from support import hosts


@pytest.fixture
def files(cli, tmp_path):
    """Two Sparks' roots, with the env file of each."""
    roots = [hosts.build(tmp_path, "cable_port0", node=node) for node in (0, 1)]
    about = ("--vllm", "0.33.0", "--nccl", "2.30.7", "--triton", "3.8.0")
    head, worker = tmp_path / "head.env", tmp_path / "worker.env"
    cli("env", "--role", "head", "--root", roots[0], *about, "-o", head)
    cli("env", "--role", "worker", "--from", head, "--root", roots[1], *about[4:], "-o", worker)
    return {"head": head, "worker": worker}, roots


@pytest.mark.parametrize(
    ("file", "node", "role", "rank"),
    [
        ("head", 0, (), "0"),
        ("head", 1, ("--role", "worker"), "1"),
        ("worker", 1, (), "1"),
        ("head", 1, ("--role", "head"), "0"),
        ("worker", 0, ("--role", "worker"), "1"),
    ],
)
def test_a_line_is_the_file_nodes(cli, files, file, node, role, rank):
    paths, roots = files
    own = (file == "head") == (node == 0)
    done = cli("serve-args", "a/b", "--from", paths[file], "--root", roots[node], *role)
    assert f"--node-rank {rank} " in done.stdout
    assert ("another node than this one" in done.stderr) == (not own and role[-1] == file)


@pytest.mark.parametrize(
    ("file", "node", "role", "says"),
    [
        ("head", 1, (), "head.env is for the head, 192.168.100.10, and this host has"),
        ("worker", 0, (), "worker.env is for the worker, 192.168.100.11, and this host has"),
        ("head", 0, ("--role", "worker"), "the head's address, is this host's own"),
    ],
)
def test_a_file_on_the_wrong_host_is_refused(cli, files, file, node, role, says):
    paths, roots = files
    done = cli(
        *("serve-args", "a/b", "--from", paths[file], "--root", roots[node], *role),
        rc=HostError.exit_code,
    )
    assert not done.stdout
    assert says in done.stderr
