"""A line for a node that this host is not: two nodes must not take the same rank unnoticed."""

import pytest
from click.testing import CliRunner

from patchkit.cli import group
from patchkit.errors import HostError
from support import hosts

ABOUT = ("--nccl=2.30.7", "--triton=3.8.0")


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """Ask one of two Sparks, by its number, for a line with an env file, ``head`` or ``worker``."""
    home = tmp_path_factory.mktemp("cluster")
    roots = [hosts.build(home, "cable_port0", node=node) for node in (0, 1)]
    head = (
        "--role=head",
        "--vllm=0.33.0",
        f"--root={roots[0]}",
        f"--output={home}/head.env",
    )
    worker = ("--role=worker", f"--from={home}/head.env", f"--root={roots[1]}")
    for asked in (head, (*worker, f"--output={home}/worker.env")):
        assert CliRunner().invoke(group, ["env", *asked, *ABOUT]).exit_code == 0

    def serve_args(file, node, *options):
        asked = (f"--from={home}/{file}.env", f"--root={roots[node]}", *options)
        return CliRunner().invoke(group, ["serve-args", "a/b", *asked])

    return serve_args


@pytest.mark.parametrize(
    ("file", "node", "role", "rank"),
    [
        ("head", 0, (), "0"),
        ("head", 1, ("--role=worker",), "1"),
        ("worker", 1, (), "1"),
        ("head", 1, ("--role=head",), "0"),  # elsewhere, as it is said to be
    ],
)
def test_a_line_is_the_file_nodes(ask, file, node, role, rank):
    done = ask(file, node, *role)
    assert f"--node-rank {rank} --master-addr 192.168.100.10 " in done.stdout


@pytest.mark.parametrize(
    ("file", "node", "role", "says"),
    [
        ("head", 1, (), "head.env is for the head, 192.168.100.10, and this host has"),
        (
            "worker",
            0,
            (),
            "worker.env is for the worker, 192.168.100.11, and this host has",
        ),
        (
            "head",
            0,
            ("--role=worker",),
            "192.168.100.10, the head's address, is this host's own",
        ),
    ],
)
def test_a_file_on_the_wrong_host_is_refused(ask, file, node, role, says):
    done = ask(file, node, *role)
    assert not done.stdout
    assert isinstance(done.exception, HostError)
    assert says in done.exception.what
