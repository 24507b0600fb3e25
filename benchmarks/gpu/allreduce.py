"""One rank of an all-reduce by torch's own NCCL: RANK ADDRESS. Prints one line of JSON."""

from __future__ import annotations

import datetime
import json
import sys
import time

import torch
import torch.distributed as dist

RANKS, ROUNDS = 2, 8
ELEMENTS = 16 << 20  # of float32: 64 MiB


def main() -> None:
    rank, address = int(sys.argv[1]), sys.argv[2]
    device = torch.device("cuda", 0)
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://{address}:29400",
        rank=rank,
        world_size=RANKS,
        timeout=patience,
    )
    data = torch.empty(ELEMENTS, device=device)
    times = []
    for turn in range(ROUNDS):
        data.fill_(rank + 1 + turn)
        torch.cuda.synchronize()
        start = time.perf_counter()
        dist.all_reduce(data)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        expected = RANKS * (turn + 1) + 1
        assert bool((data == expected).all()), (turn, data[:4])
    best = data.nbytes / min(times[1:]) / 1e9
    version = ".".join(map(str, torch.cuda.nccl.version()))
    result = {"nccl": version, "right": True, "gigabytes_per_second": round(best, 2)}
    print(json.dumps(result))  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
