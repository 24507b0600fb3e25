"""On a GPU: FlashAttention 2 as the driver compiles it at first use, and assembled by patchkit.

    python tests/e2e/proofs/native_proof.py STOCK NATIVE FOLDER

It takes a GPU that compiles FlashAttention 2 (9.0, say) and an interpreter with the release's
torch. STOCK and NATIVE hold a vllm/ each, NATIVE's after `patchkit native --write`. FOLDER, a new
one, gets caches and answers. Every entry point is called, each fat binary in a process of its own
with an empty cache; exit code 5 unless all results are bitwise equal.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

LIBRARY = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
# A fat binary holds the kernels of one kind, head size and dtype, causal or not.
KINDS = (
    *product(("split", "plain"), ("32", "64", "96", "128", "192", "256")),
    ("sparse", "128"),
)
TYPES = product(("bfloat16", "float16"), ("full", "causal"))
GROUPS = [" ".join((*kind, *rest)) for kind, rest in product(KINDS, TYPES)]
MASKS: tuple[dict[str, Any], ...] = ({}, {"alibi": True}, {"softcap": 30.0})
VARLEN = (
    *(*MASKS, {"softcap": 30.0, "alibi": True}, {"q": (777, 1024)}, {"heads": (4, 4)}),
    *({"less": 8}, {"q": (5, 64), "k": (300, 511)}),
)
FULL = (
    *({"window": (64, right)} | how for right in (0, 33) for how in MASKS),
    {"q": (1, 1), "k": (900, 4000)},  # what a decoder asks, whatever the mask is
)
CACHE = (
    *({"splits": splits} for splits in (0, 2, 4, 8, 16, 32, 64, 128)),
    *({"splits": 6} | how for how in (*MASKS, {"less": 8}, {"q": 128, "whole": True})),
    *(
        {"new": 3, "splits": 1} | how
        for how in ({}, {"rotary": False}, {"rotary": True})
    ),
    *(
        {"paged": True, "k": (2048, 2048)} | how
        for how in ({"splits": 1}, {"splits": 6, "new": 3})
    ),
)


def cases(kind: str, mask: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield entry points and options of what the kernels of one fat binary are for."""
    if kind == "sparse":
        yield from product(("fwd_sparse", "varlen_fwd_sparse"), MASKS)
        return
    for how in VARLEN + (FULL[: 7 if kind == "split" else 6] if mask == "full" else ()):
        yield "varlen_fwd", how | {"paged": kind == "split"}
    one = ({"splits": 1}, {"splits": 1, "q": 128, "whole": True})
    yield from product(["fwd_kvcache"], CACHE if kind == "split" else one)


def prepare_call(
    torch: Any, group: str, entry: str, how: dict[str, Any]
) -> tuple[Any, Any]:
    """Return a call without arguments, and what of its arguments is a result, too."""
    _kind, head, dtype, mask = group.split()
    size, (heads, pairs) = int(head) - how.get("less", 0), how.get("heads", (8, 2))
    normal = partial(torch.randn, device="cuda", dtype=getattr(torch, dtype))
    ints = partial(torch.tensor, device="cuda", dtype=torch.int32)
    slopes = torch.arange(1, heads + 1, device="cuda").neg().float().exp2()
    alibi, scale, table, before = (
        slopes if how.get("alibi") else None,
        size**-0.5,
        None,
        (),
    )
    last = (mask == "causal", *how.get("window", (-1, -1)), how.get("softcap", 0.0))
    queries = how.get("q", (128, 77))
    keys = how.get("k", queries)
    if how.get("paged"):  # in pages of 16, shuffled
        pages = math.ceil(max(keys) / 16)
        table = torch.randperm(len(keys) * pages).int().cuda().view(-1, pages)
    if entry == "varlen_fwd":
        starts, ends = (ints([0, *each]).cumsum(0).int() for each in (queries, keys))
        q = normal(sum(queries), heads, size)
        k = normal(sum(keys) if table is None else table.numel() * 16, pairs, size)
        used, rows = (None, ends) if table is None else (ints(keys), ends * 0)
        after = (
            starts,
            rows,
            used,
            None,
            table,
            alibi,
            max(queries),
            max(keys),
            0.0,
            scale,
        )
        after = (*after, False, *last, False, 0, None)
    elif entry == "fwd_kvcache":
        q, k = normal(2, how.get("q", 5), heads, size), normal(2, 2048, pairs, size)
        new = [normal(2, 3, pairs, size) if "new" in how else None for _ in "kv"]
        angles = [normal(2048, 8) if "rotary" in how else None for _ in "cs"]
        used = None if how.get("whole") else ints([1500, 333])
        before = (*new, used, *angles, None, None, table, alibi)
        after = (scale, *last, how.get("rotary", False), how["splits"])
    else:  # two blocks of keys and 90 single ones for 64 queries
        varlen, ends = entry == "varlen_fwd_sparse", ints([0, 512, 1024])
        q, k = (
            normal(*((1024,) if varlen else (2, 512)), each, size)
            for each in (heads, pairs)
        )
        lists = map(ints, (2, [0, 64], 90, [*range(128, 218)]))
        before = [each.expand(2, heads, 8, *each.shape).contiguous() for each in lists]
        after = (ends, ends, None, alibi, 512, 512) if varlen else (alibi,)
        after = (
            *after,
            0.0,
            scale,
            *([False] if varlen else []),
            last[0],
            last[3],
            False,
            None,
        )
    k = k if table is None else k.view(-1, 16, pairs, size)
    v, function = torch.randn_like(k), getattr(torch.ops._vllm_fa2_C, entry)
    unwritten = torch.full_like(q, math.nan)  # it shows
    call = lambda: function(q.clone(), k, v, *before, unwritten.clone(), *after)  # noqa: E731
    return call, (k, v) if "new" in how else ()


def run_group(library: str, group: str, out: str) -> None:
    """Write of each call of a group the first and the median later seconds, and a digest."""
    import torch

    torch.ops.load_library(library)
    torch.zeros(1, device="cuda")
    told = []
    for entry, how in cases(group.split()[0], group.split()[3]):
        torch.manual_seed(zlib.crc32(f"{group} {entry} {how}".encode()))
        call, others = prepare_call(torch, group, entry, how)
        spent: list[float] = []
        for _ in range(21):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            result = call()
            torch.cuda.synchronize()
            spent.append(time.perf_counter() - begin)
        # As bytes: NaN is equal to NaN, and 0 is not -0.
        data = (
            each.contiguous().view(torch.uint8).cpu().numpy()
            for each in (*result, *others)
        )
        digests = [hashlib.sha256(each).hexdigest() for each in data]
        told.append((spent[0], median(spent[1:]), digests))
    Path(out).write_text(json.dumps(told))


def compare_group(homes: dict[str, Path], folder: Path, group: str) -> bool:
    """Run a group with both libraries and print a row; return whether all results are equal."""
    cells, answers = [group], []
    for name, home in homes.items():
        cache, out = folder / f"{name} {group}", folder / f"{name} {group}.json"
        cache.mkdir(parents=True)
        command = [
            sys.executable,
            __file__,
            "group",
            str(home / LIBRARY),
            group,
            str(out),
        ]
        subprocess.run(
            command, env=os.environ | {"CUDA_CACHE_PATH": str(cache)}, check=True
        )
        first, later, digests = zip(*json.loads(out.read_text()), strict=True)
        megabytes = (
            sum(each.stat().st_size for each in cache.rglob("*") if each.is_file())
            / 1e6
        )
        cells.append(
            f"{first[0]:.3f} s, {median(later) * 1e6:.0f} µs, {megabytes:.0f} MB"
        )
        answers.append(digests)
    same = [old == new for old, new in zip(*answers, strict=True)]
    print("|", " | ".join(cells), f"| {sum(same)} of {len(same)} equal |", flush=True)
    return all(same)


if __name__ == "__main__":
    if sys.argv[1] == "group":
        sys.exit(run_group(*sys.argv[2:]))
    stock, native, folder = (Path(word).absolute() for word in sys.argv[1:])
    compare = partial(compare_group, {"stock": stock, "native": native}, folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sys.exit(0 if all([*pool.map(compare, GROUPS)]) else 5)
