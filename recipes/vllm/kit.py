"""Collect the names that a fix of vLLM imports."""

from patchkit.recipes.kit import *
from patchkit.recipes.vllm.archs import (
    INTERSECTION,
    Group,
    cmake_texts,
    evaluate,
)
from patchkit.recipes.vllm.attention import FA2, FA3, attention_code, flash_attention
from patchkit.recipes.vllm.decisions import (
    NVFP4_MOE,
    REGISTRIES,
    fp8_linear,
    nvfp4_linear,
    nvfp4_moe,
    nvfp4_scheme,
    on_device,
)
from patchkit.recipes.vllm.lists import (
    MLA,
    SUPPORTED,
    ArchList,
    cuda13_lists,
)
from patchkit.recipes.vllm.routing import (
    GB10,
    SM12X,
    Decision,
    prove_decision,
    prove_decisions,
)
from patchkit.recipes.vllm.stock_archs import check_stock
