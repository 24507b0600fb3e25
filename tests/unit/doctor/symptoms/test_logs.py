"""Judge whole logs: good ones have nothing fatal, failing ones begin with their first cause."""

from pathlib import Path

import pytest

from patchkit.cluster.agent.node_state import JournalLine
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.doctor.symptoms.findings import (
    explain_failed_start,
    is_answer,
    log_findings,
    read_journals,
)
from patchkit.doctor.symptoms.lines import text_chunks
from patchkit.errors import SourceError
from patchkit.finding import Level, worst

LOGS = Path(__file__).parents[3] / "data" / "logs"
GOOD = sorted((LOGS / "good").iterdir())
UNKNOWN = sorted((LOGS / "failing").glob("unknown-*"))
MISMATCH = "Bootstrap Root : mismatch in info from procs"
ROOTS = "nroots 1 vs 1, iroot 0 vs 0"
FIRST = {
    "consequences-first": "free-memory",
    "consequences-last": "free-memory",
    "consequences-alone": "rdma-retry",
    "serves-then-fails": "free-memory",
    "crash-loop-cut": "free-memory",
    "dies-while-serving": "unknown",
    "another-program-starts": "free-memory",
    "weights-skipped": "weights-skipped",
    "one-of-two-services": "free-memory",
    "rpc-chained": "rpc-timeout",
}


def judged(text):
    return [*log_findings(read_log([text]), "vllm.log")]


@pytest.mark.parametrize("log", GOOD, ids=lambda log: log.stem)
def test_good_logs_have_nothing_fatal(log):
    found = judged(log.read_bytes())
    assert worst(found, Level.ERROR, Level.WARNING) == 0, [each.what for each in found]
    serving = next(each for each in found if each.level is Level.OK)
    assert serving.what.startswith("nothing fatal; serving since line ")
    assert "startup complete" in log.read_text().split("\n")[serving.line - 1]


@pytest.mark.parametrize("log", UNKNOWN, ids=lambda log: log.stem)
def test_an_unknown_first_exception_is_shown_first(log):
    found = judged(log.read_bytes())
    assert any(
        word in found[0].what + found[0].why
        for word in ("arms", "Assertion", "dealloc")
    )
    assert found[0].why.startswith("its lines:\n")
    assert "consequence" in found[0].why
    errors = [each.about for each in found if each.level is Level.ERROR]
    assert errors in (["unknown"], ["own-words"], ["vllm-code"])


@pytest.mark.parametrize(("name", "about"), FIRST.items())
def test_the_first_cause_is_first(name, about):
    found = judged((LOGS / "failing" / f"{name}.log").read_bytes())
    wrong = [each for each in found if each.level in (Level.ERROR, Level.WARNING)]
    assert [each.about for each in wrong] == [about]
    if name.startswith("consequences"):
        assert wrong[0].why.endswith("; -v")


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("request-fails", ["tool-call-broken", "request-error", "log"]),
        ("drafts-refused", ["drafts-refused", "log"]),
        ("plain", ["log"]),
    ],
)
def test_notes_that_answer_a_question_are_told(name, answers):
    found = judged((LOGS / "good" / f"{name}.log").read_bytes())
    assert [each.about for each in found if is_answer(each)] == answers


STALE = "CUDA error: an illegal memory access was encountered"
CAUSED = "ValueError: the shard is not aligned. This can be caused by too many shards."
ALIGNED = "the message itself says: This can be caused by too many shards."
FAILED_LINES = (LOGS / "failed-lines.txt").read_text().splitlines()


@pytest.mark.parametrize("line", FAILED_LINES)
def test_a_line_that_says_failed_is_never_nothing(line):
    """A server that starts behind it outlives it."""
    (found,) = judged(f"{line}\n".encode())
    assert found.about in ("unknown", "own-words")
    assert found.level is Level.ERROR
    served = f"{line}\nINFO:     Application startup complete.\n"
    assert not worst(judged(served.encode()), Level.ERROR, Level.WARNING)


@pytest.mark.parametrize("line", (LOGS / "harmless-lines.txt").read_text().splitlines())
def test_a_line_that_only_looks_like_an_error_is_none(line):
    assert judged(f"{line}\nnext\n".encode()) == []


RECOMPUTES = (
    "(EngineCore pid=9) ERROR 11-22 10:00:00 [a.py:1] load failed, recomputing\n"
)
RATE = (
    "(APIServer pid=1) INFO 11-22 10:00:10 [loggers.py:1] Engine 000: Avg prompt "
    "throughput: 0.0 tokens/s, Avg generation throughput: {} tokens/s, Running: 1 reqs\n"
)
UP = "(APIServer pid=1) INFO:     Application startup complete.\n"
REQUEST = '(APIServer pid=1) INFO:     10.0.0.9:5 - "POST /v1/completions HTTP/1.1" '
REFUSED = (
    "(APIServer pid=1) ERROR 11-22 10:00:00 [a.py:1] Error in preprocessing prompt\n"
)
OK_LINE = f"{REQUEST}200 OK\n"
HEALTH = '(APIServer pid=1) INFO:     10.0.0.9:5 - "GET /health HTTP/1.1" 200 OK\n'


@pytest.mark.parametrize(
    ("log", "errors"),
    [
        (UP + RECOMPUTES + RATE.format("27.1"), 0),
        (UP + RECOMPUTES + RATE.format("0.0"), 1),
        (OK_LINE + REFUSED + f"{REQUEST}400 Bad Request\n" + OK_LINE, 0),
        (UP + REFUSED + f"{REQUEST}500 Internal Server Error\n" + HEALTH, 1),
        (UP + OK_LINE + REFUSED + f"{REQUEST}500 Internal Server Error\n", 0),
        (UP + "Out of memory: Killed process 7 (a)\n" + OK_LINE, 1),
        (RECOMPUTES + OK_LINE, 0),
        (OK_LINE + RECOMPUTES, 1),
        ("vLLM API server version 0.25.1\n" + RECOMPUTES, 1),
        (OK_LINE + "vLLM API server version 0.25.1\n" + RECOMPUTES, 1),
    ],
)
def test_an_error_before_an_answer_did_not_end_the_server(log, errors):
    found = judged(log.encode())
    assert sum(each.level is Level.ERROR for each in found) == errors


REFUSAL = f"{REQUEST}400 Bad Request\n"
LOC = "{'type': 'a', 'loc': ('body', 'messages', 1, 'role'), 'msg': \"no\", 'input': 'b'}\n"
BROKEN = (
    "(APIServer pid=1) ERROR 11-22 10:00:00 [a.py:1] a.StrangeError: unexpected token\n"
    f"{REQUEST}500 Internal Server Error\n"
)


@pytest.mark.parametrize(
    ("log", "level", "about"),
    [
        (UP + 2 * REFUSAL, Level.ERROR, "requests-refused"),
        (UP + 2 * REFUSAL + LOC, Level.ERROR, "request-invalid"),
        (UP + OK_LINE + 2 * REFUSAL + LOC, Level.NOTE, "request-invalid"),
        (UP + OK_LINE + BROKEN + OK_LINE, Level.WARNING, "request-error"),
        (UP + OK_LINE + 2 * REFUSAL, Level.NOTE, "requests-refused"),
    ],
)
def test_refused_requests_are_told(log, level, about):
    """A server that refuses every request, or fails at one, is never fine."""
    found = judged(log.encode())
    assert level in {each.level for each in found if each.about == about}
    assert any(each.level is Level.OK for each in found) is (level is Level.NOTE)


GMMA = 'mma.hpp(14): error: static assertion failed with "No eligible operator"\n'
CUDA_13 = "OSError: libnvrtc.so.13: cannot open shared object file: No such file\n"
UNKNOWN_CALL = "RuntimeError: CUDA error: unknown error\n"
SIZES = (
    "RuntimeError: shape mismatch: value tensor of shape [0, 4] cannot be broadcast\n"
)
NO_DEVICE = "n:1:1 [0] NCCL INFO NET/IB : No device found.\n"
SOCKETS = "n:1:1 [0] NCCL INFO Using network Socket\n"
HCA = "n:1:1 [0] NCCL INFO NCCL_IB_HCA set to rocep1s0f1\n"
DIVIDED = "AssertionError: 16 is not divisible by 6\n"
ARGS = "INFO 11-22 10:00:00 [a.py:1] non-default args: {'tensor_parallel_size': 6, 'x': 1}\n"
LAYER = "KeyError: 'layers.0.mlp.down_proj.{}'\n"


@pytest.mark.parametrize(
    ("log", "about", "cause"),
    [
        (GMMA, "nvcc-refuses", "no-such-combination"),
        (GMMA.replace("static", "an"), "nvcc-refuses", "sources-and-toolkit"),
        ("vllm==0.25.0+cu129\n" + CUDA_13, "cuda-13-library-missing", "package-of-13"),
        ("torch 2.9.0+cu128\n" + CUDA_13, "cuda-13-library-missing", "torch-of-12"),
        (UNKNOWN_CALL, "cuda-error", "reported-late"),
        (
            UNKNOWN_CALL + "Failed to initialize NVML: Unknown Error\n",
            "cuda-error",
            "devices-taken",
        ),
        (SIZES, "tensor-sizes-differ", "model-code"),
        (
            "EngineCore encountered a fatal error.\n" + SIZES,
            "tensor-sizes-differ",
            "step-while-serving",
        ),
        (HCA + NO_DEVICE + SOCKETS, "nccl-over-sockets", "named-and-not-there"),
        (ARGS + DIVIDED, "size-not-divisible", "tensor-parallel"),
        (DIVIDED, "size-not-divisible", "shards"),
        (LAYER.format("weight_zero_point"), "weight-name-unknown", "zero-points"),
        (LAYER.format("weight_scale_inv"), "weight-name-unknown", "block-scales"),
        (LAYER.format("weight_scale"), "weight-name-unknown", "quantised-otherwise"),
    ],
)
def test_what_the_log_shows_comes_before_the_general_cause(log, about, cause):
    causes = {
        each.symptom.id: [cause.id for cause in each.causes]
        for each in read_log([log.encode()]).diagnoses
    }
    assert causes[about][0] == cause


def test_what_is_no_failure_names_none():
    """NCCL goes on without a function of newer drivers; a probe prints a file's name."""
    optional = (
        b"n:1:1 [0] misc/a.cc:79 NCCL WARN dlvsym failed on mlx5dv_a"
        b" - /lib/libmlx5.so: undefined symbol: mlx5dv_a, version MLX5_1.25\n"
    )
    assert judged(optional + b"libcudart.so.13\n") == []


def test_a_server_that_ended_and_did_not_begin_anew_serves_no_more():
    """What comes up in the same log without a banner is another program."""
    log = (LOGS / "failing" / "another-program-starts.log").read_bytes()
    assert read_log([log]).serving == 0
    ended = b"RuntimeError: Engine core initialization failed. See root cause above.\n"
    up = b"INFO:     Application startup complete.\n"
    assert read_log([ended + up]).serving == 0
    assert read_log([up + ended]).serving == 1
    assert not [each for each in judged(ended + up) if each.level is Level.OK]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Message truncated : received 176 bytes instead of 172", "other-release"),
        ("Message truncated : received 4,176 bytes instead of 4,172", "other-message"),
        (f"{MISMATCH}, nranks 2 vs 4, nroots 1 vs 1", "world-sizes"),
        (f"{MISMATCH}, nranks 2 vs 0, nroots 1 vs 0", "fields-shifted"),
        (
            f"{MISMATCH}, nranks 16 vs 16, {ROOTS}, offset 0 vs -981270526",
            "fields-shifted",
        ),
    ],
)
def test_numbers_decide(text, cause):
    (found,) = read_log([f"NCCL WARN {text}\n".encode()]).diagnoses
    assert [each.id for each in found.causes] == [cause]


@pytest.mark.parametrize(("release", "offered"), [("0.17.1", True), ("0.25.1", False)])
@pytest.mark.parametrize(
    "banner", ["vLLM API server version", " ▄▄ ▄█ █     █ ▀▄▀ █  version"]
)
def test_no_cure_is_a_release_that_is_there(banner, release, offered):
    text = f"INFO 11-22 10:00:00 [a.py:1] {banner} {release}\nThis kernel only supports sm120\n"
    (found,) = judged(text.encode())
    assert ("Take vLLM" in found.hint) is offered


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "is empty"),
        (b"\0" * 9000, "is empty, or all its bytes are zero"),
        ("RuntimeError: x\n".encode("utf-16"), "is UTF-16"),
        (bytes(range(256)) * 9, "is binary"),
    ],
)
def test_what_is_no_text_is_named(data, what):
    with pytest.raises(SourceError, match=f"vllm.log: {what}"):
        [*text_chunks([data], "vllm.log")]


def test_a_long_prompt_is_not_searched():
    line = b"INFO 11-22 10:00:00 [a.py:39] Received request c-1: prompt: '%s CUDA out of memory'\n"
    log = line % (b"x" * 3_000_000) + b"CUDA error: invalid argument\n"
    (found,) = read_log(
        log[at : at + 65536] for at in range(0, len(log), 65536)
    ).diagnoses
    assert (found.symptom.id, found.hit.number) == ("cuda-error", 2)


# Journals: the first line of all ranks that says what went wrong


def lines(node, *texts, start=0):
    numbered = enumerate(texts)
    return [
        (node, JournalLine(time=start + 2 * at, unit="x", text=text))
        for at, text in numbered
    ]


HEAD = (
    "INFO loading",
    "(EngineCore_DP0 pid=1) ERROR 11-22 [core.py:1] Traceback (most recent call last):",
    "RuntimeError: Engine core initialization failed. See root cause above.",
)
CASES = [
    (  # the worker's own error comes before what the head makes of it
        HEAD,
        ("INFO", "(Worker_TP1) ERROR ValueError: bad head size", "INFO shutting down"),
        ("spark-2", "(Worker_TP1) ERROR ValueError: bad head size"),
    ),
    (  # what follows from another error, if there is no other
        HEAD,
        ("INFO",),
        (
            "spark-1",
            "RuntimeError: Engine core initialization failed. See root cause above.",
        ),
    ),
    (
        ("INFO ErrorHandler is on",),
        ("no errors",),
        None,
    ),  # a word that only looks like one
]


@pytest.mark.parametrize(("head", "worker", "expected"), CASES)
def test_first_error(head, worker, expected):
    both = [*lines("spark-1", *head), *lines("spark-2", *worker, start=1)]
    log, nodes = read_journals(iter(sorted(both, key=lambda entry: entry[1].time)), {})
    lead = (nodes[log.lead.number - 1], log.lead.text) if log.lead else None
    assert lead == expected


@pytest.mark.parametrize(
    ("text", "why", "hint"),
    [
        (CAUSED, "(not decided); it ended", ALIGNED),
        (
            f"torch.AcceleratorError: {STALE}",
            "Some kernel is wrong for this shape",
            "no --speculative-config",
        ),
    ],
)
def test_a_failed_start_tells_what_the_log_shows(text, why, hint):
    error = explain_failed_start(
        iter(lines("spark-1", "INFO loading", text)), "it ended"
    )
    assert error.what == f"spark-1: {text}"
    assert why in error.why
    assert hint in error.hint


def test_the_cause_and_the_node_of_a_known_error():
    worker = (
        "INFO loading",
        "ImportError: libcudart.so.12: cannot open shared object file",
    )
    both = [*lines("spark-1", *HEAD), *lines("spark@10.0.0.2", *worker, start=-1)]
    log, nodes = read_journals(iter(sorted(both, key=lambda entry: entry[1].time)), {})
    assert log.first.symptom.id == "cuda-12-library-missing"
    assert nodes[log.first.hit.number - 1] == "spark@10.0.0.2"
    assert [each.symptom.follows for each in log.diagnoses] == [False, True]


FRAME = (
    '(EngineCore pid=9) ERROR 11-22 10:00:00 [a.py:1]   File "/v/{}", line 9, in f\n'
)
RAISED = "(EngineCore pid=9) ERROR 11-22 10:00:00 [a.py:1] {}\n"


@pytest.mark.parametrize(
    ("frames", "error", "about", "part"),
    [
        (["vllm/config/a.py"], "ValueError: bad", "unknown", "check of the options"),
        (
            ["torch/_dynamo/a.py", "flashinfer/a.py"],
            "ValueError: bad",
            "unknown",
            "FlashInfer's",
        ),
        (["fastsafetensors/a.py"], "Exception: bad", "unknown", "loading of weights"),
        (
            ["flashinfer/a.py", "vllm/models/a.py"],
            f"torch.AcceleratorError: {STALE}",
            "illegal-memory-access",
            "FlashInfer's",
        ),
    ],
)
def test_the_part_of_the_deepest_frame_is_named(frames, error, about, part):
    """An error of CUDA is a kernel's, whatever called it."""
    lines = [FRAME.format(frame) for frame in frames]
    log = "".join([*lines, RAISED.format(error)])
    first = judged(log.encode())[0]
    assert first.about == about
    assert part in first.why


BANNER = (
    "(APIServer pid=1) INFO 11-22 10:00:00 [a.py:1] vLLM API server version 0.25.1\n"
)
PACKAGES = "/opt/vllm/lib/python3.11/site-packages"
FLASHINFER = "flashinfer/jit/core.py"
FUSED = "vllm/compilation/passes/fusion/allreduce_rms_fusion.py"
COMM = "flashinfer/comm/allreduce.py"
NO_INT = "AttributeError: 'int' object has no attribute 'isdigit'"
MANY = "InternalError: Check failed: n > 64 (5 vs. 64) : Decode must go through another call"


@pytest.mark.parametrize(
    ("frames", "error", "about", "why", "hint"),
    [
        ([], CAUSED, "own-words", "not aligned", ALIGNED),
        (
            ["kernels/a.py"],
            "ValueError: a revision must be specified",
            "own-words",
            "kernels",
            "",
        ),
        (
            ["flashinfer/a.py"],
            NO_INT,
            "package-code",
            "raised in flashinfer",
            "pip show",
        ),
        (
            [FLASHINFER],
            NO_INT,
            "package-code",
            "requires flashinfer-python==0.6.13",
            "FLASHINFER_SAMPLER=0",
        ),
        (
            ["sglang/srt/a.py"],
            "NameError: name 'deep_gemm' is not defined",
            "sglang-code",
            "SGLang's own code (sglang/srt/a.py, in f)",
            "VLLM_USE_DEEP_GEMM=0",
        ),
        (
            ["vllm/v1/core/sched/a.py"],
            "AssertionError",
            "vllm-code",
            "sched/a.py, in f",
            "prefix",
        ),
        (
            [FUSED, COMM],
            f"torch.AcceleratorError: {STALE}",
            "illegal-memory-access",
            "fuses",
            "fuse_allreduce_rms",
        ),
        (
            ["xgrammar/compiler.py"],
            "RuntimeError: Unsatisfiable schema: more than",
            "own-words",
            "asks for a structure",
            "guidance",
        ),
        (
            ["vllm/warmup/flashinfer_sparse_mla_warmup.py"],
            MANY,
            "own-words",
            "sparse MLA",
            "--speculative-config",
        ),
        (
            ["vllm/v1/executor/multiproc_executor.py", *["vllm/v1/worker/a.py"] * 3],
            "RuntimeError: the frob is not available",
            "own-words",
            "v1/worker/a.py, in f",
            "newer vLLM",
        ),
    ],
)
def test_an_unknown_error_names_its_part_and_a_way_out(frames, error, about, why, hint):
    """The code that failed is told, its version, and what can be left out."""
    traced = [FRAME.format(frame).replace("/v/", f"{PACKAGES}/") for frame in frames]
    first = judged("".join([BANNER, *traced, RAISED.format(error)]).encode())[0]
    assert first.about == about
    assert why in first.why
    assert hint in first.hint


def test_a_package_that_cannot_be_imported_names_its_python():
    frame = f'  File "{PACKAGES}/{FLASHINFER}", line 5, in <module>\n'
    first = judged(f"{frame}TypeError: type 'a' is not subscriptable\n".encode())[0]
    assert first.about == "package-import"
    assert "flashinfer cannot be imported (Python 3.11)" in first.why


CUT = "ERROR: This container was built for driver 590 or later, but\n    580 was detected.\n"
SRC = "/a/Indexing.cu:1515: block: [1,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
DRAFTS = FRAME.format("vllm/v1/spec_decode/eagle.py")
ASSERTED = "torch.AcceleratorError: CUDA error: device-side assert triggered"
ARGS = "INFO 11-22 10:00:00 [a.py:1] args: {'speculative_config': {'method': 'mtp'}}\n"


ENDED = "srun: error: gb200-117: task 0: Exited with exit code 1\n"
WAITS = "Waiting for 1 local, 0 remote core engine proc(s) to start.\n"
TREE = (
    "132.3   × Failed to download `a==1`\n132.3   ├─▶ Request failed after 3 retries\n"
    "132.3   ╰─▶ {}\n------\nERROR: failed to build: failed to solve: exit code: 1\n"
)
PARSER = (
    '{}  File "/v/site-packages/vllm/tool_parsers/qwen3coder.py", line 5, in extract\n'
)
STREAMS = (
    UP
    + OK_LINE
    + PARSER.format(REFUSED.rpartition("Error")[0])
    + REFUSED.replace("Error in preprocessing prompt", "IndexError: out of range")
)
CHAINED = "During handling of the above exception, another exception occurred:"
OOPS = (
    "kernel: Internal error: Oops: 0000000096000004 [#1]  SMP\n"
    "kernel: pstate: 63400009 (nZCv daif +PAN -UAO BTYPE=--)\n"
    "kernel: pc : mst_ioctl+0x960/0x1810 [mstflint_access]\n"
)
MULTICAST = (
    "spark:1:2 [0] transport/nvls.cc:598 NCCL WARN Cuda failure 1 'invalid argument'\n"
    "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
)
UNFIT = (
    "ValueError: No valid attention backend found for cuda with Config(head_size=80)."
)
NO_FIELD = (
    f'  File "{PACKAGES}/vllm/config/vllm.py", line 5, in __post_init__\n'
    "AttributeError: 'Proxy' object has no attribute 'frob'\n"
)
NINJA = (
    "ninja: Entering directory `/root/.cache/flashinfer/86/cached_ops/sampling'\n"
    "nvcc fatal   : A single input file is required\n"
)


@pytest.mark.parametrize(
    ("log", "about", "hint"),
    [
        (NINJA, "own-words", "FLASHINFER_SAMPLER=0"),
        (
            f"{UNFIT} Reasons: {{A_MLA: [compute capability not supported], B: [no sink]}}\n",
            "attention-backend-refused",
            "newer vLLM",
        ),
        (OOPS, "machine-fault", "modinfo mstflint_access"),
        (MULTICAST, "nccl-transport-error", "NCCL_NVLS_ENABLE=0"),
        (f"Unsloth 2026.4.4: Fast patching.\n{NO_FIELD}", "patched-code", "Unsloth"),
        (
            f"vllm serve m --pipeline-parallel-size 2\n{BANNER}{NO_FIELD}",
            "vllm-code",
            "leave --pipeline-parallel-size out",
        ),
        (
            FRAME.format("vllm/lora/a.py")
            + RAISED.format("ValueError: rank 64 is greater than max_lora_rank 16."),
            "own-words",
            "options of vLLM: --max-lora-rank.",
        ),
        (
            RAISED.format("KeyError: 'y'")
            + RAISED.format(CHAINED)
            + RAISED.format(CAUSED),
            "own-words",
            ALIGNED,
        ),
        (
            WAITS * 3,
            "engine-awaited",
            "py-spy dump",
        ),
        (
            f"No module named 'vllm.frob'\n{ENDED}",
            "module-missing",
            "made for this release",
        ),
        (
            RAISED.format("EngineCore failed to start.")
            + RAISED.format("vllm.a.Refused: this part must be another one"),
            "own-words",
            "look for the words in its issues",
        ),
        (TREE.format("operation timed out"), "download-timeout", "UV_HTTP_TIMEOUT"),
        (STREAMS, "request-error", "--tool-call-parser"),
        (
            SRC + DRAFTS + RAISED.format(ASSERTED),
            "device-assert",
            "leave --speculative-config out",
        ),
        (CUT, "own-words", "version of a driver"),
        (
            f"{ARGS}torch.AcceleratorError: {STALE}\n",
            "illegal-memory-access",
            "without --speculative-config",
        ),
        (
            "zmq.error.ZMQError: Address already in use (addr='tcp://10.0.0.2:40043')\n",
            "port-taken",
            "'sport = :40043'",
        ),
        (
            "NVRM: Xid (PCI:0000:dc:00): 45, pid=1, name=p, Ch 1 caused by previous Xid 149\n",
            "xid-caused",
            "Xid 149",
        ),
        (
            f"(VllmWorker rank=0 pid=3) ERROR 07-28 03:20:14 [a.py:7] {CAUSED}\n",
            "own-words",
            ALIGNED,
        ),
        (
            "V: 1 validation error for VllmConfig\n  Value error, use `--x` instead. [type=a]\n",
            "config-invalid",
            "Value error, use `--x` instead.",
        ),
    ],
)
def test_what_a_log_says_itself_decides(log, about, hint):
    first = judged(log.encode())[0]
    assert first.about == about
    assert hint in first.hint


def test_back_ends_that_are_for_this_gpu_are_told_with_their_reasons():
    reasons = "{A_MLA: [compute capability not supported], B_ATTN: [no sink, no fp8]}"
    (finding,) = judged(f"{UNFIT} Reasons: {reasons}\n".encode())
    assert finding.why.endswith(
        "another reason than this GPU: B_ATTN: [no sink, no fp8]"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "CUDA graphs (--enforce-eager)"),
        ("INFO a.py:1] non-default args: {'enforce_eager': True}\n", "drafts (leave"),
        ("vllm serve m --enable-lora --enforce-eager\n", "LoRA (leave"),
    ],
)
def test_what_the_arguments_switch_off_already_is_no_cure(arguments, told):
    drafts = FRAME.format("site-packages/vllm/v1/spec_decode/eagle.py")
    graphs = FRAME.format("site-packages/vllm/compilation/cuda_graph.py")
    log = f"{arguments}{drafts}{graphs}{RAISED.format('NotImplementedError')}"
    first = judged(log.encode())[0]
    assert first.what.endswith(
        "NotImplementedError in f (vllm/compilation/cuda_graph.py)"
    )
    assert told in first.hint
    assert ("--enforce-eager" in first.hint) == (not arguments)


START = "INFO a.py:1] non-default args: {{'api_key': 'x1y2', {}}}\n"


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        (
            "'kv_cache_dtype': 'fp8'",
            "Error: fp8 must not be used",
            "--kv-cache-dtype=fp8",
        ),
        (
            "'tensor_parallel_size': 6",
            "Error: 16 must be a multiple of 6",
            "size=6. Give",
        ),
        (
            "'seed': 7",
            "ValueError: x1y2 needs max_num_seqs of 8",
            ": --max-num-seqs. G",
        ),
        ("'model': 'fp8'", "ValueError: there must be no fp8", ""),
    ],
)
def test_options_that_a_message_has_are_named_with_their_values(options, error, named):
    first = judged(f"{START.format(options)}{RAISED.format(error)}".encode())[0]
    assert first.about == "own-words"
    assert named in first.hint
    assert ("options of vLLM" in first.hint) == bool(named)
    assert "api" not in first.hint


@pytest.mark.parametrize(
    ("argument", "lifespan"),
    [
        ("--task embed", "--task: in `vllm serve` from 0.11.1 to 0.12.0"),
        ("--tool-call-parser-plugin p.py", "did you mean --tool-parser-plugin?"),
        (
            "--frobnicate",
            "--frobnicate: no release of vLLM has it: it is of a fork or branch",
        ),
    ],
)
def test_an_unknown_argument_is_told_with_its_releases_or_what_was_meant(
    argument, lifespan
):
    (finding,) = judged(f"vllm: error: unrecognized arguments: {argument}\n".encode())
    assert finding.why.endswith(lifespan)


LENGTH = "'kv_cache_dtype': 'fp8'"
SIGNAL = "(APIServer pid=1) Received signal SIGTERM, shutting down\n"
NO_MOE = (
    "NotImplementedError: No NvFp4 MoE backend supports the deployment configuration."
)
DICT = (
    f'  File "{PACKAGES}/transformers/tokenization_utils_base.py", line 9, in f\n'
    "AttributeError: 'dict' object has no attribute 'model_type'"
)
NCCL_BEGUN = "gpu0:1:2 [0] NCCL INFO ncclCommInitAll comm 0x5 rank 0 - Init COMPLETE\n"
LOADS = "(EngineCore pid=1) INFO 11-22 10:00:00 [a.py:1] Starting to load model m...\n"


@pytest.mark.parametrize(
    ("log", "level", "step", "lever"),
    [
        (f"{NCCL_BEGUN}^C\n", Level.WARNING, "Init COMPLETE", "NCCL_P2P_DISABLE=1"),
        (f"{LOADS}KeyboardInterrupt\n", Level.WARNING, "load model m", "safetensors"),
        (LOADS, Level.NOTE, "Starting to load model m", "free -h"),
    ],
)
def test_a_start_that_stands_still_is_told_with_its_last_step(log, level, step, lever):
    (finding,) = judged(log.encode())
    assert (finding.level, finding.about) == (level, "start-unfinished")
    assert is_answer(finding) == (level is Level.NOTE)
    assert step in finding.why
    assert lever in finding.hint


@pytest.mark.parametrize(
    ("log", "about", "hint"),
    [
        (
            f"{BANNER}{LOADS}{SIGNAL}{RAISED.format(CAUSED)}",
            "start-unfinished",
            "a limit for the start",
        ),
        (f"{NCCL_BEGUN}vllm exited with code 137\n", "unit-killed", "NCCL_P2P_DISABLE"),
        (
            f"{START.format(LENGTH)}ValueError: To serve, 13 GiB KV cache is needed\n",
            "kv-cache-short",
            "In force in this log already: --kv-cache-dtype fp8.",
        ),
        (
            f"{BANNER.replace('0.25.1', '0.14.1')}{RAISED.format(NO_MOE)}",
            "moe-backend-none",
            "Not in vLLM 0.14.1: --moe-backend.",
        ),
        (
            UP + OK_LINE + STREAMS + "ERROR 11-22 10:00:00 service=llm error=400\n",
            "request-error",
            "--tool-call-parser",
        ),
        (
            f"{START.format('')}{RAISED.format(DICT)}transformers      4.57.2\n",
            "package-code",
            "the one before",
        ),
    ],
)
def test_what_a_log_shows_is_taken_into_account(log, about, hint):
    first = judged(log.encode())[0]
    assert first.about == about
    assert hint in first.hint


CAN_BE_SPLIT = "the shard of rank 0 must not be split"


@pytest.mark.parametrize(
    ("error", "sure"),
    [
        (CAUSED, "not decided"),
        (f"ValueError: {CAN_BE_SPLIT}; use --frob-size 4", "the program's own words"),
        (
            f"ValueError: {CAN_BE_SPLIT}: set FROB_SPLIT_SIZE=4",
            "the program's own words",
        ),
        (f"ValueError: {CAN_BE_SPLIT}: set VLLM_LOGGING_LEVEL=DEBUG", "not decided"),
        ("RuntimeError: frob requires frobnix >= 1.2", "the program's own words"),
        ("RuntimeError: CUBLAS_STATUS_INTERNAL_ERROR", "not decided; medium, reported"),
        ("ModuleNotFoundError: No module named 'frob'", "high, documented"),
        (
            "ModuleNotFoundError: No module named 'frob.b'",
            "not decided; medium, inferred",
        ),
    ],
)
def test_a_cause_is_claimed_only_where_the_text_proves_it(error, sure):
    first = judged(f"{BANNER}{RAISED.format(error)}".encode())[0]
    assert first.sure == sure


WAITS = (
    "INFO [a.py:7] No available shared memory broadcast block found in 60 seconds.\n"
)
SHARDS = "Loading safetensors checkpoint shards:  58% Completed | 42/72\n"


@pytest.mark.parametrize(
    ("log", "warnings"), [(WAITS + SHARDS, []), (WAITS, ["shm-broadcast"])]
)
def test_a_harmless_cause_is_no_warning(log, warnings):
    found = judged(log.encode())
    assert [row.about for row in found if row.level is Level.WARNING] == warnings


def test_what_a_start_has_on_is_told_where_no_cause_is_decided():
    command = (
        "$ VLLM_FROB_LAYOUT='HND' VLLM_LOGGING_LEVEL=DEBUG vllm serve m --enable-lora\n"
    )
    first, *_others = judged(f"{command}{BANNER}{RAISED.format(CAUSED)}".encode())
    levers = first.hint.rpartition("one after the other: ")[2]
    assert levers == "LoRA (leave --enable-lora out); VLLM_FROB_LAYOUT=HND."
    bare = judged(f"{BANNER}{RAISED.format(CAUSED)}".encode())[0]
    assert "one after the other" not in bare.hint


def test_only_the_first_error_claims_a_cause():
    errors = ("OSError: [Errno 24]", "NCCL WARN Duplicate GPU detected")
    log = "".join(map(RAISED.format, errors))
    second = judged(f"{BANNER}{log}".encode())[1]
    assert (second.sure, second.why.partition(";")[0]) == (
        "not decided",
        "this may follow from the error above",
    )


@pytest.mark.parametrize(
    ("line", "about", "hint"),
    [
        (
            '{"content":"it is so so so so so so so so so"}',
            "answer-repeats",
            "--moe-backend marlin",
        ),
        ('["","length",200]', "answer-empty", "--moe-backend or --linear-backend"),
        ("$ # the same without --frob runs", "compared-by-hand", "leave that out"),
    ],
)
def test_what_the_owner_pastes_behind_a_healthy_start_is_told(line, about, hint):
    (finding, *_others) = judged(f"{UP}{OK_LINE}{line}\n".encode())
    assert finding.about == about
    assert hint in finding.hint


def test_an_error_is_told_with_the_step_before_it_and_the_build_of_vllm():
    banner = BANNER.replace("0.25.1", "0.25.1.dev3+frob")
    first = judged(f"{banner}{LOADS}{RAISED.format(CAUSED)}".encode())[0]
    assert "The last step before it: Starting to load model m" in first.why
    assert "(+frob)" in first.why
    upstream = BANNER.replace("0.25.1", "0.25.2.dev0+g752a3a504.d20260714")
    assert "(+" not in judged(f"{upstream}{RAISED.format(CAUSED)}".encode())[0].why


def test_an_error_of_vllm_does_not_hide_one_of_the_machine():
    log = (
        f"{OOPS}{RAISED.format('RuntimeError: CUDA out of memory. Tried to allocate')}"
    )
    errors = [row.about for row in judged(log.encode()) if row.level is Level.ERROR]
    assert errors[0] == "machine-fault"
    assert len(errors) == 2


@pytest.mark.parametrize(
    "before",
    [
        "INFO [factory.py:64] Creating v1 KV connector with name: OffloadingConnector\n",
        'Traceback (most recent call last):\n  File "/v/transformers/a.py", line 3, in b\n',
    ],
)
def test_no_part_is_named_for_what_came_before_the_traceback(before):
    """An error that was caught has frames, too."""
    trace = (
        'Traceback (most recent call last):\n  File "/v/mine/frob.py", line 3, in run\n'
    )
    first = judged(f"{before}{trace}ValueError: the frob wants arms\n".encode())[0]
    assert (first.about, first.why.rpartition("\n")[2]) == (
        "unknown",
        "ValueError: the frob wants arms",
    )


KILLED = "kernel: Out of memory: Killed process 7 (VLLM::EngineCor) total-vm:9kB\n"
NO_PART = "AttributeError: module 'cutlass.cute.core' has no attribute 'ThrMma'\n"
AS_REQUIRED = (
    "(APIServer pid=1) INFO 07-26 11:00:00 [a.py:1] vLLM API server version 0.26.0\n"
    f"nvidia-cutlass-dsl==4.6.0\n{{}}{NO_PART}"
)
QUACK = f'  File "{PACKAGES}/quack/layout_utils.py", line 281, in <module>\n'


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (KILLED, "The machine's memory ran out"),
        (f"kernel: cicc invoked oom-killer: order=0\n{KILLED}", "Compilers ran beside"),
        (AS_REQUIRED.format(""), "is what vLLM 0.26.0 requires"),
        (AS_REQUIRED.format(QUACK), "quack-kernels calls a part"),
    ],
)
def test_one_of_several_texts_of_a_log_tells_the_cause(log, cause):
    assert cause in judged(log.encode())[0].why


def test_a_harmless_line_excuses_no_other_line_of_its_symptom():
    warning = b"vllm/version.py:8: RuntimeWarning: Failed to read commit hash:\n"
    error = b"LookupError: setuptools-scm was unable to detect version for /src/vllm.\n"
    assert [found.level for found in judged(warning)] == [Level.NOTE]
    first = judged(warning + error)[0]
    assert (first.about, first.level) == ("build-no-version", Level.ERROR)
