"""Pack a report: nothing private comes out, and what a diagnosis needs stays."""

import json
import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.doctor.bundle import PrivateNames, Redactor, pack_report, private_names, save_report
from patchkit.errors import UsageError
from support.clusters import node_facts

NAMES = PrivateNames(
    hosts=(("spark-3995", "spark-3995.local"), ("zeus",)),
    users=("annalena", "bo", "nvidia"),
    addresses=("192.168.177.11", "10.0.0.5", "2001:db8::7", "84.17.3.9"),
    serials=("1590124001234",),
)


def redacted(text, names=NAMES):
    redactor = Redactor(names)
    redactor.learn(text)
    return redactor.text(text)


BECOMES = {
    "ssh annalena@spark-3995": "ssh user-1@node-1",
    "spark-3995:812:901 [0] NCCL INFO x": "node-1:812:901 [0] NCCL INFO x",
    "SPARK-3995.local and zeus": "node-1 and node-2",
    "bo is in boot": "user-2 is in boot",
    "/home/annalena/.cache and /home/other/x": "/home/user-1/.cache and /home/user-3/x",
    "inet 192.168.177.11/24 brd 192.168.177.255": "inet address-1/24 brd address-5",
    "GID 0000:0000:0000:0000:0000:ffff:0a00:0005": "GID address-2",
    "169.254.10.1<0>": "address-5<0>",
    "ip-192-168-177-11.internal": "ip-address-1.internal",
    "link/ether 4c:bb:47:01:02:03 enx4cbb47010203": "link/ether mac-1 enxmac-2",
    "GPU-3f2b1c00-1111-2222-3333-444455556666": "GPU-uuid-1",
    "serial: 1590124001234": "serial: serial-1",
    "Authorization: Bearer abcDEF123456": "Authorization: Bearer secret-1",
    "HF_TOKEN=qwertz99\nand qwertz99 again": "HF_TOKEN=secret-1\nand secret-1 again",
    "write to jo.doe@example.org": "write to email-1",
}


@pytest.mark.parametrize("text", BECOMES)
def test_what_is_taken_out(text):
    assert redacted(text) == BECOMES[text]


STAYS = [
    "127.0.0.1:8000 ::1 0.0.0.0 localhost 255.255.255.0 224.0.0.1",
    "NCCL version 2.28.9.1, driver 580.95.05, 2.28.9.1 alone",
    "nvidia-cudnn-cu13==9.15.1.9 nvidia-curand-cu12   10.3.9.90",
    "nvidia_nccl_cu13-2.28.9.1-py3-none-manylinux_2_18_aarch64.whl",
    "--max-num-batched-tokens 8192 --max-model-len 4096 --enable-prefix-caching",
    "0000:01:00.0 12:34:56 std::string at::cuda 1:2:3",
    "pip install nvidia-nccl-cu13 vllm==0.25.1+nv",
    "patchkit-vllm-worker@1.service started; user@1000.service",
    "rocep1s0f0:1/RoCE enp1s0f0np0 NCCL_IB_HCA==rocep1s0f0",
    "sha256:" + "ab" * 32 + " commit " + "0123456789" * 4,
    "eos_token='</s>' completion_tokens=12 HF_TOKEN_PATH",
    "/root/.cache /usr/lib/python3.12 /home and root",
]


@pytest.mark.parametrize("text", STAYS)
def test_what_a_diagnosis_needs_stays(text):
    assert redacted(text) == text


def test_a_report(tmp_path):
    facts = node_facts(tmp_path, user="annalena", home="/home/annalena")
    system = replace(facts.host.system, hostname="spark-3995")
    facts = replace(facts, host=replace(facts.host, system=system))
    own = next(each for dev in facts.host.netdevs for each in dev.lasting)
    names = private_names([("annalena@spark-3995.lan", facts), ("zeus", None)])
    parts = {
        "nodes": [{"spark-3995": {"user": "annalena", "ip": str(own.ip), "n": 2}}],
        "env": f"VLLM_HOST_IP={own.ip}\nHF_TOKEN=hush-hush-hush\nNCCL_IB_HCA=rocep1s0f0\n",
        "journal": f"zeus: connect to {own.ip} failed; hush-hush-hush",
    }
    text, taken = pack_report(parts, names)
    for each in ("annalena", "spark-3995", "zeus", "hush", str(own.ip)):
        assert each not in text
    report = json.loads(text)
    place = report["env"][0].removeprefix("VLLM_HOST_IP=")
    assert place.startswith("address-")
    assert report["nodes"] == [{"node-1": {"user": "user-1", "ip": place, "n": 2}}]
    assert report["env"][1:] == ["HF_TOKEN=secret-1", "NCCL_IB_HCA=rocep1s0f0"]
    assert report["journal"] == [f"node-2: connect to {place} failed; secret-1"]
    assert (report["taken_out"], taken["secret-1"]) == (taken, 2)


def test_a_report_is_its_owners_and_replaces_nothing(tmp_path):
    path = tmp_path / "report.json"
    save_report(b"text", path)
    assert (path.stat().st_mode & 0o777, path.read_text()) == (0o600, "text")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for taken in (path, link):
        with pytest.raises(UsageError, match="is there already"):
            save_report(b"other", taken)
    assert not (tmp_path / "elsewhere").exists()


WORD = st.text(string.ascii_lowercase, min_size=7, max_size=12).map(lambda each: f"q{each}z")
KEY = st.text(string.ascii_letters + string.digits, min_size=20, max_size=40)
PLACES = [  # where a name or an address may stand
    *("{}", " {} ", "({})", '"{}"', "a {}: b", "x={},y", "[{}]", "{}\n", "/srv/{}/x", "{}_log"),
    *("{}-eth0", "http://{}/x", "at {};", "<{}>", "'{}'", "\t{}\r\n", "\x1b[1m{}\x1b[0m"),
]
FORMS = [  # of a secret
    *("HF_TOKEN={}", 'export VLLM_API_KEY="{}"', "--api-key {}", "--hf-token={}", "Bearer {}"),
    *("https://user:{}@host/x", "?token={}&a=1", "AWS_SECRET_ACCESS_KEY: {}", "hf_{}", "sk-{}"),
    *('{{"password": "{}"}}', "Environment=HF_TOKEN={}", "-e WANDB_API_KEY={}", "ghp_{}"),
]


@given(
    st.tuples(WORD, WORD, KEY),
    st.ip_addresses(),
    st.lists(st.sampled_from(PLACES), min_size=3, max_size=3),
    st.sampled_from(FORMS),
    st.sampled_from(PLACES),
)
def test_nothing_that_was_put_in_comes_out(words, address, places, form, place):
    host, user, key = words
    own = getattr(address, "ipv4_mapped", None) or address
    kept = own.is_loopback or own.is_unspecified or own.is_multicast
    kept = kept or str(own).startswith("255.25")  # a mask
    names = PrivateNames(hosts=((host,),), users=(user,), addresses=(str(address),))
    text = "\n".join(
        each.format(one) for each, one in zip(places, (host, user, address), strict=True)
    )
    parts = {
        "head.env": form.format(key),  # named once, it is found where nothing names it
        "log": f"{text}\n{place.format(form.format(key))}",
        "nodes": {host: [{"user": user, "home": f"/home/{user}", "said": text}]},
        "other": f"{address} {host} {user} {key if '_{' not in form and '-{' not in form else ''}",
    }
    whole, _taken = pack_report(parts, names)
    for each in (host, user, key):
        assert each not in whole
    assert kept or str(address) not in whole
