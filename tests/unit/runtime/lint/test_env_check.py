"""What `env check` finds in files as guides have them, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from patchkit.cli import group
from patchkit.errors import SourceError, UsageError
from patchkit.runtime.envfile.render import render
from patchkit.runtime.envfile.syntax import EnvEntry, Format
from patchkit.runtime.formats.read import read_content
from patchkit.runtime.host.probe import probe
from patchkit.runtime.lint.check import check
from support import hosts

FILES = Path(__file__).parents[3] / "data" / "env_check"
SPARKS = {
    "target": "gb10",
    "topology": "roce",
    "vllm": "0.25.1",
    "nccl": "2.30.4",
    "triton": "3.6.0",
}


def found(text, where="head.env", situation=SPARKS, **more):
    """Line, severity and what of each finding."""
    findings = check(text, where, situation, **more)
    return [(each.line, str(each.level), each.what) for each in findings]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "sockets.env",
            [
                (3, "warning", "NCCL_SOCKET_IFNAME: a comment behind the value"),
                (5, "note", "NCCL_NET_GDR_LEVEL=SYS is advised against"),
                (5, "warning", "NCCL_NET_GDR_LEVEL=SYS, and line 7 says NCCL_IB_DISABLE=1"),
                (6, "note", "NCCL_P2P_DISABLE=1 is advised against"),
                (7, "warning", "NCCL_IB_DISABLE=1 is advised against"),
                (8, "note", "RAY_memory_usage_threshold=1.0 is advised against"),
            ],
        ),
        (
            "roce.env",
            [
                (1, "warning", "vLLM 0.25.1 does not read VLLM_USE_FLASHINFER_MOE_FP4 any more"),
                (2, "warning", "VLLM_MARLIN_USE_ATOMIC_ADD=1 is advised against"),
                (5, "warning", "NCCL_IB_GID_INDEX=3 is advised against"),
                (7, "note", "NCCL_IB_ROCE_VERSION_NUM=2 is advised against"),
            ],
        ),
        (
            "mixed.sh",
            [
                (7, "warning", "NCCL_IB_DISABLE=1 is advised against"),
                (7, "note", "NCCL_P2P_DISABLE=1 is advised against"),
                (8, "note", "NCCL_SHM_DISABLE=1 is advised against"),
                (9, "warning", "NCCL_PROTO=Simple is advised against"),
                (19, "warning", "--dashboard-host 0.0.0.0: Ray's dashboard on every interface"),
                (20, "warning", "NCCL_CROSS_NIC=9: it takes 0 to 2"),
                (20, "note", "vllm serve on every interface, and without a key"),
            ],
        ),
        (
            "config.local.env",
            [
                (1, "warning", "the value of HF_TOKEN is in the file"),
                (1, "warning", "HF_TOKEN: a comment behind the value"),
                (1, "note", "HF_TOKEN and 2 more: quotes"),
                (4, "warning", "WORKER_IP=<worker-ip>: still to be filled in"),
                (5, "error", "VLLM_HOST_IP=<this-node>: still to be filled in"),
                (6, "warning", "NCCL_DEBUG=verbose: it takes VERSION, WARN, INFO, ABORT, TRACE"),
                (7, "warning", "NCCL_IB_HCA=rocep1s0f0: without roceP2p1s0f0"),
                (9, "warning", "NCCL_SOCKET_NTHREADS=16 * NCCL_NSOCKS_PERTHREAD=8 is 128"),
            ],
        ),
        (
            "compose.yaml",
            [
                (6, "warning", "VLLM_HOST_IP=0.0.0.0: every address"),
                (7, "warning", "NCCL_IB_TIMEOUT=99: it takes 1 to 22"),
                (13, "note", "GLOO_SOCKET_IFNAME=enP7s7, and line 12 says NCCL_SOCKET_IFNAME="),
                (15, "warning", "nobody reads RAY_MEMORY_MONITOR_REFRESH_MS"),
            ],
        ),
        (
            "Dockerfile",
            [
                (3, "warning", "VLLM_USE_DEEP_GEMM=1 is advised against"),
                (4, "warning", "TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas is advised against"),
                (5, "warning", "no known NCCL reads NCCL_IB_DISABLED"),
                (5, "warning", "vLLM 0.25.1 does not read VLLM_USE_V1 any more: 0.10.0 to 0.11.0"),
            ],
        ),
        (
            "vllm.service",
            [
                (4, "warning", "NCCL_IB_ADDR_FAMILY=IPv4: it takes AF_INET, AF_INET6"),
            ],
        ),
        (
            "launch.py",
            [
                (4, "warning", "NCCL 2.30.4 does not read NCCL_IB_SUBNET_AWARE_ROUTING yet"),
                (6, "warning", "no known NCCL reads NCCL_P2P_DISABEL"),
                (6, "warning", "no known vLLM reads VLLM_LOGGING_LEVL"),
            ],
        ),
    ],
)
def test_files_as_guides_have_them(name, expected):
    actual = found((FILES / name).read_text(), name)

    assert [(line, severity) for line, severity, _ in actual] == [row[:2] for row in expected]
    for (_, _, what), (_, _, start) in zip(actual, expected, strict=True):
        assert what.startswith(start)


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        ("export A_B=c", "x.sh", [(1, "A_B", "c")]),
        ("A_B='c d' cmd", "x.sh", [(1, "A_B", "c d")]),
        ("set -e\ncmd; export A_B=c", "x.sh", [(2, "A_B", "c")]),
        ('docker run \\\n -e A_B=c --env="D_E=f g" \\\n --env=H_I=j x', "", 3),
        ("FROM x\nENV A_B c d\nENV E_F=g H_I=j", "Dockerfile", 3),
        ('Environment="A_B=c d" E_F=g\nEnvironment=H_I=j', "x.service", 3),
        ("a:\n env:\n  - A_B=c\n  - name: D_E\n    value: f\nb:\n env: {H_I: 'j'}\n", "x.yaml", 3),
        ('os.environ["A_B"] = "c"\nos.environ.setdefault("D_E", "f")', "x.py", 2),
        ('{"env": {"A_B": "c"}}', "x.json", [(1, "A_B", "c")]),
        (': "${A_B:=c}"', "x.sh", []),
        (': "${A_B:=c}"\nexport A_B', "x.sh", [(1, "A_B", "c")]),
        ("A_B=c d\n\n# A_B=e\nD_E='f'", "x.env", [(1, "A_B", "c d"), (4, "D_E", "f")]),
        ("export A_B='x'  # D_E=f", "x.sh", [(1, "A_B", "x")]),
        ("echo A_B=c\nif [ x$A_B=c ]; then unset A_B; fi", "x.sh", []),
        ("echo A_B=c >> /etc/environment", "x.sh", [(1, "A_B", "c")]),
    ],
)
def test_what_sets_a_variable(text, where, expected):
    actual = [(each.line, each.name, each.value) for each in read_content(text, where).assignments]

    if isinstance(expected, int):
        assert len({name for _, name, _ in actual}) == expected
        assert {name for _, name, _ in actual} <= {"A_B", "D_E", "E_F", "H_I"}
    else:
        assert actual == expected


@settings(deadline=None)
@given(
    st.text(st.sampled_from("NCCL_IB=0 'a\"\\\n#$-:{}<>,^"))
    | st.text()
    | st.text().map(lambda text: f"# patchkit env: nodes={text} digest={'0' * 16}\n")
)
@example("\x01\xe8O{\U000ed1c7\xa7\xfe\U000c3d37\x86\t\xa6\xf3\xb3\xb1\x9c#F\x13\x82n\x18\x11")
def test_any_text_is_read_and_told_by_its_lines(text):
    for kind in ("x.env", "x.sh", "compose.yaml", "x.py"):
        for each in check(text, kind, SPARKS):
            assert 1 <= each.line <= text.count("\n") + 1


@pytest.mark.parametrize("kind", Format)
def test_our_own_files_in_every_format(kind):
    entries = [
        EnvEntry("NCCL_IB_HCA", "rocep1s0f0,roceP2p1s0f0", "NCCL_IB_GID_INDEX=3 is not needed."),
        EnvEntry("NCCL_IB_TIMEOUT", "23", 'A "reason": NCCL_DEBUG=no'),
        EnvEntry("HF_TOKEN", ""),
    ]
    text = render(kind, ["role=head", "NCCL_WRONG=1"], entries)

    ((line, severity, what),) = found(text, f"head.{kind}")

    assert (severity, what) == ("warning", "NCCL_IB_TIMEOUT=23: it takes 1 to 22")
    assert "NCCL_IB_TIMEOUT" in text.splitlines()[line - 1]


def test_branches_services_and_commands_do_not_contradict_each_other():
    script = (
        "#!/bin/sh\nif $head; then\n  export VLLM_HOST_IP=10.0.0.1\nelse\n  export "
        "VLLM_HOST_IP=10.0.0.2\nfi\n"
        "docker run -e NCCL_IB_DISABLE=1 x\ndocker run -e NCCL_IB_HCA=mlx5_0 x\n"
    )
    assert found(script, "x.sh", {}) == []
    assert found("A=1\nVLLM_HOST_IP=10.0.0.1\nVLLM_HOST_IP=10.0.0.2\n", "x.env", {}) == [
        (3, "warning", "VLLM_HOST_IP=10.0.0.2, and line 2 says VLLM_HOST_IP=10.0.0.1")
    ]


@pytest.mark.parametrize("nccl", ["^lo,docker", "enp1s0f", "=enp1s0f0np0,lo", "enP7s7,enp1s0f0np0"])
def test_interfaces_that_agree(nccl):
    assert found(f"NCCL_SOCKET_IFNAME={nccl}\nGLOO_SOCKET_IFNAME=enp1s0f0np0\n") == []


@pytest.mark.parametrize("value", ["", "hf_xxx", "your_token", "$HF_TOKEN", "${HF_TOKEN:-}"])
def test_what_is_no_secret_yet(value):
    assert found(f"export HF_TOKEN={value}\n", "x.sh", mode=0o644) == []


def test_a_secret_that_others_may_read_is_worse():
    text = f"export OPENAI_API_KEY=sk-{'a1B2c3D4' * 5}\n"
    (private,), (public,) = (check(text, "x.sh", {}, mode=mode) for mode in (0o600, 0o640))

    assert (private.level, public.level) == ("warning", "error")
    assert "which others may read (0640)" in public.what
    assert "a1B2" not in f"{private} {public}"


def test_versions_decide():
    text = "VLLM_USE_FLASHINFER_MOE_FP4=0\nVLLM_ATTENTION_BACKEND=FLASHINFER\n"

    assert found(text, situation={"vllm": "0.14.1"}) == []
    assert [each[1] for each in found(text, situation={})] == ["note", "note"]
    first, second = check(text, "x.env", {"vllm": "0.24.0"})
    assert first.hint.startswith("the flag --moe-backend")
    assert second.level == "warning"


@pytest.fixture
def spark(tmp_path):
    return hosts.build(tmp_path, "cable_port0", node=0)


def test_what_this_host_does_not_have(spark):
    host = probe(spark, environment={})
    text = (
        "VLLM_HOST_IP=192.168.100.11\n"
        "NCCL_SOCKET_IFNAME=enp1s0f\n"
        "GLOO_SOCKET_IFNAME=enp1s0f\n"
        "UCX_NET_DEVICES=rocep1s0f0:1,enp1s0f1np1\n"
        "NCCL_IB_HCA=mlx5_0:1\n"
    )

    assert found(text, host=host) == [
        (1, "error", "VLLM_HOST_IP=192.168.100.11: this host has no address 192.168.100.11"),
        (3, "error", "GLOO_SOCKET_IFNAME=enp1s0f: this host has no interface enp1s0f"),
        (
            4,
            "warning",
            "UCX_NET_DEVICES=rocep1s0f0:1,enp1s0f1np1: enp1s0f1np1 is down",
        ),
        (5, "warning", "NCCL_IB_HCA=mlx5_0:1: this host has no RDMA device mlx5_0"),
    ]


def test_twins_go_by_the_host_and_not_by_names(tmp_path):
    host = probe(hosts.build(tmp_path, "renamed", node=0), environment={})
    active = [each for each in host.rdma if each.active]

    ((_, _, what),) = found(f"NCCL_IB_HCA={active[0].name}\n", host=host)

    assert what.endswith(f"without {active[0].twin}, the other half of the cage")


@pytest.mark.parametrize(
    ("name", "device", "missed"),
    [
        ("cable_port0", "rocep1s0f0", True),
        ("one_twin", "rocep1s0f0", True),  # without an address it works all the same
        ("second_half_only", "roceP2p1s0f0", False),
        ("random_twin", "rocep1s0f0", False),  # with it `ibv_modify_qp` fails
        ("pair_and_switch", "rocep1s0f1", False),  # it is down
    ],
)
def test_a_half_that_env_leaves_out_is_not_missed(tmp_path, name, device, missed):
    host = probe(hosts.build(tmp_path, name), environment={})
    whats = [what for _, _, what in found(f"NCCL_IB_HCA={device}\n", host=host)]
    assert any("the other half of the cage" in what for what in whats) is missed


def run(*arguments):
    return CliRunner().invoke(group, ["env", "check", *map(str, arguments)])


def test_the_command(spark, tmp_path):
    path = tmp_path / "x.env"
    path.write_text("NCCL_IB_DISABLE=1\nNCCL_P2P_DISABLE=1\n")

    shown = run(path, "--root", spark, "--vllm", "0.25.1")
    notes = run(path, "--elsewhere", "--target", "gb10")
    data = run(path, "--root", spark, "--json")

    assert shown.exit_code == SourceError.exit_code
    assert f"{path}:1  warning  NCCL_IB_DISABLE=1 is advised against\n  why:  TCP " in shown.stdout
    assert shown.stdout.splitlines()[-1] == (
        f"✗ {path}: 1 warning, 1 note; checked against vLLM 0.25.1, any NCCL, this host"
    )
    assert notes.exit_code == 0
    assert notes.stdout.splitlines()[-1].startswith(f"✓ {path}: 1 note; checked against any vLLM")
    assert json.loads(data.stdout)["situation"] == {"target": "gb10", "topology": "roce"}
    assert [each["line"] for each in json.loads(data.stdout)["findings"]] == [1, 2]


MOST = "--gpu-memory-utilization 0.95"


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("x.sh", f"docker run vllm/vllm-openai:v0.33.0 --model x {MOST}\n", MOST),
        ("x.sh", f'docker run -e X_ARGS="{MOST}" vllm/vllm-openai:v0.33.0\n', MOST),
        ("x.sh", "docker run -e GPU_UTIL=0.98 vllm/vllm-openai:v0.33.0\n", "GPU_UTIL=0.98"),
        ("x.env", "GPU_MEMORY_UTILIZATION=0.95\n", "GPU_MEMORY_UTILIZATION=0.95"),
        (
            "compose.yml",
            f"services:\n v:\n  image: vllm/vllm-openai:v0.33.0\n  command: --model x {MOST}\n",
            MOST,
        ),
        ("x.env", "TORCH_CUDA_ARCH_LIST=10.0\n", "TORCH_CUDA_ARCH_LIST=10.0 is advised"),
        ("x.sh", 'export TORCH_CUDA_ARCH_LIST="12.0f;12.1f"\n', "12.0f;12.1f is advised against"),
    ],
)
def test_a_laptop_judges_for_a_spark_and_says_so(tmp_path, name, text, what):
    """A machine with another known device judges for that, and one can always be named."""
    path, judged = tmp_path / name, "; judged for gb10, --target names another"
    path.write_text(text)
    (tmp_path / "laptop/proc").mkdir(parents=True)  # without a GPU, or anything else
    shown = run(path, "--root", tmp_path / "laptop")
    assert what in shown.stdout
    assert shown.stdout.endswith(f"this host{judged}\n")
    assert run(path, "--elsewhere").stdout.endswith(f"{judged}\n")
    other = run(path, "--root", hosts.build(tmp_path, "thor"))
    for done in (other, run(path, "--elsewhere", "--target", "h200")):
        assert (judged in done.stdout, what in done.stdout) == (False, False), done.stdout


def test_a_file_that_env_wrote_passes(spark, tmp_path):
    path = tmp_path / "head.env"
    options = ["--root", str(spark), "--vllm", "0.25.1", "--nccl", "2.30.7"]
    head = ["--role", "head", "--nodes", "2"]
    for kind in Format:
        written = CliRunner().invoke(
            group, ["env", *head, *options, "--format", str(kind), "--force", "-o", str(path)]
        )
        assert written.exit_code == 0, written.output

        done = run(path, *options)

        assert (done.exit_code, done.stdout.count("\n")) == (0, 1), done.stdout


def test_what_cannot_be_read(tmp_path):
    path = tmp_path / "x.env"
    path.write_bytes(b"A=1\nB=\xff\n")

    os.mkfifo(tmp_path / "pipe")
    long = tmp_path / "long.env"
    long.write_text("A=\n" * 300_000)
    large = tmp_path / "large.env"
    large.touch()
    os.truncate(large, 100 << 20)
    for arguments, kind in (
        ([tmp_path / "none.env"], UsageError),
        ([tmp_path], UsageError),
        ([tmp_path / "pipe"], UsageError),
        (["/dev/zero"], UsageError),
        ([path], SourceError),
        ([long], SourceError),
        ([large], SourceError),
        ([FILES / "roce.env", "--vllm", "new"], UsageError),
    ):
        with pytest.raises(kind):
            raise run("--elsewhere", *arguments).exception


CODE = ("LD_PRELOAD=/tmp/x.so", "PATH=/tmp:/bin", "PYTHONPATH=/tmp", "VLLM_PLUGINS=x")


def test_what_runs_code_is_an_error_in_a_file_of_patchkit_and_ordinary_elsewhere():
    ours = render(Format.ENV, ["role=head"], [EnvEntry("A_B", "1")]) + "\n".join(CODE) + "\n"
    edited, *errors = found(ours, "head.env", {})
    assert edited == (
        1,
        "warning",
        "edited after patchkit wrote it: its digest is not that of the text",
    )
    first = ours.splitlines().index(CODE[0]) + 1
    assert errors == [
        (number, "error", f"{line} runs code, and no rule of patchkit sets it")
        for number, line in enumerate(CODE, first)
    ]
    others = "PATH=/opt/bin:/usr/bin\nLD_LIBRARY_PATH=/usr/local/cuda/lib64\nPYTHONPATH=/srv\n"
    assert found(others, "x.env", {}) == []
    assert found(f"# patchkit env is not used here\n{others}", "x.env", {}) == []


@pytest.mark.parametrize(
    ("line", "fine"),
    [
        ("NCCL_NET_PLUGIN=none", True),
        ("NCCL_NET_PLUGIN=/tmp/x.so", False),
        ("TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas", True),
        ("TRITON_PTXAS_PATH=/tmp/not-ptxas", False),
    ],
)
def test_what_a_rule_sets_may_stand_in_its_file(line, fine):
    name, _, value = line.partition("=")
    text = render(Format.ENV, ["role=worker"], [EnvEntry(name, value)])
    assert bool(found(text, "worker.env", {})) is not fine


def test_facts_that_nobody_wrote_are_told_and_not_believed(tmp_path):
    text = render(Format.ENV, ["role=head nodes=2 topology=roce"], [EnvEntry("A_B", "1")])
    text = text.replace("nodes=2", "nodes=abc").replace("topology=roce", "topology=x;id")
    path = tmp_path / "head.env"
    path.write_text(text)
    done = run(path, "--elsewhere")
    assert done.exit_code == SourceError.exit_code
    assert "nodes=abc: nodes takes a number" in done.stdout
    assert "topology=x;id: topology takes single, roce" in done.stdout
    broken = re.sub(r" digest=\w+", "", text)
    assert found(broken, "head.env", {})[0][:2] == (1, "warning")


@pytest.mark.parametrize(
    ("where", "piece", "findings"),
    [
        ("x.sh", "${a=", 0),
        ("x.sh", "vllm serve ", 0),
        ("x.sh", "A_:" + " " * 200_000, 0),
        ("x.sh", ' a="\\"', 0),
        ("x.sh", "export NCCL_X=1\n", 1),
        ("x.env", "NCCL_IB_HCA=rocep1s0f0," * 100, 1),
        ("x.env", "a", 0),
        ("x.sh", '0"\x80', 0),
        ("x.env", "MASTER_ADDR=ip-", 0),
    ],
)
def test_hostile_files_end(where, piece, findings):
    """A pattern that begins anew at every place of such a text would take hours."""
    text = (piece * (2**18 // len(piece) + 1))[: 2**18]
    assert len(found(text, where)) == findings


@pytest.mark.parametrize("value", ["9" * 5000, "٣", "0x" + "f" * 5000])
def test_numbers_that_python_would_not_read(value):
    lines = f"NCCL_IB_TIMEOUT={value}\nNCCL_SOCKET_NTHREADS={value}\nNCCL_NSOCKS_PERTHREAD=2\n"
    assert [each[0] for each in found(lines, "x.env", {})] == [1, 2]


@pytest.mark.parametrize(
    ("line", "vllm", "expected"),
    [
        ("vllm serve m --swap-space 16", "0.25.1", ("error", "--swap-space: 0.11.1 to 0.17.1 do")),
        ("vllm serve m --swap-space 16", "0.17.1", ("note", "--swap-space 16 is better left out")),
        ("vllm serve m --enforce-eager", "0.25.1", ("note", "--enforce-eager is better left out")),
        ("vllm serve m --omni", "", ("warning", "no known vLLM takes --omni")),
        ("vllm serve m --max_model_len 8", "0.25.1", None),
        ("vllm serve m --no-enable-prefix-caching", "0.25.1", None),
        ("vllm serve m && other --swap-space 16", "0.25.1", None),
        ("# vllm serve m --swap-space 16", "0.25.1", None),
    ],
)
def test_flags_of_a_server(line, vllm, expected):
    lines = f"set -e\n{line.replace(' m ', ' m ' + chr(92) + chr(10) + '  ')}\n"
    findings = found(lines, "launch.sh", {"vllm": vllm})
    assert [each[1] for each in findings] == ([expected[0]] if expected else [])
    assert not expected or (expected[1] in findings[0][2] and findings[0][0] == 3)
