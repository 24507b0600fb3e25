"""A head's file on another machine: what of it is taken over, and what is refused by name."""

import re

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchkit.cli import group
from patchkit.errors import (
    HashMismatchError,
    HostError,
    PatchkitError,
    SourceError,
    UsageError,
)
from patchkit.runtime.envfile.env_file import (
    BLANK,
    NODES_MAX,
    read_env_file,
    with_digest,
)
from patchkit.runtime.rules.secret_texts import find_code_risk
from support import hosts
from tools import golden_env

HEAD = (golden_env.DATA / "head.env").read_text(encoding="utf-8")
# What an attacker adds, and what the error calls it.
CODE = {
    "LD_PRELOAD": "/tmp/x.so",
    "LD_AUDIT": "x.so",
    "PATH": "/tmp/bin:/usr/bin",
    "PYTHONPATH": "/tmp/modules",
    "PYTHONSTARTUP": "/tmp/x.py",
    "BASH_ENV": "/tmp/x.sh",
    "NCCL_NET_PLUGIN": "/tmp/libnccl-net.so",
    "NCCL_TUNER_PLUGIN": "x",
    "NCCL_PROFILER_PLUGIN": "x",
    "VLLM_PLUGINS": "evil",
    "VLLM_NCCL_SO_PATH": "/tmp/libnccl.so.2",
}


def resealed(text: str) -> str:
    """The text with the digest that patchkit would give it: the algorithm is no secret."""
    return with_digest(re.sub(r"digest=[0-9a-f]{16}", f"digest={BLANK}", text, count=1))


def with_set(text: str, names) -> str:
    return text.replace(" format=", f" set={','.join(sorted(names))} format=", 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return hosts.build(tmp_path_factory.mktemp("worker"), "cable_port0", node=1)


@pytest.fixture
def worker(root, tmp_path):
    """Runs `env --role worker` with a head's text: what it printed, and its notes."""

    def run(text: str, *options: str):
        file = tmp_path / "head.env"
        file.write_text(text, encoding="utf-8")
        arguments = [
            "env",
            "--role=worker",
            f"--from={file}",
            f"--root={root}",
            *options,
        ]
        done = CliRunner().invoke(group, [*arguments, "--triton=3.8.0"])
        if done.exception:
            raise done.exception
        return done.stdout, done.stderr

    return run


def test_an_edited_file_is_refused_and_never_sealed_anew_in_silence(worker):
    edited = f"{HEAD}\nNCCL_IB_TC=106\n"
    with pytest.raises(
        HashMismatchError, match="was edited after patchkit wrote it"
    ) as caught:
        worker(edited)
    assert "with --set NAME=VALUE" in caught.value.hint


def test_what_runs_code_never_crosses_machines(worker):
    lines = "".join(f"{name}={value}\n" for name, value in CODE.items())
    forged = resealed(with_set(HEAD, CODE) + lines)
    with pytest.raises(SourceError) as caught:
        worker(forged)
    for name in CODE:
        assert (
            f"head.env: {name} runs code: {find_code_risk(name)}" in caught.value.what
        )
    with pytest.raises(HashMismatchError):
        worker(HEAD + lines)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("MY_OWN=1", "is read by neither vLLM, NCCL nor"),
        ("NCCL_IB_TIMEOUT=99", "is 99: it takes 1 to 22"),
        ("NCCL_TOPO_FILE=/tmp/x.xml", "is /tmp/x.xml: a path, and nobody"),
        ("HF_TOKEN=hf_012345", "is a secret"),
        ("VLLM_LOGGING_LEVEL=", None),
        ("NCCL_IB_ADDR_RANGE=192.168.100.0/24", None),
        ("NCCL_DEBUG_SUBSYS=INIT,NET", None),
        ("PYTHONHASHSEED=0", None),
    ],
)
def test_what_a_user_added_on_the_head_travels_if_it_is_known_and_fits(
    worker, line, says
):
    name = line.partition("=")[0]
    sealed_again = resealed(with_set(HEAD, [name]) + f"{line}\n")
    if says is None:
        assert f"\n{line}\n" in worker(sealed_again)[0]
        return
    with pytest.raises(
        SourceError, match=re.escape(f"{name} {says}".replace(" is is", " is"))
    ):
        worker(sealed_again)


def test_what_the_user_says_on_this_node_counts_here(worker):
    forged = resealed(with_set(HEAD, ["MY_OWN"]) + "MY_OWN=1\n")
    assert "\nMY_OWN=1\n" in worker(forged, "--set=MY_OWN=1")[0]
    with pytest.raises(HostError, match="MY_OWN is 2 here and 1 there"):
        worker(forged, "--set=MY_OWN=2")


def test_a_rules_own_plugin_setting_is_no_way_in(worker):
    """In a ring a rule sets NCCL_NET_PLUGIN=none; this node is in none."""
    with pytest.raises(
        HostError, match="NCCL_NET_PLUGIN is not set here and none there"
    ):
        worker(resealed(f"{HEAD}NCCL_NET_PLUGIN=none\n"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "nodes=2",
            "nodes=99999999999999999999",
            f"takes a number from 1 to {NODES_MAX}",
        ),
        ("topology=roce", "topology=x;id", "takes single, roce, socket, ring, hetero"),
        ("head=192.168.100.10", "head=$(id)", "takes an IPv4 address"),
        ("vllm=0.33.0", f"vllm={'9' * 5000}", "takes a version"),
        ("format=env", "format=xml", "takes env, sh, systemd, docker"),
        (
            "format=env",
            "color=red format=env",
            "is not a fact that this patchkit knows",
        ),
        ("format=env", "model=../../x format=env", "takes a model of"),
        ("format=env", "set=A;B format=env", "takes names of variables"),
    ],
)
def test_facts_are_parsed_strictly(worker, old, new, says):
    assert f" {old} " in HEAD
    text = resealed(HEAD.replace(f" {old} ", f" {new} ", 1))
    with pytest.raises(SourceError, match=r"head\.env:1: ") as caught:
        worker(text)
    assert says in caught.value.what


def test_serve_args_refuse_an_edited_file(tmp_path):
    file = tmp_path / "head.env"
    file.write_text(f"{HEAD}# mine\n", encoding="utf-8")
    arguments = ["serve-args", "a/b", f"--from={file}", "--role=head"]
    assert isinstance(CliRunner().invoke(group, arguments).exception, HashMismatchError)


@pytest.mark.parametrize(
    ("text", "options", "kind", "says"),
    [
        (HEAD, ("--vllm=0.32.0",), UsageError, "--vllm 0.32.0 contradicts"),
        (HEAD, ("--head-ip=10.0.0.1",), UsageError, "--head-ip 10.0.0.1 contradicts"),
        (
            HEAD,
            ("--nccl=2.28.9+cuda13.0",),
            HostError,
            "NCCL 2.28.9 is loaded here, and 2.30.7",
        ),
        (
            f"{HEAD}# mine\n",
            (),
            HashMismatchError,
            "was edited after patchkit wrote it",
        ),
        (
            resealed(f"{HEAD}NCCL_IB_TC=106\n"),
            (),
            SourceError,
            "NCCL_IB_TC is set by no rule",
        ),
    ],
)
def test_what_one_refuses_the_other_refuses(root, tmp_path, text, options, kind, says):
    file = tmp_path / "head.env"
    file.write_text(text, encoding="utf-8")
    shared = ["--role=worker", f"--from={file}", f"--root={root}", *options]
    verbs = (["env"], ["serve-args", "openai/gpt-oss-120b"])
    first, second = (
        CliRunner().invoke(group, [*verb, *shared]).exception for verb in verbs
    )
    assert isinstance(first, kind)
    assert says in str(first)
    assert str(second) == str(first)
    assert type(second) is type(first)


FACTS = st.sampled_from(
    ["role=head", "nodes=2", "nodes=", "topology=roce", "executor=mp"]
)
PIECES = FACTS | st.sampled_from(
    [
        "vllm=0.33.0",
        "head=10.0.0.1",
        "format=json",
        "digest=0",
        '"',
        "{",
        "\n",
        "=",
        "A=1\n",
        "é",
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.text()
    | st.lists(PIECES).map(
        lambda parts: f"# patchkit env: {' '.join(parts)} digest={BLANK}\n"
    )
    | st.tuples(st.integers(0, len(HEAD)), st.text(max_size=20)).map(
        lambda cut: HEAD[: cut[0]] + cut[1] + HEAD[cut[0] :]
    )
)
def test_any_text_is_a_heads_file_or_a_clear_error(tmp_path, text):
    # With the right digest, so that the text is parsed and not only refused as edited.
    file = tmp_path / "head.env"
    file.write_bytes(with_digest(text).encode(errors="surrogatepass"))
    try:
        read = read_env_file(file)
    except PatchkitError:
        return
    assert read.role in ("single", "head", "worker")
