"""Ask a vLLM release's own code which version of FlashAttention it uses on a device.

The code runs as if only the libraries of flash-attention that were built could be imported.
"""

import ast
import builtins
from collections.abc import Collection

from patchkit.proof.upstream_code import Anything, Code, execute
from patchkit.recipes.vllm.decisions import Off, on_device
from patchkit.source.tree import SourceTree, first_existing

FA2 = "_vllm_fa2_C"
FA3 = "_vllm_fa3_C"
INTERFACE = "vllm/vllm_flash_attn/flash_attn_interface.py"
# The module that chooses the version; releases have one of these, newest first.
DECIDING = (
    "vllm/v1/attention/backends/fa_utils.py",
    "vllm/attention/utils/fa_utils.py",
)
_SUPPORTS = ("fp8", "mla", "sinks")  # flash_attn_supports_…


def attention_code(
    tree: SourceTree,
    capability: tuple[int, int],
    *,
    built: Collection[str],
    version: int | None,
) -> Code:
    """Return the code of a tree as it runs on a device if only the ``built`` libraries exist.

    ``version`` is the version of FlashAttention that the user sets (by a variable up to vLLM 0.12,
    by a flag later), None if the user sets none.
    """
    environ = {} if version is None else {"VLLM_FLASH_ATTN_VERSION": str(version)}
    attention = Off(flash_attn_version=version, use_trtllm_attention=None)
    configuration = Off(
        attention_config=attention,
        cache_config=Off(),
        model_config=None,
    )

    names: dict[str, object] = {
        "get_current_vllm_config": lambda: configuration,
        "get_current_vllm_config_or_none": lambda: configuration,
    }

    if tree.exists(INTERFACE):
        code = on_device(tree, capability, environ, names=names)
        code.module(INTERFACE).update(_guarded(code, built))
        return code

    # Up to vLLM 0.16, the interface is in flash-attention, not in the tree. In upstream's wheels of
    # these releases it gives the following answers.
    loads = {2: FA2 in built, 3: FA3 in built and capability[0] == 9}
    names["is_fa_version_supported"] = loads.__getitem__
    return on_device(tree, capability, environ, names=names)


def flash_attention(code: Code, tree: SourceTree) -> dict[str, object]:
    """Return the answers of a release's code about FlashAttention.

    ``version`` is the version that it chooses, None for no FlashAttention. For each feature in
    ``_SUPPORTS`` that the release has a function for, there is the result of this function.
    """
    path = first_existing(tree, DECIDING)
    answers = {"version": code.get(path, "get_flash_attn_version")()}
    for feature in _SUPPORTS:
        function = f"flash_attn_supports_{feature}"
        if code.has(path, function):
            answers[feature] = code.get(path, function)()
    return answers


def _guarded(code: Code, built: Collection[str]) -> dict[str, object]:
    """Return the names that the interface defines in ``try`` around imports of the libraries.

    These statements run here with an ``__import__`` that finds only ``built`` libraries.
    """

    def import_library(
        name: str,
        _globals: object,
        _locals: object,
        wanted: object,
        _level: int,
    ) -> object:
        assert isinstance(wanted, tuple)

        missing = [name for name in wanted if name not in built]
        if missing:
            raise ImportError(f"No module named {missing[0]!r}")
        return Anything(name)

    own_builtins = {**vars(builtins), "__import__": import_library}
    space: dict[str, object] = {"__builtins__": own_builtins}
    for node in code.module(INTERFACE).source.body:
        if isinstance(node, ast.Try) and _imports_library(node):
            execute(compile(ast.Module([node], []), INTERFACE, "exec"), space)

    del space["__builtins__"]
    return space


def _imports_library(node: ast.Try) -> bool:
    names = {
        alias.name
        for part in node.body
        if isinstance(part, ast.ImportFrom)
        for alias in part.names
    }

    return FA2 in names or FA3 in names
