"""Check a file against the versions that it names, and not those of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from patchkit.cli import group
from patchkit.runtime.formats.read import read_content
from patchkit.runtime.host.host import Software
from patchkit.runtime.host.probe import probe
from patchkit.runtime.lint.situation import situation_of
from support import hosts


@pytest.mark.parametrize(
    ("lines", "options", "against"),
    [
        ("FROM vllm/vllm-openai:v0.18.0", [], "vLLM 0.18.0 (vllm/vllm-openai:v0.18.0, line 1)"),
        ("FROM x\nRUN pip install vllm==0.16.0", [], "vLLM 0.16.0 (vllm==0.16.0, line 2)"),
        ("FROM vllm/vllm-openai:v0.18.0", ["--vllm", "0.25.1"], "vLLM 0.25.1, any NCCL"),
        (
            "FROM vllm/vllm-openai:v0.18.0\nFROM vllm/vllm-openai:v0.19.1",
            [],
            "any vLLM, since it names 0.18.0 (line 1) and 0.19.1 (line 2): --vllm decides",
        ),
        ("FROM vllm/vllm-openai:nightly", [], "any vLLM, any NCCL"),
        # A number that no release of vLLM has, or none that is known.
        ("FROM lmcache/vllm-openai:v0.3.9", [], "any vLLM, any NCCL"),
        ("FROM vllm/vllm-openai:v9.0.0", [], "any vLLM, any NCCL"),
    ],
)
def test_the_last_line_says_which_version_and_where_from(lines, options, against, tmp_path):
    path = tmp_path / "Dockerfile"
    path.write_text(f"{lines}\n")
    shown = CliRunner().invoke(group, ["env", "check", str(path), "--elsewhere", *options])
    assert f"checked against {against}" in " ".join(shown.stdout.split())


def test_an_image_has_its_own_software_and_not_this_hosts(tmp_path):
    root = hosts.build(tmp_path, "cable_port0", node=0)
    versions = {"vllm": "0.25.1", "triton": "3.6.0"}
    host = replace(probe(root, environment={}), software=Software(python="3.12.3", **versions))
    for text, expected in (("A_B=1\n", versions), ("docker run vllm/vllm-openai m\n", {})):
        known = situation_of(text, read_content(text, "x.sh"), host, {})
        assert {name: known[name] for name in versions if name in known} == expected
