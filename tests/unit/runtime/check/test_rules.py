"""Hold each rule of `check` to what it says of a file, and where it keeps quiet."""

from itertools import zip_longest

import pytest

from support.checked import check_text

GB10 = {"target": "gb10"}
UPSTREAM = "docker run vllm/vllm-openai:v0.25.1"
SERVE = "#!/bin/sh\nvllm serve m"
STRANGE = "no known vLLM reads"


def compose(image, *variables):
    """Return a compose file with a service of these variables."""
    lines = "".join(f"      {line}\n" for line in variables)
    return f"services:\n  a:\n    image: {image}\n    environment:\n{lines}"


def said(text, where, **situation):
    """Return level and what of each finding in a file that is checked for a GB10."""
    return [
        (str(each.level), each.what) for each in check_text(text, where, **situation)
    ]


NAMES = [
    # One slip of a known name, and a value that fits it; never a word too few.
    ("x.env", "NCCL_IB_DISABLED=1", "warning no known NCCL reads NCCL_IB_DISABLED"),
    ("x.env", "VLLM_HOST=0.0.0.0"),
    # Whose names these are is known: a script's, a Dockerfile's, an image's, torch's.
    (
        "Dockerfile",
        "FROM x\nARG VLLM_REF=main\nARG VLLM_SHA=1\nENV NCCL_VERSION=2.28.3-1",
    ),
    ("x.env", "VLLM_IMAGE=vllm-node\nNCCL_ASYNC_ERROR_HANDLING=1\nNCCL_HOME=/usr"),
    # What a fork, an image or a script may read is left alone.
    ("x.env", "VLLM_B12X_MOE=1\nVLLM_B12X_TILES=2"),
    ("compose.yaml", compose("fork/vllm:1", "VLLM_B12X_MOE: 1", "VLLM_HOME: /x")),
    # Named after a flag, it is of no use beside a server, whoever made its image.
    (
        "compose.yaml",
        compose("fork/vllm:1", "VLLM_GPU_MEMORY_UTILIZATION: 1")
        + "    command: vllm serve m\n",
        f"warning {STRANGE} VLLM_GPU_MEMORY_UTILIZATION",
    ),
    # Beside upstream's own vLLM a name is invented, and may be that of a flag.
    (
        "x.sh",
        f"{UPSTREAM.replace('run', 'run -e VLLM_TORCH_COMPILE=1 -e VLLM_MAX_MODEL_LEN=8')} m",
        f"warning {STRANGE} VLLM_TORCH_COMPILE",
        f"warning {STRANGE} VLLM_MAX_MODEL_LEN",
    ),
    (
        "x.sh",
        f"export VLLM_MAX_MODEL_LEN=8\n{SERVE}",
        f"warning {STRANGE} VLLM_MAX_MODEL_LEN",
    ),
    # A script that uses the name itself has a use for it; handing it on is none.
    (
        "x.sh",
        f"export VLLM_MAX_MODEL_LEN=8\n{SERVE} --max-model-len $VLLM_MAX_MODEL_LEN",
    ),
    # An empty variable is one that is not set.
    ("x.env", "VLLM_NOTHING=\nHOST_IP=\nNCCL_IB_GID_INDEX="),
    ("x.env", "HOST_IP=10.0.0.1", "note HOST_IP=10.0.0.1 is advised against"),
    (
        "x.sh",
        "export TRITON_OVERRIDE_ARCH=sm120\necho $TRITON_OVERRIDE_ARCH",
        "warning TRITON_OVERRIDE_ARCH=sm120 is advised against",
    ),
]

VERSIONS = [
    # The version of the file counts: in the tag of an image, in what pip installs.
    (
        "x.sh",
        f"{UPSTREAM.replace('run', 'run -e VLLM_USE_V1=1')} m",
        "warning vLLM 0.25.1 does not read",
    ),
    ("x.sh", "docker run -e VLLM_USE_V1=1 vllm/vllm-openai:v0.10.2 m"),
    (
        "Dockerfile",
        "FROM x\nRUN pip install vllm==0.14.1\nENV VLLM_ATTENTION_BACKEND=FLASHINFER",
    ),
    (
        "Dockerfile",
        "FROM x\nRUN pip install vllm==0.16.0\nENV VLLM_ATTENTION_BACKEND=FLASHINFER",
        "warning VLLM_ATTENTION_BACKEND=FLASHINFER is advised against",
    ),
    # Without one, or with two, nothing is certain.
    ("x.env", "VLLM_ATTENTION_BACKEND=FLASHINFER", "note no vLLM after 0.14.1 reads"),
    (
        "x.sh",
        f"docker run -e VLLM_USE_V1=1 vllm/vllm-openai:v0.10.2 m\n{UPSTREAM} m",
        "note no vLLM after 0.11.0 reads VLLM_USE_V1",
    ),
]

VALUES = [
    ("x.env", "NCCL_IB_TIMEOUT=22\nNCCL_DEBUG=WARN"),
    # Only where other nodes are known to connect is a wrong address an error.
    ("x.env", "VLLM_HOST_IP=0.0.0.0", "warning VLLM_HOST_IP=0.0.0.0: every address"),
    ("x.env", "VLLM_HOST_IP=127.0.0.1\nMASTER_ADDR=127.0.0.1"),
    (
        "x.sh",
        f"export VLLM_HOST_IP=0.0.0.0\n{SERVE} --nnodes 2",
        "error VLLM_HOST_IP=0.0.0.0: every address",
    ),
    # Plain 12.1 makes the same code as 12.1a, but in 0.19; 10.x is for another GPU.
    ("x.env", "TORCH_CUDA_ARCH_LIST=12.0;12.1"),
    (
        "x.env",
        "TORCH_CUDA_ARCH_LIST=9.0;10.0a",
        "warning TORCH_CUDA_ARCH_LIST=9.0;10.0a is",
    ),
    (
        "x.env",
        "FLASHINFER_CUDA_ARCH_LIST=12.0f;12.1a",
        "warning FLASHINFER_CUDA_ARCH_LIST=",
    ),
    (
        "x.sh",
        "docker run -e TORCH_CUDA_ARCH_LIST=12.1 vllm/vllm-openai:v0.19.1 m",
        "warning TORCH_CUDA_ARCH_LIST=12.1 is advised against",
    ),
    # A ring needs Ring, and it is not known here; no other algorithm is ever needed.
    ("x.env", "NCCL_ALGO=Tree", "warning NCCL_ALGO=Tree is advised against"),
    ("x.env", "NCCL_ALGO=Ring", "note NCCL_ALGO=Ring is advised against"),
    (
        "x.env",
        "VLLM_SERVER_DEV_MODE=0\nCUDA_FORCE_PTX_JIT=0\nCUDA_CACHE_MAXSIZE=1073741824",
    ),
    (
        "Dockerfile",
        "FROM x\nENV CUDA_FORCE_PTX_JIT=1",
        "warning CUDA_FORCE_PTX_JIT=1 is advised",
    ),
    (
        "x.env",
        "CUDA_CACHE_MAXSIZE=33554432",
        "warning CUDA_CACHE_MAXSIZE=33554432 is advised",
    ),
    # What the caller says is not known, and not advised against.
    ("x.sh", 'docker run -e NCCL_PROTO="$PROTO" -e NCCL_IB_GID_INDEX="$GID" i'),
]

TWICE = [
    (
        "x.env",
        "VLLM_HOST_IP=10.0.0.1\nVLLM_HOST_IP=10.0.0.2",
        "warning VLLM_HOST_IP=10.0.0.2, and line 1 says VLLM_HOST_IP=10.0.0.1",
    ),
    # A script may set one anew for what it starts next, and has branches.
    (
        "x.sh",
        f"export NCCL_DEBUG=WARN\n{SERVE}\nexport NCCL_DEBUG=VERSION\nvllm serve n",
    ),
    (
        "x.sh",
        "if x; then\n export VLLM_HOST_IP=10.0.0.1\nelse\n export VLLM_HOST_IP=10.0.0.2\nfi",
    ),
    ("x.sh", "docker run -e NCCL_IB_DISABLE=1 x\ndocker run -e NCCL_IB_HCA=mlx5_0 x"),
]

PLACEHOLDERS = [
    (
        "head.env",
        "GLOO_SOCKET_IFNAME=CHANGE_ME",
        "error GLOO_SOCKET_IFNAME=CHANGE_ME: still",
    ),
    ("x.env", "NCCL_IB_HCA=rocepXsYfZ", "warning NCCL_IB_HCA=rocepXsYfZ: still to be"),
    (
        "x.env",
        "MASTER_ADDR=head-roce-ip",
        "error MASTER_ADDR=head-roce-ip: still to be",
    ),
    (
        "x.sh",
        "export VLLM_HOST_IP=<this node>",
        "error VLLM_HOST_IP=<this node>: still to",
    ),
    (
        "x.sh",
        f"{SERVE} --nnodes 2 --master-addr HEAD_IP",
        "error --master-addr HEAD_IP: still",
    ),
    ("x.env", "NCCL_IB_HCA=rocep1s0f0,roceP2p1s0f0\nMASTER_ADDR=spark-1"),
    ("x.env", "MASTER_ADDR=ip-10-0-0-1\nNCCL_SOCKET_IFNAME=enP2p1s0f0np0"),
    ("x.env", "NODE_HOST=spark-2\nVLLM_HOST=0.0.0.0"),
    # It contradicts nothing until it is filled in.
    (
        "x.env",
        "NCCL_SOCKET_IFNAME=enpXsYfZnpN\nGLOO_SOCKET_IFNAME=enp1s0f0np0",
        "error NCCL_SOCKET_IFNAME=enpXsYfZnpN: still to be",
    ),
]

SECRETS = [
    (
        "x.env",
        "OPENAI_API_KEY=sk-5f3a77",
        "warning the value of OPENAI_API_KEY is in the file",
    ),
    *(
        (where, text, f"warning {name} has a placeholder for its value")
        for where, text, name in (
            ("x.env", "VLLM_API_KEY=change-me", "VLLM_API_KEY"),
            ("x.env", "HF_TOKEN=<token>", "HF_TOKEN"),
            ("x.env", "HF_TOKEN=hf_xxxxxxxx", "HF_TOKEN"),
            (
                "compose.yaml",
                compose("x", "OPENAI_API_KEY: YOUR_KEY"),
                "OPENAI_API_KEY",
            ),
            ("x.sh", f"{SERVE} --api-key xxx", "--api-key"),
        )
    ),
    ("x.env", "OPENAI_API_KEY=EMPTY\nLLM_API_KEY=not-needed\nMAX_TOKEN=512"),
    (
        "compose.yaml",
        compose("x", "VLLM_API_KEY: ${VLLM_API_KEY:-letmein}"),
        "warning VLLM_API_KEY has a default in the file",
    ),
    (
        "compose.yaml",
        compose(
            "x", "A: ${VLLM_API_KEY:-}", "B: ${A_TOKEN:-EMPTY}", "C: ${HF_TOKEN:?}"
        ),
    ),
    (
        "x.sh",
        f"{SERVE} --api_key=s3cr3t-of-ours",
        "warning the value of --api-key is on the command line",
    ),
    ("x.sh", f'{SERVE} --api-key "$KEY"'),
]

SERVERS = [
    (
        "x.sh",
        f"{SERVE} --host 0.0.0.0",
        "note vllm serve on every interface, and without a key",
    ),
    ("x.sh", f'{SERVE} --host 0.0.0.0 --api-key "$KEY"'),
    ("x.sh", f"export VLLM_API_KEY\n{SERVE} --host 0.0.0.0"),
    (
        "x.sh",
        "docker run -p 127.0.0.1:8000:8000 vllm/vllm-openai:v0.25.1 m --host 0.0.0.0",
    ),
    (
        "x.sh",
        f"{UPSTREAM.replace('run', 'run -p $PORT:8000')} m --host 0.0.0.0",
        "note vllm serve on every interface, and without a key",
    ),
    (
        "x.sh",
        'ray start --head --dashboard-host "0.0.0.0" --port 6379',
        "warning --dashboard-host 0.0.0.0: Ray's dashboard on every interface",
    ),
]

FLAGS = [
    # An error only where upstream's release is known to refuse the flag.
    (
        "x.sh",
        f"{UPSTREAM} m --max-num-sequences 8",
        "error no known vLLM takes --max-num-seq",
    ),
    ("x.sh", f"{SERVE} --omni", "warning no known vLLM takes --omni"),
    ("x.sh", "docker run vllm/vllm-openai:v0.33.0 m --disable-prefix-caching"),
    # argparse takes the beginning of a flag, and _ for -.
    ("x.sh", f"{UPSTREAM} m --enable-chunked-prefil --max_model_len 8 -tp 1"),
    (
        "x.sh",
        f"{SERVE} --quantization modelopt_fp4",
        "note --quantization modelopt_fp4 is",
    ),
    (
        "x.sh",
        f"{SERVE} --enforce-eager $MORE",
        "note --enforce-eager is better left out",
    ),
    # A model before flags that only vLLM has is served, in whatever image.
    (
        "x.sh",
        'docker run -e VLLM_OWN_TABLES=1 own:1 "$MODEL" --max-num-batched-tokens 8 --enforce-eager',
        "note --enforce-eager is better left",
    ),
    (
        "x.sh",
        "docker run own:1 /srv/start.sh --max-num-batched-tokens 8 --enforce-eager",
    ),
    # What reports disagree about is the owner's choice.
    ("x.sh", f"{SERVE} --enable-expert-parallel"),
    # What is not known before an image is for docker.
    (
        "x.sh",
        f"""{UPSTREAM.replace("run", 'run "${NET[@]+"${NET[@]}"}" $MORE')} m --enforce-eager""",
        "note --enforce-eager is better left out",
    ),
    # Values that the release does not take: an error where it is upstream's.
    *(
        (
            "x.sh",
            f"{UPSTREAM} m {flag} {value}",
            f"error {flag} {value}: vLLM 0.25.1 does not",
        )
        for flag, value in (
            ("--quantization", "blah"),
            ("--kv-cache-dtype", "fp9"),
            ("--moe-backend", "xx"),
            ("--attention-backend", "FLASHINFR"),
        )
    ),
    (
        "x.sh",
        f"{SERVE} --moe-backend=marlinn",
        "warning --moe-backend marlinn: any known vLLM does not take marlinn",
    ),
    ("x.sh", f"{SERVE} --tool-call-parser mine --tool-parser-plugin p.py"),
]

LIMITS = [
    (
        "x.sh",
        f"{SERVE} --gpu_memory_utilization=0.9",
        "warning --gpu_memory_utilization 0.9: more",
    ),
    (
        "x.sh",
        f"{SERVE} --gpu-memory-utilization 0.88",
        "note --gpu-memory-utilization 0.88: more",
    ),
    ("x.sh", f"{SERVE} --gpu-memory-utilization 0.85"),
    # vLLM then takes this many bytes, and no share.
    ("x.sh", f"{SERVE} --gpu-memory-utilization 0.95 --kv-cache-memory-bytes 9G"),
]

# What well-known variables keep for a script that starts a server.
EXTRA = (
    "--kv-cache-dtype fp8 --swap-space 32 --gpu-memory-utilization 0.88 --own-flag 1"
)
SWAP = (
    "error vLLM 0.33.0 has no --swap-space of VLLM_EXTRA_ARGS; 0.11.1 to 0.17.1 had it"
)
SHARE = "note --gpu-memory-utilization 0.88 of VLLM_EXTRA_ARGS: more than 0.85"
UTIL = "warning --gpu-memory-utilization 0.95 of GPU_MEMORY_UTIL: more than 0.85"
NEW = "vllm/vllm-openai:v0.33.0"
KEPT = [
    (
        "x.sh",
        f'docker run -e GPU_MEMORY_UTIL=0.95 \\\n -e VLLM_EXTRA_ARGS="{EXTRA}" {NEW} m',
        *(UTIL, SWAP, SHARE),
    ),
    ("compose.yaml", compose(NEW, f"VLLM_EXTRA_ARGS: {EXTRA}"), SWAP, SHARE),
    ("compose.yaml", compose(NEW, f"- VLLM_EXTRA_ARGS={EXTRA}"), SWAP, SHARE),
    (
        "Dockerfile",
        f'FROM {NEW}\nENV VLLM_EXTRA_ARGS="{EXTRA}" GPU_MEMORY_UTIL=0.95',
        SWAP,
        SHARE,
        UTIL,
    ),
    (
        "x.env",
        "VLLM_SERVE_OPTS=--swap-space 4",
        "warning VLLM_SERVE_OPTS: blanks",
        "note --swap-space 4 of VLLM_SERVE_OPTS is better left out",
    ),
    ("x.env", "GPU_MEMORY_UTIL=0.95", UTIL),
    (
        "x.env",
        'VLLM_ARGS="--quantization blah"',
        "note VLLM_ARGS: quotes",
        "warning --quantization",
    ),
    ("x.sh", "GPU_MEMORY_UTIL=0.95\nrun-it", UTIL),
    (
        "x.sh",
        (
            'A="--swap-space 4 --own-flag"\nB=--max-num-seqs\nRAY=--swap-space=4\n'
            'vllm serve m "$A" ${B}\nray start $RAY'
        ),
        "note --swap-space 4 of A is better left out",
    ),
    ("x.sh", "A=(--swap-space 4)\nrun-it", "note --swap-space 4 is better left out"),
    # Not the value itself, of another program, or no share.
    (
        "x.sh",
        'GPU_MEMORY_UTIL="${1:-0.95}"\nVLLM_ARGS="--gpu-memory-utilization $SHARE"',
    ),
    ("x.env", "GPU_MEMORY_UTIL=0.80\nGPU_MEM_UTIL=high\nSGLANG_ARGS=--swap-space=4"),
]
PLAN = "VLLM_ENABLE_STARTUP_PLAN=1"


@pytest.mark.parametrize(
    ("vllm", "level"), [("0.25.1", "warning"), ("0.26.0", "error"), ("0.32.0", "error")]
)
def test_the_startup_plan_stays_unset_where_it_asks_nvml(vllm, level):
    assert [found for found, _what in said(PLAN, "x.env", vllm=vllm)] == [level]


@pytest.mark.parametrize(
    ("text", "vllm"), [(PLAN, "0.33.0"), (PLAN[:-1] + "0", "0.32.0")]
)
def test_the_startup_plan_is_fine_elsewhere(text, vllm):
    assert said(text, "x.env", vllm=vllm) == []


def test_what_a_rule_says():
    texts = (
        *KEPT,
        *NAMES,
        *VERSIONS,
        *VALUES,
        *TWICE,
        *PLACEHOLDERS,
        *SECRETS,
        *SERVERS,
        *FLAGS,
    )
    for where, text, *expected in (*texts, *LIMITS):
        findings = [f"{level} {what}" for level, what in said(text, where)]
        pairs = zip_longest(findings, expected, fillvalue="")
        assert all(
            found and found.startswith(start or "none") for found, start in pairs
        ), findings


def test_the_ring_algorithm_is_for_a_ring():
    for topology, levels in (("ring", []), ("roce", ["warning"])):
        findings = said("NCCL_ALGO=Ring", "x.env", topology=topology)
        assert [level for level, _ in findings] == levels


def test_a_bug_of_nccl_is_told_to_a_cluster_alone():
    deadlock = (
        "this NCCL can deadlock between nodes with CUDA graphs, which are on by default"
    )
    for text, more in (
        ("VLLM_LOGGING_LEVEL=INFO\n", {"role": "head"}),
        ("NCCL_SOCKET_IFNAME=enp1s0f0np0\n", {}),
        (f"{SERVE} --nnodes 2", {}),
    ):
        assert said(text, "x", nccl="2.28.9", **more) == [("warning", deadlock)]
    assert said("VLLM_LOGGING_LEVEL=INFO\n", "x.env", nccl="2.28.9") == []
    assert said("VLLM_LOGGING_LEVEL=INFO\n", "x.env", nccl="2.30.7", role="head") == []


def test_an_open_ray_is_a_note_until_the_file_asks_for_a_token():
    """Refuse no file for it: whether another file has a token cannot be read from this one."""
    for text in ("VLLM_LOGGING_LEVEL=INFO\n", "RAY_AUTH_MODE=disabled\n"):
        ((level, what),) = said(text, "x.env", executor="ray")
        assert (level, what.split(",")[0]) == (
            "note",
            "Ray listens on every network of a node",
        )
    assert said("RAY_AUTH_MODE=token\n", "x.env", executor="ray") == []
