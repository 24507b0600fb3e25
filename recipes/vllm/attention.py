"""Which FlashAttention a vLLM release takes on a device, asked of its own code.

A wheel has the libraries that were built: the code is run as if those, and no others, could be
imported.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection

from patchkit.proof.upstream_code import Anything, Code, execute
from patchkit.recipes.vllm.decisions import Off, on_device
from patchkit.source.tree import SourceTree, first_existing

FA2, FA3 = "_vllm_fa2_C", "_vllm_fa3_C"
INTERFACE = "vllm/vllm_flash_attn/flash_attn_interface.py"
# Where releases decide, newest first.
_DECIDING = (
    "vllm/v1/attention/backends/fa_utils.py",
    "vllm/attention/utils/fa_utils.py",
)
_SUPPORTS = ("fp8", "mla", "sinks")  # flash_attn_supports_…


def attention_code(
    tree: SourceTree,
    capability: tuple[int, int],
    *,
    built: Collection[str],
    version: int | None = None,
) -> Code:
    """Return the code of a tree on a device, with these libraries of flash-attention.

    ``version`` is the one that the user asks for, by the variable up to 0.12, later by a flag.
    """
    environ = {} if version is None else {"VLLM_FLASH_ATTN_VERSION": str(version)}
    attention = Off(flash_attn_version=version, use_trtllm_attention=None)
    configuration = Off(
        attention_config=attention, cache_config=Off(), model_config=None
    )
    # Up to 0.16 the interface comes with flash-attention; read in upstream's wheels of these.
    loads = {2: FA2 in built, 3: FA3 in built and capability[0] == 9}
    given: dict[str, object] = {
        "get_current_vllm_config": lambda: configuration,
        "get_current_vllm_config_or_none": lambda: configuration,
        **(
            {}
            if tree.exists(INTERFACE)
            else {"is_fa_version_supported": loads.__getitem__}
        ),
    }
    code = on_device(tree, capability, environ, names=given)
    if tree.exists(INTERFACE):
        code.module(INTERFACE).update(_guarded(code, built))
    return code


def flash_attention(code: Code, tree: SourceTree) -> dict[str, object]:
    """Return the version that a release takes, None for none, and what it then says it can do."""
    path = first_existing(tree, _DECIDING)
    named = {name: f"flash_attn_supports_{name}" for name in _SUPPORTS}
    return {
        "version": code.get(path, "get_flash_attn_version")(),
        **{
            name: code.get(path, function)()
            for name, function in named.items()
            if code.has(path, function)
        },
    }


def _guarded(code: Code, built: Collection[str]) -> dict[str, object]:
    """Return what the guarded imports of the libraries leave behind."""

    def imported(
        name: str, _globals: object, _locals: object, wanted: object, _level: int
    ) -> object:
        assert isinstance(wanted, tuple)
        if missing := [name for name in wanted if name not in built]:
            raise ImportError(f"No module named {missing[0]!r}")
        return Anything(name)

    space: dict[str, object] = {
        "__builtins__": {**vars(builtins), "__import__": imported}
    }
    for node in code.module(INTERFACE).source.body:
        body = node.body if isinstance(node, ast.Try) else []
        names = [
            a.name
            for part in body
            if isinstance(part, ast.ImportFrom)
            for a in part.names
        ]
        if {FA2, FA3}.intersection(names):
            execute(compile(ast.Module([node], []), INTERFACE, "exec"), space)
    return {name: value for name, value in space.items() if name != "__builtins__"}
