"""The sizes of CUDA graphs: each release's own list, executed, with and without the rule."""

import ast
import builtins
from types import SimpleNamespace

import pytest

from patchkit.patching.workspace import open_workspace
from patchkit.proof.upstream_code import execute
from patchkit.runtime.rules.presets import load_flag_rules
from patchkit.runtime.rules.releases import within

pytestmark = [pytest.mark.releases, pytest.mark.usefixtures("run_here")]
NAME = "_set_cudagraph_sizes"
RULE = next(rule for rule in load_flag_rules().rules if rule.id == "graph-sizes")


def test_no_number_of_streams_is_padded(version, release):
    if not within(version, str(RULE.when["vllm"])):
        return
    tree = ast.parse(
        open_workspace(release(version), "vllm").tree.read("vllm/config/vllm.py")
    )
    (function,) = (it for it in ast.walk(tree) if getattr(it, "name", "") == NAME)
    platform = SimpleNamespace(is_device_capability_family=lambda _: False)
    imported = SimpleNamespace(current_platform=platform)
    space = {"__builtins__": {**vars(builtins), "__import__": lambda *_: imported}}
    space["CUDAGraphMode"] = SimpleNamespace(NONE=0)
    execute(compile(ast.Module([function], []), "vllm.py", "exec"), space)
    for streams, drafts, padded in (
        (8, 0, [3, 5, 6, 7]),
        (8, 3, [3, 5, 7]),
        (8, 7, []),
    ):
        for mode, expected in (("balanced", padded), (RULE.value, [])):
            graphs = SimpleNamespace(
                cudagraph_mode=1, post_init_cudagraph_sizes=lambda: None
            )
            graphs.max_cudagraph_capture_size = graphs.cudagraph_capture_sizes = None
            graphs.pass_config = SimpleNamespace(enable_sp=False)
            batch = SimpleNamespace(max_num_seqs=streams, max_num_batched_tokens=8192)
            spec = SimpleNamespace(uses_dynamic_speculative_decoding=lambda: False)
            spec.num_speculative_tokens = drafts
            config = SimpleNamespace(compilation_config=graphs, scheduler_config=batch)
            config.speculative_config, config.num_speculative_tokens = spec, drafts
            config.model_config = SimpleNamespace(enforce_eager=False)
            config.parallel_config = SimpleNamespace(tensor_parallel_size=1)
            config.performance_mode, config.uniform_decode_query_len = mode, 1 + drafts
            space[NAME](config)
            # What drafts takes so many tokens for each stream, to which vLLM rounds sizes up.
            right = {
                -(-size // (1 + drafts)) for size in graphs.cudagraph_capture_sizes
            }
            assert [n for n in range(1, streams + 1) if n not in right] == expected
