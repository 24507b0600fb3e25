"""Tune fused-MoE kernels with the release's own benchmark, and keep the file that vLLM reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from patchkit.durable.atomic import replacing
from patchkit.durable.staging import ScratchFolder
from patchkit.errors import HostError, SourceError, translated
from patchkit.follow import Follow
from patchkit.process import ask
from patchkit.quoting import quoted
from patchkit.reading import read_bytes
from patchkit.records import RecordError, read_json

BENCHMARK = "benchmarks/kernels/benchmark_moe.py"
DTYPES = ("auto", "fp8_w8a8", "int8_w8a16")
_LARGEST = 1 << 20  # bytes of a file of configs
_LOOK = """\
from importlib.metadata import PackageNotFoundError, version
answer = {}
for name in ("vllm", "ray"):
    try:
        answer[name] = version(name)
    except PackageNotFoundError:
        answer[name] = ""
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """A model whose MoE layers are tuned, for one of ``parts`` GPUs; no sizes: upstream's own."""

    model: str
    parts: int = 1
    dtype: str = "auto"
    batch_sizes: Sequence[int] = ()


def check_tuner(python: str, version: Version) -> None:
    """Raise HostError or SourceError if this Python cannot run the tuner of this vLLM."""
    found = ask(python, _LOOK, isolated=False, hint="name the Python that has vLLM: --python")
    for name in ("vllm", "ray"):
        if not found.get(name):
            raise HostError(
                f"{python} has no {name}",
                why="the release's benchmark runs in vLLM's environment, and ray starts it",
                hint=quoted(python, "-m", "pip", "install", "ray")
                if name == "ray"
                else "--python EXE",
            )
    try:
        installed = Version(str(found["vllm"]))
    except InvalidVersion:
        raise HostError(f"{python}: {found['vllm']!r} is no version of vLLM") from None
    if installed.base_version != version.base_version:  # wheels differ in their local part
        raise SourceError(
            f"the installed vLLM is {installed}, the source {version}",
            hint=f"--vllm-src vllm=={installed.public}, or another --python",
        )


def tune_model(
    benchmark: Path, python: str, job: TuneJob, output: Path, tell: Callable[[str], None]
) -> Path:
    """Run the benchmark and return the file that it wrote, moved whole into ``output``.

    ``tell`` gets each line that it prints. Raises HostError with its last words if it fails.
    """
    with ScratchFolder() as scratch:
        # Options of the benchmark: the same from 0.11.1 to 0.33.0.
        own = ("--model", job.model, "--tp-size", str(job.parts), "--dtype", job.dtype)
        sizes = ("--batch-size", *map(str, job.batch_sizes)) if job.batch_sizes else ()
        words = (python, str(benchmark), *own, *sizes, "--tune", "--save-dir", scratch)
        with Follow(*words, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as running:
            for line in running:
                if line:
                    tell(line.rstrip())
        if running.done.trouble:
            raise running.done.error(
                why="no GPU, too little memory for the model's experts, or another ray that runs",
                hint="stop the server first; try fewer --batch-sizes",
            )
        files = sorted(Path(scratch).glob("*.json"))
        if len(files) != 1:
            raise SourceError(f"{BENCHMARK} wrote {len(files)} files of configs, not one")
        data = read_bytes(files[0], limit=_LARGEST, follow=False)
        try:
            read_json(dict[str, dict[str, Any] | str], data)
        except RecordError as error:
            raise SourceError(f"{files[0].name}: {error}") from None
        place = output / files[0].name
        with translated(at=place):
            output.mkdir(parents=True, exist_ok=True)
            with replacing(place) as file:
                file.write(data)
    return place
