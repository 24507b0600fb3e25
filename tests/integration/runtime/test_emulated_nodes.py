"""Env files on nodes made of namespaces: each node probes its own interfaces.

What Ray and vLLM do with these files is `nox -s emulation`.
"""

import pytest

from e2e.emulation.lab import ENV_FILE, Lab, check_strangers_file, write_files
from e2e.emulation.nodes import NodeError, obstacle
from patchkit.runtime.envfile.syntax import Format, parse

OBSTACLE = obstacle()
pytestmark = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)


def _read(node):
    return parse(Format.ENV, node.file(ENV_FILE).read_text(), ENV_FILE)


def test_each_node_has_a_file_of_its_own(tmp_path):
    with Lab(tmp_path).sparks(3, "files") as sparks:
        write_files(sparks, "ray", vllm="0.32.0")
        files = [_read(spark) for spark in sparks]
    own = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [[file[name] for name in own] for file in files] == [
        ["192.168.177.1", "enp1s0f0np0", "enp1s0f0np0"],
        ["192.168.177.2", "enp1s0f1np1", "enp1s0f1np1"],
        ["192.168.177.3", "enp1s0f0np0", "enp1s0f0np0"],
    ]


def test_the_heads_file_is_found_out_on_a_worker(tmp_path):
    with Lab(tmp_path).sparks(2, "copied") as sparks:
        write_files(sparks, "ray", vllm="0.32.0")
        with pytest.raises(NodeError, match=r"exit status 0.*\n.*Ray listens (.|\n)*: 1 note;"):
            check_strangers_file(sparks[1])
        sparks[1].file(ENV_FILE).write_bytes(sparks[0].file(ENV_FILE).read_bytes())
        assert check_strangers_file(sparks[1]) == "env check: 4 errors, address and interfaces"
