"""`patchkit check` of files as guides have them, on this host and elsewhere."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from patchkit.cli import group
from patchkit.errors import SourceError, UsageError
from patchkit.runtime.check.content import CheckedText
from patchkit.runtime.check.formats import read_content
from patchkit.runtime.check.situation import add_situation
from patchkit.runtime.envfile.env_file import EnvEntry, Format, render_env_file
from patchkit.runtime.host.host import Software
from patchkit.runtime.host.probe import probe
from patchkit.runtime.rules.releases import read_env_data
from support import hosts
from support.checked import check_text

FILES = Path(__file__).parents[3] / "data" / "env_check"
SPARKS = {"topology": "roce", "vllm": "0.25.1", "nccl": "2.30.4", "triton": "3.6.0"}


def found(text, where="head.env", **more):
    """Line, severity and what of each finding."""
    findings = check_text(text, where, **more)
    return [(each.line, str(each.level), each.what) for each in findings]


def run(*arguments):
    return CliRunner().invoke(group, ["check", *map(str, arguments)])


@pytest.mark.parametrize(
    ("name", "text", "code", "first_line"),
    [
        ("bad.yml", "a: [1\nb: }\n", 3, "bad.yml:2  error  no YAML that can be read"),
        ("empty.env", "", 3, "empty.env  warning  the file is empty"),
        ("two\nlines.env", "A=1\n", 0, r"✓ two\nlines.env: no problems"),
    ],
)
def test_a_file_has_one_line_of_its_own(
    name, text, code, first_line, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    done = run("--elsewhere", name)
    assert (done.exit_code, done.output[: len(first_line)]) == (code, first_line)


def test_a_file_as_guides_have_it():
    expected = [
        (1, "warning", "the value of HF_TOKEN is in the file"),
        (1, "warning", "HF_TOKEN: a comment behind the value"),
        (1, "note", "HF_TOKEN and 2 more: quotes"),
        (3, "warning", "VLLM_API_KEY has a placeholder for its value"),
        (4, "warning", "WORKER_IP=<worker-ip>: still to be filled in"),
        (5, "error", "VLLM_HOST_IP=<this-node>: still to be filled in"),
        (
            6,
            "warning",
            "NCCL_DEBUG=verbose: it takes VERSION, WARN, INFO, ABORT, TRACE",
        ),
        (7, "warning", "NCCL_IB_HCA=rocep1s0f0: without roceP2p1s0f0"),
    ]
    actual = found(
        (FILES / "config.local.env").read_text(), "config.local.env", **SPARKS
    )
    for shown, begin in zip(actual, expected, strict=True):
        assert (*shown[:2], shown[2][: len(begin[2])]) == begin


def test_a_value_that_stops_vllm_is_an_error():
    for line, version, level, hint in (
        (
            "VLLM_NVFP4_GEMM_BACKEND=marlin",
            "0.12.0",
            "error",
            "write one of these, or leave ",
        ),
        ("VLLM_NVFP4_GEMM_BACKEND=marlin", "0.16.0", "", ""),
        ("VLLM_NVFP4_GEMM_BACKEND=marlin", "", "", ""),
        (
            "VLLM_ATTENTION_BACKEND=FLASHINFR",
            "0.14.1",
            "error",
            "did you mean FLASHINFER?",
        ),
        ("VLLM_USE_DEEP_GEMM=false", "0.23.0", "error", "write VLLM_USE_DEEP_GEMM=0"),
        (
            "VLLM_ENGINE_READY_TIMEOUT_S=1h",
            "0.33.0",
            "error",
            "write a number, or leave ",
        ),
        # Of other programs as well; unknown until it is read.
        ("VLLM_USE_DEEP_GEMM=<0 or 1>", "0.23.0", "", ""),
        ("VLLM_USE_DEEP_GEMM=${DEEP_GEMM}", "0.23.0", "", ""),
    ):
        findings = [
            each
            for each in check_text(f"{line}\n", vllm=version)
            if ": vLLM" in each.what
        ]
        assert [str(each.level) for each in findings] == ([level] if level else [])
        assert all(each.hint.startswith(hint) for each in findings)


def test_a_secret_that_others_may_read_is_worse_and_is_never_shown():
    text = f"export OPENAI_API_KEY=sk-{'a1B2c3D4' * 5}\n"
    (private,), (public,) = (
        check_text(text, "x.sh", mode=mode) for mode in (0o600, 0o640)
    )
    assert (private.level, public.level) == ("warning", "error")
    assert "which others may read (0640)" in public.what
    assert "a1B2" not in f"{private} {public}"


def test_a_comment_silences_by_id():
    for comment, ids in (
        ("", {"discouraged-flag", "gpu-memory-utilization-high"}),
        ("# patchkit: ignore\n", set()),
        ("# patchkit: ignore gpu-memory-utilization-high, discouraged-flag\n", set()),
        ("# patchkit: ignore[discouraged-flag]\n", {"gpu-memory-utilization-high"}),
        ("# patchkit: ignore\n\n", {"discouraged-flag", "gpu-memory-utilization-high"}),
    ):
        text = f"{comment}vllm serve m \\\n  --enforce-eager \\\n  --gpu-memory-utilization 0.95\n"
        assert {each.id for each in check_text(text, "x.sh")} == ids
        kept = {
            each.id
            for each in check_text("NCCL_IB_TIMEOUT=99 # patchkit: ignore value\n")
        }
        assert kept == {"comment-behind-value"}


def test_every_finding_has_an_id_and_a_next_step():
    for key, message in read_env_data("findings").items():
        assert re.fullmatch(r"[a-z0-9-]+", key)
        assert {"level", "what", "hint"} <= message.keys()
        assert message["level"] in ("error", "warning", "note")


@pytest.mark.parametrize(
    ("where", "text", "ids"),
    [
        ("x.env", "A=1\r\n", {"crlf"}),
        ("x.sh", "#!/bin/sh\r\nvllm --version\r\n", {"crlf"}),
        ("compose.yaml", "services:\r\n  a:\r\n    image: b\r\n", set()),
        ("x.env", "NCCL_DEBUG='WARN\nA=1\n", {"open-quote", "quotes"}),
        ("x.env", 'NCCL_DEBUG="WARN\n', {"open-quote", "quotes"}),
        ("x.env", "A='b'\n", {"quotes"}),
        ("x.env", "NCCL_DEBUG = WARN\n", {"blanks-at-sign"}),
        ("x.env", "NCCL_DEBUG= WARN\nNCCL_IB_TIMEOUT =22\n", {"blanks-at-sign"}),
        ("x.sh", "#!/bin/sh\n  export NCCL_DEBUG = WARN\n", {"blanks-at-sign"}),
        ("x.env", "NCCL_DEBUG = WARN\nif x; then y; fi\n", {"blanks-at-sign"}),
        ("x.sh", "for ((i = 0; i < 3; i++)); do A= vllm --version; done\n", set()),
        ("Dockerfile", "FROM a\r\nENV A=1\r\n", set()),
        (
            "compose.yaml",
            "image: vllm/vllm-openai:v0.33.0\nenvironment:\n- NCCL_DEBUG = WARN\n",
            {"unknown-variable"},
        ),
        (
            "x.sh",
            "docker run -e 'NCCL_DEBUG =WARN' vllm/vllm-openai:v0.33.0\n",
            {"unknown-variable"},
        ),
        ("x.service", "[Service]\r\nEnvironment=A=1\r\n", set()),
    ],
)
def test_what_tools_read_differently_is_told(where, text, ids):
    assert {each.id for each in check_text(text, where)} == ids


@pytest.mark.parametrize("tag", ["v0.33.0", "${TAG:-latest}", "$TAG"])
def test_an_image_of_any_tag_starts_the_server(tag):
    text = f"services:\n  a:\n    image: vllm/vllm-openai:{tag}\n    command: --swap-space 4\n"
    findings = check_text(text, "compose.yaml", vllm="0.33.0")
    assert "unknown-flag" in {each.id for each in findings}


# This host


def test_what_this_host_does_not_have(copied):
    text = (
        "VLLM_HOST_IP=192.168.100.11\nNCCL_SOCKET_IFNAME=enp1s0f\nGLOO_SOCKET_IFNAME=enp1s0f\n"
        "UCX_NET_DEVICES=rocep1s0f0:1,enp1s0f1np1\nNCCL_IB_HCA=mlx5_0:1\n"
    )
    assert found(text, host=probe(copied, environment={})) == [
        (
            1,
            "error",
            "VLLM_HOST_IP=192.168.100.11: this host has no address 192.168.100.11",
        ),
        (3, "error", "GLOO_SOCKET_IFNAME=enp1s0f: this host has no interface enp1s0f"),
        (4, "warning", "UCX_NET_DEVICES=rocep1s0f0:1,enp1s0f1np1: enp1s0f1np1 is down"),
        (5, "warning", "NCCL_IB_HCA=mlx5_0:1: this host has no RDMA device mlx5_0"),
    ]


@pytest.mark.parametrize(
    ("name", "device", "missed"),
    [
        ("cable_port0", "rocep1s0f0", True),
        ("one_twin", "rocep1s0f0", True),  # without an address it works all the same
        ("second_half_only", "roceP2p1s0f0", False),
        ("random_twin", "rocep1s0f0", False),  # with it `ibv_modify_qp` fails
        ("pair_and_switch", "rocep1s0f1", False),  # it is down
        ("renamed", "", True),  # by the host, not by names
    ],
)
def test_a_half_of_a_cage_is_missed_unless_env_leaves_it_out(
    tmp_path, name, device, missed
):
    host = probe(hosts.build(tmp_path, name), environment={})
    device = device or next(each.name for each in host.rdma if each.active)
    whats = [what for _, _, what in found(f"NCCL_IB_HCA={device}\n", host=host)]
    assert any("the other half of the cage" in what for what in whats) is missed


# The command


def test_the_command(copied, tmp_path):
    path, other = tmp_path / "x.env", tmp_path / "y.env"
    path.write_text("NCCL_IB_DISABLE=1\nNCCL_P2P_DISABLE=1\n")
    other.write_text("NCCL_P2P_DISABLE=1\n")
    shown = run(path, other, "--root", copied, "--vllm", "0.25.1")
    notes = run(other, "--elsewhere", "--target", "gb10")
    data = json.loads(run(path, other, "--root", copied, "--json").stdout)["files"]

    assert shown.exit_code == SourceError.exit_code
    assert (
        f"{path}:1  warning  NCCL_IB_DISABLE=1 is advised against  [ib-disabled]"
        in shown.stdout
    )
    summaries = [
        line for line in shown.stdout.splitlines() if "checked against" in line
    ]
    assert summaries == [
        f"✗ {path}: 1 warning, 1 note; checked against vLLM 0.25.1, any NCCL, this host",
        f"✓ {other}: 1 note; checked against vLLM 0.25.1, any NCCL, this host",
    ]
    assert notes.exit_code == 0
    assert data[0]["situation"] == {"target": "gb10", "topology": "roce"}
    assert data[0]["findings"][0]["id"] == "ib-disabled"


def test_a_laptop_judges_for_a_spark_and_says_so(tmp_path):
    """A machine with another known device judges for that, and one can always be named."""
    (tmp_path / "laptop/proc").mkdir(parents=True)  # without a GPU, or anything else
    thor = hosts.build(tmp_path, "thor")
    judged = "; judged for gb10, --target names another"
    most = "--gpu-memory-utilization 0.95"
    for name, text, what in (
        ("x.sh", f"docker run vllm/vllm-openai:v0.33.0 --model x {most}\n", most),
        (
            "x.env",
            "TORCH_CUDA_ARCH_LIST=10.0\n",
            "TORCH_CUDA_ARCH_LIST=10.0 is advised",
        ),
    ):
        path = tmp_path / name
        path.write_text(text)
        shown = run(path, "--root", tmp_path / "laptop")
        assert what in shown.stdout
        assert shown.stdout.endswith(f"this host{judged}\n")
        assert run(path, "--elsewhere").stdout.endswith(f"{judged}\n")
        for done in (
            run(path, "--root", thor),
            run(path, "--elsewhere", "--target", "h200"),
        ):
            assert (judged in done.stdout, what in done.stdout) == (False, False), (
                done.stdout
            )


def test_what_cannot_be_read(tmp_path):
    path = tmp_path / "x.env"
    path.write_bytes(b"A=1\nB=\xff\n")
    for arguments, kind in (
        ([], UsageError),
        ([tmp_path / "none.env"], UsageError),
        ([path], SourceError),
        ([FILES / "roce.env", "--vllm", "new"], UsageError),
    ):
        with pytest.raises(kind):
            raise run("--elsewhere", *arguments).exception


# Files of patchkit

CODE = (
    *("LD_PRELOAD=/tmp/x.so", "PATH=/tmp:/bin", "PYTHONPATH=/tmp", "VLLM_PLUGINS=x"),
    *("NCCL_NET_PLUGIN=/tmp/x.so", "TRITON_PTXAS_PATH=/tmp/not-ptxas"),
)
BY_RULE = "NCCL_NET_PLUGIN=none\nTRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas\n"


def test_what_runs_code_is_an_error_in_a_file_of_patchkit_and_ordinary_elsewhere():
    ours = (
        render_env_file(Format.ENV, ["role=head"], [EnvEntry("A_B", "1")])
        + "\n".join(CODE)
        + "\n"
    )
    edited, *errors = found(ours)
    assert edited[:2] == (1, "warning")
    assert edited[2].startswith("edited after patchkit wrote it")
    first = ours.splitlines().index(CODE[0]) + 1
    assert errors == [
        (number, "error", f"{line} runs code, and no rule of patchkit sets it")
        for number, line in enumerate(CODE, first)
    ]
    others = "PATH=/opt/bin:/usr/bin\nLD_LIBRARY_PATH=/usr/local/cuda/lib64\nPYTHONPATH=/srv\n"
    assert found(f"# patchkit env is not used here\n{others}", "x.env") == []
    first, *advised = check_text(ours.partition("LD_PRELOAD")[0] + BY_RULE)
    assert (first.id, "runs-code" in {finding.id for finding in advised}) == (
        "edited",
        False,
    )


def test_facts_that_nobody_wrote_are_told_and_not_believed(tmp_path):
    text = render_env_file(
        Format.ENV, ["role=head nodes=2 topology=roce"], [EnvEntry("A_B", "1")]
    )
    text = text.replace("nodes=2", "nodes=abc").replace(
        "topology=roce", "topology=x;id"
    )
    path = tmp_path / "head.env"
    path.write_text(text)
    done = run(path, "--elsewhere")
    assert done.exit_code == SourceError.exit_code
    assert "nodes=abc: nodes takes a number" in done.stdout
    assert "topology=x;id: topology takes single, roce" in done.stdout
    assert found(re.sub(r" digest=\w+", "", text))[0][:2] == (1, "warning")


# Versions


@pytest.mark.parametrize(
    ("lines", "options", "against"),
    [
        (
            "FROM vllm/vllm-openai:v0.18.0",
            [],
            "vLLM 0.18.0 (vllm/vllm-openai:v0.18.0, line 1)",
        ),
        (
            "FROM x\nRUN pip install vllm==0.16.0",
            [],
            "vLLM 0.16.0 (vllm==0.16.0, line 2)",
        ),
        (
            "FROM x\nRUN pip install 'vllm[x]==0.18.1+cu130' triton==3.6.0",
            [],
            "vLLM 0.18.1",
        ),
        (
            "FROM vllm/vllm-openai:v0.18.0",
            ["--vllm", "0.25.1"],
            "vLLM 0.25.1, any NCCL",
        ),
        (
            "FROM vllm/vllm-openai:v0.18.0\nFROM vllm/vllm-openai:v0.19.1",
            [],
            "any vLLM, since it names several: --vllm decides",
        ),
        # Numbers that no release of vLLM has, or none that is known; a month; another project.
        ("FROM lmcache/vllm-openai:v0.3.9", [], "any vLLM, any NCCL"),
        (
            "FROM x\nRUN pip install 'vllm>=0.18.1' vllm-omni==0.20.0",
            [],
            "any vLLM, any NCCL",
        ),
    ],
)
def test_the_last_line_says_which_version_and_where_from(
    lines, options, against, tmp_path
):
    path = tmp_path / "Dockerfile"
    path.write_text(f"{lines}\n")
    assert f"checked against {against}" in " ".join(
        run(path, "--elsewhere", *options).stdout.split()
    )


def test_an_image_has_its_own_software_and_not_this_hosts(copied):
    versions = {"vllm": "0.25.1", "triton": "3.6.0"}
    host = replace(
        probe(copied, environment={}), software=Software(python="3.12.3", **versions)
    )
    for text, expected in (
        ("A_B=1\n", versions),
        ("docker run vllm/vllm-openai m\n", {}),
    ):
        checked = CheckedText(
            where="x.sh", content=read_content(text, "x.sh"), text=text
        )
        known = add_situation(checked, host, {}).situation
        assert {name: known[name] for name in versions if name in known} == expected
