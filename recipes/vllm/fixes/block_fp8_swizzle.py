"""The order in which the dense block-FP8 GEMM visits its tiles."""

from patchkit.recipes.vllm import kit

_FOLDER = "quantization/w8a8/cutlass/c3x/scaled_mm_blockwise_sm120_fp8_dispatch.cuh"
_PATHS = (f"csrc/libtorch_stable/{_FOLDER}", f"csrc/{_FOLDER}")
_UPSTREAM = "int max_swizzle_size"
_FUNCTION = "void cutlass_gemm_caller_blockwise("
_BEFORE = """\
  c3x::cutlass_gemm_caller<GemmKernel>(a.device(), prob_shape, mainloop_args,
                                       epilogue_args);
"""
_AFTER = """\
  // A weight that the L2 cannot hold (GB10: 24 MiB) would be read again for each
  // row of tiles. Visiting neighbouring tiles together changes no sum.
  typename GemmKernel::TileSchedulerArguments scheduler{};
  int l2_bytes = 0;
  if (cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize,
                             a.device().index()) == cudaSuccess &&
      l2_bytes > 0 && b.size(0) * b.size(1) > l2_bytes) {
    scheduler.max_swizzle_size = 8;
  }
  c3x::cutlass_gemm_caller<GemmKernel>(a.device(), prob_shape, mainloop_args,
                                       epilogue_args, scheduler);
"""


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the launch of the block-FP8 kernel."""
    path = kit.first_existing(tree, _PATHS)
    text = tree.read(path)
    if _UPSTREAM in text:
        return kit.upstream(f"{path}: the order depends on the L2")
    edits = kit.swap_text(
        path,
        text,
        _BEFORE,
        _AFTER,
        note="swizzle if the L2 is too small",
        within=kit.region(path, text, _FUNCTION, "\n}\n"),
    )
    return kit.found(
        edits,
        now=f"{path}: tiles are visited in the default order",
        done=f"{path}: tiles are grouped if the weight exceeds the L2",
    )


FIX = kit.Fix(
    title="Dense block-FP8 GEMM visits its tiles in an order that suits a small L2",
    symptom="Prefill of block-FP8 models loses speed on a GB10 as prompts exceed 4096 tokens.",
    why="In the default order a weight above 24 MiB is read from memory once per row of tiles. "
    "Grouping the tiles reads it from the L2, with the same results bit by bit. It only matters "
    "where CUTLASS does these layers: from 0.25 on DeepGEMM comes first unless it is switched off.",
    needs=(kit.optional(">=0.20,<0.30", "speed of long prompts"),),
    upstream="0.30.0 chooses the order by the size of the L2 (#55180)",
    look=look,
    layer="build",
    examples=(
        kit.Example(
            "0.29.0",
            _PATHS[0],
            f"{_FUNCTION}) {{\n{_BEFORE}}}\n",
            f"{_FUNCTION}) {{\n{_AFTER}}}\n",
        ),
    ),
)
