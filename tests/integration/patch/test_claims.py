"""Compare what claims say of vLLM's sources with the sources of each release."""

import re

import pytest

from patchkit.patching.recipe import load_claims
from patchkit.runtime.rules.releases import within

CLAIMS = {claim.id: claim for claim in load_claims("vllm")}
SERVER, CONFIG = "vllm/entrypoints/**/*protocol.py", "vllm/config"
# claim → files, what is read there, and the releases that have it.
READ = [
    ("reasoning_content", SERVER, r"^    reasoning: str \| None = None$", ""),
    (
        "reasoning_content",
        SERVER,
        r"^    reasoning_content: str \| None = None$",
        "<0.16",
    ),
    (
        "memory_utilization_090",
        f"{CONFIG}/cache.py",
        r"_utilization: float = .*0\.9,",
        "<0.20",
    ),
    (
        "memory_utilization_090",
        f"{CONFIG}/cache.py",
        r"_utilization: float = .*0\.92,",
        ">=0.20",
    ),
    (
        "chunked_prefill_flag",
        f"{CONFIG}/scheduler.py",
        r" enable_chunked_prefill: bool = True",
        "",
    ),
    (
        "eager_always_or_never",
        f"{CONFIG}/model.py",
        r"^    enforce_eager: bool = False",
        "",
    ),
    (
        "prefix_cache_hit_rate",
        "vllm/v1/**/loggers.py",
        r'"vllm:prefix_cache_(hits|queries)"',
        "",
    ),
    (
        "prefix_cache_hit_rate",
        "vllm/**/*metrics.py",
        r'"vllm:gpu_prefix_cache_hit_rate"',
        "<0.11",
    ),
    (
        "drop_caches",
        "vllm/utils/mem_utils.py",
        r"virtual_memory\(\)\.available|is_integrated",
        "",
    ),
]


@pytest.mark.releases
@pytest.mark.parametrize(("claim", "files", "pattern", "versions"), READ)
def test_a_release_has_what_a_claim_read(
    claim, files, pattern, versions, release, version
):
    assert claim in CLAIMS
    texts = (path.read_text(encoding="utf-8") for path in release(version).glob(files))
    found = any(re.search(pattern, text, re.MULTILINE) for text in texts)
    assert found is within(version, versions)
