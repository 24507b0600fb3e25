"""Mask secrets in every form that programs write them in, and nothing else."""

import ast
import re
from pathlib import Path

import pytest

import patchkit
from patchkit.doctor.private_names import PrivateNames
from patchkit.doctor.redaction import Redactor
from patchkit.runtime.rules.secret_texts import mask_secrets, secret_flag

# A secret stands between « and ».
SECRETS = [
    # vLLM's own
    "non-default args: {'model_tag': 'm', 'api_key': ['«token-abc123»'], 'port': 8000}",
    "non-default args: {'api_key': ['«tok en,1»', \"«tok'2»\"], 'max_model_len': 8192}",
    "x: api_key=SecretStr('«s3cr3t-key»') timeout=5",
    "vllm serve m --api-key «s3cr3t» --port 8000",
    "vllm serve m --api-key «s3cr3t» «other7» --port 8000",
    "vllm serve m --api_key=«s3cr3t» --hf_token=«mytoken99»",
    "vllm serve m --api-k «s3cr3t» --hf-t «mytoken99»",
    "vllm serve m '--api-key' '«two words»' --port 8000",
    "Popen(['vllm', 'serve', 'm', '--api-key', '«s3cr3t»', '--port', '8000'])",
    '"args": ["--api-key", "«s3cr3t»", "«other7»", "--port", "8000"]',
    "args:\n- --api_key\n- «s3cr3t»\n- --port",
    "api-key:\n  - «s3cr3t»\nport: 8000",
    # variables
    "HF_TOKEN=«qwertz99»",
    "export HF_TOKEN='«two words»'",
    'VLLM_API_KEY=«a b  c"d»',
    "-e OPENAI_API_KEY=«s3cr3t»",
    'docker run -e "HF_TOKEN=«two words»" -e B=1 image',
    '"Env": ["PATH=/usr/bin", "HF_TOKEN=«s3cr3t»", "A=1"]',
    '["HF_TOKEN=\\"«two words»\\"", "A=1"]',
    "Environment=WANDB_API_KEY=«0123abcd»",
    "os.environ['HF_TOKEN'] = '«s3cr3t»'",
    "environ({'HF_TOKEN': '«s3cr3t»', 'HOME': '/root'})",
    "- name: HF_TOKEN\n  value: «s3cr3t»\n- name: A",
    '{"name": "VLLM_API_KEY", "value": "«s3cr3t»"}',
    "kubectl create secret generic s --from-literal=HF_TOKEN=«s3cr3t»",
    # JSON, YAML, reprs
    '{"password": "«x y»", "a": 1}',
    '{\\"api_key\\": \\"«s3cr3t»\\", \\"a\\": 1}',
    '{"openaiApiKey": "«s3cr3t»", "clientSecret":"«abc1»"}',
    "Config(password=b'«x\\'y»', user='bo')",
    '{\n "api_key": [\n  "«s3cr3t»",\n  "«other7»"\n ],\n "a": 1}',
    'request failed: {"api_key": "«cut off in the middl»',
    "x-api-key: «s3cr3t»",
    # sentences, arrows, other shells
    "HF_TOKEN is set to «custom0037tok»; HF_HOME is set to /data",
    "the variable `HF_TOKEN` was set to '«two words»'",
    "env: VLLM_API_KEY -> «arrow0059key»",
    "VLLM_API_KEY := «col0060key»",
    'set VLLM_API_KEY "«fish0062key»"',
    "set VLLM_API_KEY «fish0062key»",
    "set -x HF_TOKEN «fishkey»; set --export --global HF_TOKEN «fish0063key»",
    "setenv HF_TOKEN «cshkey»",
    "--api-key is set to «s3cr3t»",
    # headers and programs
    "POST https://hooks.slack.com/services/«T0C032/B000/XXXX» 200",
    "https://discord.com/api/webhooks/«1234/abc-DEF»",
    "https://outlook.office.com/webhook/«1-2@3-4/IncomingWebhook/5/6»",
    "POST https://api.telegram.org/bot«123456789:AAabc-def_ghi»/sendMessage",
    "https://chat.acme.net/hooks/«xxx63gc1tfrb7n5fzfnbjeh8qc»",
    "Authorization: Bearer «abcDEF123456»",
    "{'Authorization': 'Bearer «abcDEF»', 'Accept': '*/*'}",
    "(b'authorization', b'Bearer «abcDEF123456»')",
    'curl -H "Authorization: Basic «dXNlcjpwYXNz»" http://h:8000/v1',
    "send: b'GET / HTTP/1.1\\r\\nAuthorization: Bearer «abc.DEF-1»\\r\\nHost: h'",
    "Set-Cookie: «session=abc; Path=/»",
    "curl -s -u «bob:hunter2» https://h/x",
    "curl --user '«bob:hunter2»' https://h/x",
    '{"auths": {"nvcr.io": {"auth": "«dXNlcjpwYXNz»", "identitytoken": "«abc.def»"}}}',
    "GET /v1/models?api_key=«s3cr3t» HTTP/1.1",
    "aws_secret_access_key = «abc/DEF+ghi=»",
    '{"token": "«abcdef0123456789»", "token_id": 12}',
    "sshpass -p «hunter2» ssh bo@h",
    "machine h login bo password «hunter2»",
    # URLs
    "'http://«u:PASS»@h:8000' is not the address of a server",
    "https://«bob:p@ss»@mirror.example/simple",
    "'«u:PASS»@h:8000' is not the address",
    "https://x.example/f?token=«abc»&n=1",
    # keys by their forms
    "got «hf_abcdefghijABCDEFGHIJ1234567890abcd» from env",
    "Incorrect API key provided: «sk-proj-abcdefghij0123456789».",
    "«nvapi-abcdefghij0123456789abc» and «AKIAIOSFODNN7EXAMPLE»",
    "«ghp_abcdefghij0123456789» «eyJhbGciOiJ9.eyJzdWIiOiIx.c2ln»",
    "«-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----»\nend",
]


def unmarked(line):
    return re.sub("[«»]", "", line)


@pytest.mark.parametrize("line", SECRETS)
def test_a_secret_is_masked_and_the_rest_stays(line):
    assert mask_secrets(unmarked(line)) == re.sub("«[^»]*»", "(masked)", line)
    assert mask_secrets(mask_secrets(unmarked(line))) == mask_secrets(unmarked(line))
    redactor = Redactor(PrivateNames())
    redactor.learn(unmarked(line))
    clean = redactor.text(unmarked(line))
    assert not [each for each in re.findall("«([^»]*)»", line) if each in clean]


READABLE = [
    "INFO 11-23 20:00:00 [loggers.py:123] Avg prompt throughput: 12.3 tokens/s, KV cache: 1.2%",
    "--max-num-batched-tokens 8192 --max-model-len 4096 --enable-prefix-caching",
    "max_num_batched_tokens=8192, max_num_seqs=8, long_prefill_token_threshold=0",
    "tool_call_start_token: <tool_call>, think_end_token='</think>'",
    "time_to_first_token: 0.35 s, time_per_output_token=12.1ms, tokens: 5",
    "unless VLLM_API_KEY or --api-key is set, the port stays local",
    "set VLLM_API_KEY, or --api-key KEY, in ~/.config/patchkit/secrets.env",
    "--api-key would show a secret to every user of the node: put it into secrets.env",
    "set HF_TOKEN before you start; set -x in the script; --hf-token names a file",
    "error: --api-key is missing; --hf-token needs a value",
    "HF_TOKEN=$HF_TOKEN vllm serve m --api-key ${VLLM_API_KEY:?}",
    "-e HF_TOKEN -e VLLM_API_KEY=$KEY image",
    "HF_TOKEN_PATH=/run/credentials/hf_token hf_hub_download(token=None)",
    "SSL_KEYFILE=/etc/ssl/key.pem --ssl-keyfile /etc/ssl/key.pem",
    "password: authentication failed; Permission denied (publickey,password).",
    "api_key: str | None = None, password: Optional[str]",
    "'api_key': None, 'hf_token': True, \"password\": null",
    'WWW-Authenticate: Bearer realm="x"; a Bearer token is required',
    "401 Unauthorized: Authorization: missing header",
    "secretKeyRef: {name: vllm-secrets, key: HF_TOKEN}, imagePullSecrets: [{name: x}]",
    "http://127.0.0.1:8000/v1/models https://pypi.org/simple tcp://10.0.0.1:29500",
    "ssh://annalena@spark-1/x git+ssh://git@github.com/o/r bo@spark-2:/srv jo@example.org",
    "rsync -P wheel USER@HOST: ; docker.io/vllm/vllm-openai:v0.33.0@sha256:"
    + "ab" * 32,
    "ssh -p 22 bo@h; login with password is refused; ssh -p 2222 login@h",
    "spark-1:812:901 [0] NCCL INFO NET/IB : Using [0]rocep1s0f0:1/RoCE [RO]; OOB enp1:10.0.0.1<0>",
    "key: value, sort_key=lambda x: x, primary_key=id, cache_key: 12ab34cd56ef",
    "Your token <YOUR_TOKEN> goes to --hf-token YOUR_HF_TOKEN or api_key=your-api-key",
    "(EngineCore_0 pid=12) ERROR: ValueError: token 128009 is out of vocabulary",
]


@pytest.mark.parametrize("line", READABLE)
def test_what_is_no_secret_stays_readable(line):
    assert mask_secrets(line) == line


def own_sentences():
    """Yield the texts of patchkit's own code; what is filled in is a reference, a flag is one."""
    for path in sorted(Path(patchkit.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value)
                    if isinstance(part, ast.Constant)
                    else "--api-key"
                    if "flag" in ast.unparse(part)
                    else "$X"
                    for part in node.values
                )
                yield "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_no_word_of_a_sentence_of_patchkit_is_taken_for_a_secret():
    sentences = [
        text for text in own_sentences() if "--api-key" in text or "--hf-token" in text
    ]
    assert len(sentences) > 10
    assert [text for text in sentences if mask_secrets(text) != text] == []


def test_flags_are_compared_as_vllms_parser_does():
    for flag, words in (
        ("--api-key", ("--api-key", "--api_key=X", "--api-k", "--api_key.x=1")),
        ("--hf-token", ("--hf_token", "--hf-token=X", "--hf-tok=X")),
        ("", ("--api-server-count", "--hf-config-path", "--host", "api-key")),
    ):
        assert {secret_flag(word) for word in words} == {flag}


def test_hostile_text_takes_no_time():
    signs = ("://" + "a:" * 30_000, "\\" * 60_000, '"' * 60_000, "curl " * 9000)
    for text in (*signs, "api_key=" * 30_000, "'api_key': [" * 30_000):
        assert mask_secrets(f'api_key="{text}')
