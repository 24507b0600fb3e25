"""Prefill of gated delta nets (Qwen3.5 and later) by FlashInfer on SM12x."""

from functools import partial
from textwrap import indent
from types import SimpleNamespace

from patchkit.recipes.vllm import kit

_PATH = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
_SCOPE = "_resolve_gdn_prefill_backend"
_BEFORE = """\
if backend in ["flashinfer", "auto"] and supports_flashinfer:
    return backend, "flashinfer"
"""
_AFTER = f"""\
# FlashInfer has a kernel for SM12x as well.
if (
    current_platform.is_device_capability_family(120)
    and head_k_dim == 128
    and current_platform.get_cuda_runtime_major() >= 13
):
    supports_flashinfer = True
{_BEFORE}"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read on which devices FlashInfer's kernel is trusted."""
    text = tree.read(_PATH)
    if "# The in-tree CuteDSL kernel targets SM100 only" in text:
        return kit.upstream(f"{_PATH}: SM12x takes FlashInfer")
    edits = kit.swap(_PATH, text, _SCOPE, _BEFORE, _AFTER, note="FlashInfer on SM12x")
    now = f"{_PATH}: SM12x takes Triton, whatever --gdn-prefill-backend says"
    return kit.found(edits, now=now, done=f"{_PATH}: SM12x takes FlashInfer")


def prove(case: kit.Case) -> str:
    """Check what each request resolves to, also with heads of 64 or CUDA 12."""
    wanted = ["flashinfer", "flashinfer", "triton", "triton"]
    ours = kit.Decision("GDN prefill", partial(_resolve, 128, 13), wanted, kit.SM12X)
    others = [
        kit.Decision("GDN", partial(_resolve, *e), None, ())
        for e in ((64, 13), (128, 12))
    ]
    kit.prove_decisions(case, [ours, *others])
    return "GDN prefill: FlashInfer on 12.0 and 12.1 with heads of 128 and CUDA 13, else as before"


def _resolve(head: int, cuda: int, code: kit.Code) -> list[str]:
    code.names["current_platform"].get_cuda_runtime_major = lambda: cuda
    model = SimpleNamespace(hf_text_config=SimpleNamespace(linear_key_head_dim=head))
    backends = []
    for asked in ("auto", "flashinfer", "cutedsl", "triton"):
        request = {"gdn_prefill_backend": asked}
        config = SimpleNamespace(additional_config=request, model_config=model)
        backends.append(code.get(_PATH, _SCOPE)(config)[1])
    return backends


FIX = kit.Fix(
    title="Prefill of gated delta nets by FlashInfer on SM12x",
    symptom="--gdn-prefill-backend flashinfer is given, and the log says Triton/FLA.",
    why="The FlashInfer that these releases pin has a kernel for SM12x; they know of 9.0 and 10.x.",
    needs=(kit.optional(">=0.28,<0.30", "an upgrade to 0.30 does as much"),),
    upstream="0.30.0 (vllm#55715) takes FlashInfer on SM12x",
    look=look,
    prove=prove,
    examples=(
        kit.Example(
            "0.28.0",
            _PATH,
            f"def {_SCOPE}():\n{indent(_BEFORE, '    ')}",
            f"def {_SCOPE}():\n{indent(_AFTER, '    ')}",
        ),
    ),
)
