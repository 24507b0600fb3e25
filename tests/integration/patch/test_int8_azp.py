"""INT8 with zero points: what a device reaches by the release's dispatch, and what is compiled."""

import re

import pytest

from patchkit.errors import ProofError
from patchkit.patching.fix import Case
from patchkit.process import run
from patchkit.recipes.vllm.fixes.int8_azp import FIX
from support.needed import need
from support.selection import RELEASES
from tools.seen import unproved

pytestmark = pytest.mark.releases
FORMS = ("0.19.1", "0.24.0", RELEASES[-1])


def entry(root):
    (path,) = root.rglob("w8a8/cutlass/scaled_mm_entry.cu")
    return path


def test_another_dispatch_is_refused(release):
    plan = unproved(release(RELEASES[-1]), "native")
    path = str(entry(plan.stock.root).relative_to(plan.stock.root))
    text = plan.patched.read(path).replace("version_num >= 80)", "version_num == 80)")
    case = Case(
        stock=plan.stock,
        patched=plan.patched.with_texts({path: text}),
        request=plan.request,
        active=frozenset(),
    )
    with pytest.raises(ProofError, match=r"built for 12\.1a") as refused:
        FIX.prove(case)
    assert "SM12x reaches  and cutlass_scaled_mm_sm120" in refused.value.what


@pytest.mark.parametrize("version", FORMS)
def test_what_a_build_compiles(version, release, tmp_path):
    need("g++")
    plan = unproved(release(version), "native")
    path = next(path for path in plan.texts if path.endswith("/scaled_mm_c2x.cu"))
    lines = plan.patched.read(path).splitlines()
    source = tmp_path / "scaled_mm_c2x.cc"
    source.write_text(
        "\n".join(line for line in lines if not line.startswith("#include"))
    )

    def called(archs):
        done = run("g++", "-E", "-P", f"-D__CUDA_ARCH_LIST__={archs}", source)
        return re.findall(r"return cutlass_scaled_mm_(sm\d+)_epilogue<", done.output)

    whole = ["sm75"] * 4 + ["sm80"] * 4 + ["sm89"] * 4
    assert called("1210") == called("1200") == ["sm80", "sm80"]
    assert called("890,1210") == called("800") == called("1100") == whole
