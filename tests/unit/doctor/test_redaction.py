"""Take private names out of texts and archives: none is left, and what a diagnosis needs stays."""

import hashlib
import json
import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.doctor.archive import pack_archive, save_archive, take_out_names
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.doctor.private_names import PrivateNames, private_names
from patchkit.doctor.redaction import Redactor
from patchkit.errors import UsageError
from support.archives import archive_texts
from support.clusters import node_facts
from support.failures import failures, recognised

NAMES = PrivateNames(
    hosts=(("spark-3995", "spark-3995.local"), ("zeus",)),
    users=("annalena", "bo", "nvidia"),
    addresses=("192.168.177.11", "10.0.0.5", "2001:db8::7", "84.17.3.9"),
    serials=("1590124001234", "48:b0:2d:aa:bb:cc"),
    models=("/srv/models/kunde-7b",),
)


def redacted(text, names=NAMES, *, paths=False):
    redactor = Redactor(names, paths=paths)
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
    "ip-192-168-177-11 in ip-192-168-177-11.internal": "ip-address-1 in host-1",
    "link/ether 4c:bb:47:01:02:03 enx4cbb47010203": "link/ether mac-2 enxmac-2",
    "GPU-3f2b1c00-1111-2222-3333-444455556666": "GPU-uuid-1",
    "serial: 1590124001234": "serial: serial-1",
    "Authorization: Bearer abcDEF123456": "Authorization: Bearer secret-1",
    "HF_TOKEN=qwertz99\nand qwertz99 again": "HF_TOKEN=secret-1\nand secret-1 again",
    "write to jo.doe@example.org": "write to email-1",
    # a node's MAC in every spelling, and in what devices make of it
    "48:B0:2D:AA:BB:CC 48-b0-2d-aa-bb-cc 48b02daabbcc 48b0.2daa.bbcc": " ".join(
        ["mac-1"] * 4
    ),
    "guid 0x48b02dffffaabbcc 48b02d0300aabbcc 4ab0:2dff:feaa:bbcc": "guid mac-1 mac-1 mac-1",
    "guid 0x7cc255ffff7a1b2c, image 7cc25503007a1b2c": "guid mac-2, image mac-2",
    # hosts
    "spark3995:1:2 [0] and SPARK_3995": "node-1:1:2 [0] and node-1",
    "spark-7777:812:900 [0] NCCL INFO; spark-7777 ended": (
        "host-1:812:900 [0] NCCL INFO; host-1 ended"
    ),
    "worker:812:900 [0] NCCL INFO of a worker": "host-1:812:900 [0] NCCL INFO of a worker",
    "http://proxy.acme.net:3128/x https://huggingface.co/x": (
        "http://host-1:3128/x https://huggingface.co/x"
    ),
    "HF_ENDPOINT=https://hub.acme.internal no_proxy=.acme.net,h2": (
        "HF_ENDPOINT=https://host-1 no_proxy=host-2"
    ),
    "ssh: connect to host fritz.example.org port 22: refused": (
        "ssh: connect to host host-1 port 22: refused"
    ),
    "heidi.tail036.ts.net is up; \\\\nas056\\share": "host-1 is up; \\\\host-2\\share",
    "ivan050@laptop bo@spark3995: root@zeus image@sha256:ab": (
        "user-3@host-1 user-2@node-1: root@node-2 image@sha256:ab"
    ),
    "pull reg.acme.net:5000/team/vllm:latest docker.io/vllm/vllm-openai:v1": (
        "pull host-1:5000/team/vllm:latest docker.io/vllm/vllm-openai:v1"
    ),
    "search lab.acme.net acme.net\noptions edns0": "search host-1\noptions edns0",
    # users
    "uid=1001(karl059) gid=1001(karl059) groups=1001(karl059),27(sudo0)": (
        "uid=1001(user-3) gid=1001(user-3) groups=1001(user-3),27(user-4)"
    ),
    "wandb: Currently logged in as: gustav031": "wandb: Currently logged in as: user-3",
    "session opened for user karl(uid=7) by root(uid=0)": (
        "session opened for user user-3(uid=7) by root(uid=0)"
    ),
    # serial numbers, webhooks, models, prompts
    "S/N: 1571923004711; BIOS 5.36 serial C049SN": "S/N: serial-3; BIOS 5.36 serial serial-2",
    "POST https://hooks.slack.com/services/T0C/B0/XXXX": (
        "POST https://hooks.slack.com/services/secret-1"
    ),
    "--served-model-name kunde041 model=kunde041": "--served-model-name model-2 model=model-2",
    "vllm serve openai/gpt-oss-120b, /srv/models/kunde-7b": (
        "vllm serve openai/gpt-oss-120b, model-1"
    ),
    "Received request c1: prompt: 'Frau M. ist krank', params: x": (
        "Received request c1: prompt: prompt-1, params: x"
    ),
}


BECOMES |= {
    "loading C:\\Users\\Anna Lopez\\x.bin": "loading C:\\Users\\user-3\\x.bin",
    "Nov 28 12:00:00 ws-anna07 kernel: NVRM: Xid": "Nov 28 12:00:00 host-1 kernel: NVRM: Xid",
    "2026-11-28T12:00:00+01:00 zeus sshd[7]: x": "2026-11-28T12:00:00+01:00 node-2 sshd[7]: x",
    "session opened for user lopez by (uid=0)": "session opened for user user-3 by (uid=0)",
    "Author: Anna Lopez <anna@acme.de>": "Author: user-3 <email-1>",
    "ssh-rsa AAAAB3NzaC1yc2EAAAADAQAB anna-laptop": "secret-1 user-3",
    "Trying to associate with SSID 'Lopez Home'": "Trying to associate with SSID 'wifi-1'",
    'wlan0 IEEE 802.11 ESSID:"Lopez Home"': 'wlan0 IEEE 802.11 ESSID:"wifi-1"',
    "Activation: (wifi) connection 'LopezHome'": "Activation: (wifi) connection 'wifi-1'",
    'namespace="acme-prod" pod="vllm-0"': 'namespace="k8s-1" pod="k8s-2"',
    "Pod acme-prod/vllm-6d5f9c7b8-x2x9z evicted": "Pod k8s-1 evicted",
    "//nas07/x on /usr type cifs": "//host-1/x on /usr type cifs",
    "https://wandb.ai/anna-lopez/secret/runs/1": "https://host-1/repository-1/runs/1",
    "--lora-modules kunde=Qwen/x": "--lora-modules model-2=Qwen/x",
    "AccountName=x;AccountKey=Zm9vYmFyYmF6Zm9v==;": "AccountName=x;AccountKey=secret-1;",
}


# What each form names where nothing else of the text does.
BECOMES |= {
    "ether 4c-bb-47-01-02-03": "ether mac-2",
    "cisco 4cbb.4701.0203": "cisco mac-2",
    "GID part 4ebb:47ff:fe01:0203": "GID part mac-2",
    "ssh: Could not resolve hostname ws-anna: not known": (
        "ssh: Could not resolve hostname host-1: not known"
    ),
    "Connection closed by ws-anna port 22": "Connection closed by host-1 port 22",
    "host=ws-anna07 is silent": "host=host-1 is silent",
    "DNS Domain: corp040.example": "DNS Domain: host-1",
    "SysName:      sw-core-muenchen": "SysName:      host-1",
    'LOGNAME=karl059 USER="karl059"': 'LOGNAME=user-3 USER="user-3"',
    "Failed password for invalid user karl from here": (
        "Failed password for invalid user user-3 from here"
    ),
    "session closed by karl(uid=7)": "session closed by user-3(uid=7)",
    "Accepted publickey for karl from here": "Accepted publickey for user-3 from here",
    "open ~karl/x.py: not found": "open ~user-3/x.py: not found",
    "/srv/users/karl/x.py": "/srv/users/user-3/x.py",
    "served_model_name=['kunde041']": "served_model_name=['model-2']",
    "{'model_tag': 'kunde041'}": "{'model_tag': 'model-2'}",
    "model='kunde041'": "model='model-2'",
    "vllm serve kunde041 --port 1": "vllm serve model-2 --port 1",
    "git@github.com:acme/secret.git": "email-1:repository-1",
    "ssid=AcmeWifi17": "ssid=wifi-1",
    'connecting to network "Lopez Home"': 'connecting to network "wifi-1"',
    "POD_NAME=vllm-0": "POD_NAME=k8s-1",
    "Service Tag: ABC1234": "Service Tag: serial-2",
}


@pytest.mark.parametrize("text", BECOMES)
def test_what_is_taken_out(text):
    assert redacted(text) == BECOMES[text]


@pytest.mark.parametrize(
    ("user", "text", "clean"),
    [
        (
            "patchkit",
            "patchkit-vllm: /venv/bin/patchkit",
            "patchkit-vllm: /venv/bin/patchkit",
        ),
        ("torchy", "torchyard: torchy's\\ntorchy", "torchyard: user-1's\\nuser-1"),
        ("jo.doe7", "xjo.doe7x", "xuser-1x"),
        ("gb10", "/home/gb10/x on a GB10", "/home/user-1/x on a user-1"),
    ],
)
def test_a_user_is_no_part_of_another_word(user, text, clean):
    assert redacted(text, PrivateNames(hosts=(("gb10",),), users=(user,))) == clean


def test_numbers_of_placeholders_begin_with_the_first_name_that_is_there():
    names = PrivateNames(users=("", "annalena"), serials=("", "1590124001234"))
    assert redacted("annalena 1590124001234", names) == "user-1 serial-1"


def test_a_serial_number_without_letters_is_one():
    redactor = Redactor(PrivateNames(serials=("1590124001234",)))
    assert redactor.value(1590124001234, "board_serial") == "serial-1"
    assert redactor.value(1590124001234, "bytes") == 1590124001234


# A proof has no folder of its owner; what is a system's, and what packages hold, stays.
PATHS = {
    "(/deepgemm/csrc/apis/x.hpp:56) /home/bo/x.cu:3": "(/deepgemm/csrc/apis/x.hpp:56) path-1:3",
    "loading /data/acme/kunde and /mnt/nas/X2.": "loading path-1 and path-2.",
    "{'model_tag': '/data/acme/kunde', 'port': 1}": "{'model_tag': 'path-1', 'port': 1}",
    "'/data/Kunde Meier/x.json' 'unquoted'": "'path-1' 'unquoted'",
    'File "/home/bo/v/lib/python3.12/site-packages/vllm/v1/core.py", line 3': (
        'File "path-1/site-packages/vllm/v1/core.py", line 3'
    ),
    "/usr/lib/x.so /proc/driver/nvidia /sys/class/net /opt/cuda-13.0/bin": (
        "/usr/lib/x.so /proc/driver/nvidia /sys/class/net /opt/cuda-13.0/bin"
    ),
    "PATH=/opt/acme020/bin:/opt/cuda": "PATH=path-1:/opt/cuda",
    "GET /v1/models HTTP/1.1, /sleep?level=1, 3/4, N/A, </s>, GB/s": (
        "GET /v1/models HTTP/1.1, /sleep?level=1, 3/4, N/A, </s>, GB/s"
    ),
    "GET /foo/x?token=abcdef12*defghi34 HTTP": "GET path-1secret-1 HTTP",
    "PATH=/home/bo/bin:/usr/bin file:///srv/x/y.py:12": "PATH=path-1:/usr/bin file://path-2:12",
}


@pytest.mark.parametrize("text", PATHS)
def test_a_proof_has_no_folders(text):
    assert redacted(text, paths=True) == PATHS[text]


def test_hostile_text_takes_no_time():
    forms = (
        "a.",
        "/a",
        "a://",
        "a@",
        "x_proxy=",
        "a.b ",
        "48b02d",
        "'/a ",
        "host=",
        ",1(a)",
        "user=",
        "ecdsa-sha2-",
        "lan.",
    )
    for form in forms:
        text = f"search {form * 30_000} annalena"
        assert "annalena" not in redacted(text, paths=True)


@pytest.mark.parametrize("paths", [False, True])
def test_real_failures_mean_the_same_without_names(paths):
    """What people reported, behind lines with names that are taken out."""
    before = (
        "spark-3995:1:2 [0] NCCL INFO Bootstrap\nset /home/annalena/venv for annalena\n"
    )
    changed = {}
    for failure in failures():
        text = before + failure["text"]
        facts = failure.get("facts", {})
        clean = redacted(text, paths=paths)
        assert "annalena" not in clean
        if recognised(clean, facts) != recognised(text, facts):
            changed[failure["id"]] = clean
    assert changed == {}


STAYS = [
    "2026-11-28T12:00:00Z INFO vllm: namespace _C; the pod of a rank; Author: unknown",
    "torch.library: namespace=vllm, 4 pods // comment on /dev/shm",
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
    devices = [dev for dev in facts.host.netdevs if dev.name != "docker0"]
    own = next(each for dev in devices for each in dev.lasting)
    names = private_names(
        [
            NodeReport(node="annalena@spark-3995.lan", facts=facts),
            NodeReport(node="zeus"),
        ]
    )
    parts = {
        "nodes": [{"spark-3995": {"user": "annalena", "ip": str(own.ip), "n": 2}}],
        "env": f"VLLM_HOST_IP={own.ip}\nHF_TOKEN=hush-hush-hush\nNCCL_IB_HCA=rocep1s0f0\n",
        "journal": f"zeus: connect to {own.ip} failed; hush-hush-hush",
    }
    logs = {"env": parts.pop("env"), "journal": parts.pop("journal")}
    clean = take_out_names(parts, logs, names)
    packed = pack_archive("report", clean, [json.dumps(clean.content["nodes"])])
    texts = archive_texts(packed)
    whole = "".join(texts.values())
    for each in ("annalena", "spark-3995", "zeus", "hush", str(own.ip)):
        assert each not in whole

    env = texts["logs/env.txt"].splitlines()
    place = env[0].removeprefix("VLLM_HOST_IP=")
    assert place.startswith("address-")
    assert env[1:] == ["HF_TOKEN=secret-1", "NCCL_IB_HCA=rocep1s0f0"]
    nodes = json.loads(texts["report.json"])["nodes"]
    assert nodes == [{"node-1": {"user": "user-1", "ip": place, "n": 2}}]
    assert json.loads(texts["summary.txt"]) == nodes
    assert texts["logs/journal.txt"] == f"node-2: connect to {place} failed; secret-1"

    manifest = json.loads(texts["manifest.json"])
    assert (manifest["taken_out"], clean.counts["secret-1"]) == (clean.counts, 2)
    digest = hashlib.sha256(texts["report.json"].encode()).hexdigest()
    assert manifest["sha256"]["report.json"] == digest
    assert {*manifest["sha256"]} == {*texts} - {"manifest.json"}


def test_an_archive_is_its_owners_and_replaces_nothing(tmp_path):
    path = tmp_path / "report.tar.gz"
    save_archive(b"text", path)
    assert (path.stat().st_mode & 0o777, path.read_text()) == (0o600, "text")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for taken in (path, link):
        with pytest.raises(UsageError, match="is there already"):
            save_archive(b"other", taken)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(UsageError, match="no such folder"):
        save_archive(b"text", tmp_path / "absent" / "x.tar.gz")


WORD = st.text(string.ascii_lowercase, min_size=7, max_size=12).map(
    lambda each: f"q{each}z"
)
KEY = st.text(string.ascii_letters + string.digits, min_size=20, max_size=40)
PLACES = [  # where a name or an address may stand
    *(
        "{}",
        " {} ",
        "({})",
        '"{}"',
        "a {}: b",
        "x={},y",
        "[{}]",
        "{}\n",
        "/srv/{}/x",
        "{}_log",
    ),
    *(
        "{}-eth0",
        "http://{}/x",
        "at {};",
        "<{}>",
        "'{}'",
        "\t{}\r\n",
        "\x1b[1m{}\x1b[0m",
    ),
]
FORMS = [  # of a secret
    *(
        "HF_TOKEN={}",
        'export VLLM_API_KEY="{}"',
        "--api-key {}",
        "--hf-token={}",
        "Bearer {}",
    ),
    *(
        "https://user:{}@host/x",
        "?token={}&a=1",
        "AWS_SECRET_ACCESS_KEY: {}",
        "hf_{}",
        "sk-{}",
    ),
    *(
        '{{"password": "{}"}}',
        "Environment=HF_TOKEN={}",
        "-e WANDB_API_KEY={}",
        "ghp_{}",
    ),
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
    kept = kept or str(own).startswith(
        ("255.25", "172.17.")
    )  # a mask, docker's network
    names = PrivateNames(hosts=((host,),), users=(user,), addresses=(str(address),))
    text = "\n".join(
        each.format(one)
        for each, one in zip(places, (host, user, address), strict=True)
    )
    parts = {
        "head.env": form.format(key),  # named once, it is found where nothing names it
        "log": f"{text}\n{place.format(form.format(key))}",
        "nodes": {host: [{"user": user, "home": f"/home/{user}", "said": text}]},
        "other": f"{address} {host} {user} {key if '_{' not in form and '-{' not in form else ''}",
    }
    packed = pack_archive("report", take_out_names(parts, {}, names), [])
    whole = "".join(archive_texts(packed).values())
    for each in (host, user, key):
        assert each not in whole
    assert kept or str(address) not in whole
