"""The command line without a tree: help, refusals, the catalogue, completion, no network."""

import json
import re
import shlex
import subprocess

import pytest

from patchkit import __version__
from patchkit.cli.verbs import GROUPS, VERBS
from patchkit.patching.recipe import load_recipe, load_recipes
from support.needed import need
from support.terminal import piped


def test_version_and_help(cli):
    assert cli("--version").stdout.split()[-1] == __version__
    words = set(re.findall(r"[\w-]+", cli("--help").stdout))
    assert words >= set(VERBS)
    assert sum(map(len, GROUPS.values())) <= 20


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "nccl"),
        ("fetch", "nccl==2.30.7"),
        (
            "apply",
            "--dry-run",
            "--nccl-src",
            f"git+https://127.0.0.1:9/nccl@{'a' * 40}",
        ),
        ("repack", "vllm==0.24.0"),
        ("build", "vllm", "--version", "0.25.1"),
    ],
)
def test_no_network_has_one_code(cli, tmp_path, arguments):
    """Port 9 of this machine, where nobody listens, is every proxy and the index."""
    if arguments == ("build", "nccl"):
        need("make", "aarch64-linux-gnu-g++")
    nobody = "http://127.0.0.1:9"
    proxies = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"), nobody
    )
    cache = {"PATCHKIT_CACHE_DIR": str(tmp_path), "PIP_INDEX_URL": f"{nobody}/simple"}
    said = cli(
        *arguments, rc=7, env={**proxies, **cache, "no_proxy": ""}, cwd=tmp_path
    ).stderr
    assert "there is no network" in said


@pytest.mark.parametrize(
    ("line", "rc", "says"),
    [
        (
            "fixes --vllm-src nowhere",
            2,
            ["nowhere: no such file or directory", "vllm=="],
        ),
        (
            "fixes --vllm-src .",
            3,
            ["not a source tree of vLLM", "setup.py is missing"],
        ),
        (
            "apply --vllm-src vllm==0.11.0",
            3,
            ["0.11.0 is not supported", "cu130", "SM121"],
        ),
        ("apply --vllm-src vllm==99.0", 3, ["99.0", "0.33.0"]),
        (
            "bench m --url http://u:PASS@h",
            2,
            ["'h' is not the address", "see a login in it"],
        ),
        ("cluster init -- -oX", 2, ["'-oX' is not a host", "next: write it as"]),
        ("cluster init a a", 2, ["node: a is named twice"]),
        ("cluster init a --head-ip 999", 2, ["'999' is not an IPv4 address"]),
        ("serve m", 2, ["`patchkit` has no command 'serve'", "patchkit up m"]),
        (
            "build vllm --version nan",
            2,
            ["'nan' is not a version", "next: write it as"],
        ),
        ("switch ''", 2, ["'MODEL': it is empty, like an unset", "patchkit switch --"]),
        ("check a ''", 2, ["'FILE...': it is empty, like an unset variable"]),
        ("aply 'x y'", 2, ["patchkit apply 'x y'\n"]),
        ("xyz", 2, ["next: patchkit --help"]),
        (
            "apply --vllm-src . --arch 12.1",
            2,
            ["'12.1' is not one of 'native', 'family'"],
        ),
        ("apply --vllm-src . --target h100", 2, ["'h100' is not one of 'gb10'"]),
        ("apply vllm==9.9.9", 3, ["known are 0.11.1 to 0.33.0"]),
        ("repack vllm==9.9.9", 3, ["known are 0.11.1 to 0.33.0"]),
        ("apply vllm==0.33", 3, ["did you mean vllm==0.33.0?"]),
        ("apply vlm==0.25.1", 2, ["known are vllm, nccl, flashinfer; --recipes"]),
        (
            "apply 0.25.1",
            2,
            ["0.25.1: no such file, folder or release such as vllm==0.33.0"],
        ),
        ("apply", 2, ["no source: this verb takes one", "--vllm-src or --nccl-src"]),
        ("diff .", 2, ["says whether it is vLLM or NCCL"]),
        ("apply nosuch", 2, ["nosuch: no such file, folder or release", "next: ls /"]),
        (
            "apply /no/such/dir",
            2,
            ["/no/such/dir: no such file, folder or release", "next: ls /\n"],
        ),
        (
            "revert ./no/such",
            2,
            ["no/such: no such file, folder or release", "next: ls /"],
        ),
        (
            "diff vllm==0.24.0 --vllm-src vllm==0.24.0",
            2,
            ["this verb takes one source"],
        ),
        ("revert vllm==0.23.0", 2, ["nothing of it is patched in build/vllm-0.23.0"]),
        ("build nccl --cpu sparc", 2, ["not one of 'aarch64', 'x86_64'"]),
        ("apply --nccl-src nccl==2.28.3", 3, ["sticky CUDA error"]),
        ("apply --nccl-src git+file:///x@v9", 2, ["'v9' is not a commit"]),
        ("apply --nccl-src vllm==0.24.0", 2, ["neither a git URL nor a release"]),
        ("apply --vllm-src x --sha256 0", 2, ["'0' is not a sha256"]),
        (
            "explain arch_list",
            2,
            ["'arch_list'", "next: patchkit explain arch_lists\n"],
        ),
        (
            "explain sm_121",
            0,
            ["nccl_lacks_sm_121   ", "What guides say", "\n  torch-not-compatible "],
        ),
        (
            "explain 'garbage nvfp4'",
            0,
            ["\n  nvfp4_moe_marlin ", "\n  garbage-output "],
        ),
        (
            "explain no-such-thing",
            2,
            ["symptom is 'no-such-thing'", "next: patchkit explain\n"],
        ),
        (
            "doctor --log no.log",
            2,
            ["no.log: no such file", "docker logs vllm 2>&1 | patchkit doc"],
        ),
        ("explain 'Profiling run'", 0, ["profiling_run_hang"]),
        ("explain Ethernet", 0, ["ethernet_10_to_20_times_slower"]),
        ("explain MTU", 0, ["mtu-path"]),
        ("explain NGC", 0, ["ngc_images_incompatible"]),
        ("explain WGMMA", 0, ["no_tmem_no_wgmma"]),
        ("explain 'ready in 2 to 5 min'", 0, ["ready_in_two_to_five_minutes"]),
        (
            "env explain NCCL_IB_TIMEOUT",
            0,
            ["unverified", "patchkit explain nccl_ib_timeout_22"],
        ),
        ("env explain VLLM_NCCL_SO_PATH", 0, ["patchkit explain nccl_so_path"]),
        (
            "wheelhouse upgrade",
            2,
            ["has no command 'upgrade'", "next: patchkit wheelhouse --help\n"],
        ),
        ("wheelhouse lst", 2, ["next: patchkit wheelhouse list\n"]),
        (
            "serve-args m --from no.env",
            2,
            ["no.env: no such file", "next: patchkit env -o no.env"],
        ),
        (
            "env --role worker --from no.env",
            2,
            ["next: `patchkit env --role head -o head.env` on the head"],
        ),
        (
            "check no.env",
            2,
            [
                "no.env: no such file",
                "next: name another file, or check what runs: `patchkit check --r",
            ],
        ),
        (
            "check --running 999999999",
            2,
            ["it has ended, or is another user's", "`ps -eo pid,user,args` lists"],
        ),
        ("fetch vllm==0.15.0", 3, ["0.15.0 is not supported", "no sdist"]),
        ("fetch vllm==0.14.9", 3, ["did you mean vllm==0.14.0 or vllm==0.14.1?"]),
        (
            "repack vllm==0.33.0 --offline --dir /proc/x",
            7,
            ["/proc/x: not a folder that can be written to", "with --dir"],
        ),
        ("net plan --nodes 1", 2, ["invalid value for '--nodes': 1 is not in"]),
        ("net plan --mtu 1279", 2, ["'--mtu': 1279 is not in the range 1280<=x<=9978"]),
        ("net plan --mtu 9979", 2, ["'--mtu': 9979 is not in the range 1280<=x<=9978"]),
        (
            "net verify --peer 300.1.1.1",
            2,
            ["is not an IPv4 address", "next: `ip -4 -brief address` on that machine"],
        ),
        (
            "serve-args /nonexist --vllm 0.33.0",
            0,
            ["vllm serve /nonexist ", "/nonexist is no folder with weights on this"],
        ),
        (
            "bench diff a b",
            2,
            ["a/digest.json: no such file", "folder that `patchkit bench MODEL` wrote"],
        ),
        ("fetch torch==2.9.0", 2, ["torch==2.9.0: no such file, folder or release"]),
        ("fixes --json --nosuch", 2, ['"exit_code": 2']),
    ],
)
def test_what_is_said_without_a_tree(line, rc, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHKIT_CACHE_DIR", str(tmp_path))
    said = piped(shlex.split(line), rc)
    assert not [words for words in says if words not in said], said


@pytest.mark.parametrize(
    "words", [["explain"], ["repack"], ["apply", "--target"]], ids=" ".join
)
def test_a_huge_argument_is_not_printed_whole(words):
    said = piped([*words, "x" * 100_000])
    assert "x" * 500 in said
    assert len(said) < 3000


def test_an_install_from_an_empty_wheelhouse_names_what_fills_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wheelhouse").mkdir()
    said = piped(["cluster", "install"], 2)
    repack = f"patchkit repack vllm=={load_recipe('vllm').newest} --dir wheelhouse"
    assert "wheelhouse: holds no wheels\n" in said
    assert f"next: {repack} && patchkit wheelhouse fill --dir wheelhouse\n" in said


def test_errors_are_json_if_json_is_asked_for(cli):
    done = cli("apply", "--vllm-src", "vllm==0.11.0", "--json", rc=3)
    error = json.loads(done.stdout)["error"]
    assert (error["what"], error["exit_code"]) == ("vllm 0.11.0 is not supported", 3)
    assert error["why"]
    assert error["next"].startswith("use one of 0.11.1 to ")
    assert done.stderr == ""


def test_explain_tells_how_the_advice_of_guides_stands(cli):
    listed = json.loads(cli("explain", "--json").stdout)
    fixes = [fix.id for each in load_recipes() for fix in each.fixes]
    assert [fix["id"] for fix in listed["fixes"]] == fixes
    shown = cli("explain").stdout
    assert all(each["id"] in shown for each in (*listed["fixes"], *listed["claims"]))
    claim = listed["claims"][-1]
    assert json.loads(cli("explain", claim["id"], "--json").stdout) == claim
    # By what a user reads in a log or a guide, too.
    assert cli("explain", "message truncated").stdout.startswith(
        "message_truncated  false"
    )


def test_the_bash_completion_script_completes(cli, tmp_path):
    script = tmp_path / "completion.bash"
    script.write_text(cli(env={"_PATCHKIT_COMPLETE": "bash_source"}).stdout)
    subprocess.run(["bash", "-n", script], check=True)
    for words, count, completed in (
        ("patchkit rev", "1", "revert"),
        ("patchkit build vllm --exte", "3", "--extensions"),
        ("patchkit apply --target th", "3", "thor"),
    ):
        asked = {
            "COMP_WORDS": words,
            "COMP_CWORD": count,
            "_PATCHKIT_COMPLETE": "bash_complete",
        }
        assert cli(env=asked).stdout.split() == [f"plain,{completed}"]
