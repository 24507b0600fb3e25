"""Command lines that `patchkit serve-args` prints, for many situations: tests/data/env/serve.txt.

`python -m tools.serve_lines` writes the file anew; read its diff.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from patchkit.errors import DriftError, HostError, PatchkitError, UsageError
from patchkit.runtime.host.host import Host, System
from patchkit.runtime.memory.budget import load_budget
from patchkit.runtime.memory.pool import MemoryPool
from patchkit.runtime.node.decision import NodeOptions, decide_node
from patchkit.runtime.rules.presets import (
    find_preset,
    load_flag_rules,
    load_presets,
    model_recipes,
    named_preset,
)
from patchkit.runtime.rules.rule import RuleChoice
from patchkit.runtime.serve.args import ServeCommand, serve_args
from patchkit.runtime.serve.request import ServeRequest

PLACE = Path(__file__).parents[1] / "tests" / "data" / "env" / "serve.txt"
VERSIONS = ("0.11.1", "0.19.1", "0.25.1", "0.33.0")
HEAD = "192.168.100.10"
TWO: dict[str, Any] = {
    "role": "head",
    "topology": "roce",
    "executor": "mp",
    "nodes": 2,
    "head": HEAD,
}
WORKER = {**TWO, "role": "worker", "rank": 1}
# The lines must not depend on the machine that writes them.
NOWHERE = Host(system=System(), memory=None, gpus=(), netdevs=(), rdma=())
SPARK_GIB = load_budget().size.total_gib
OF_REQUEST = {each.name for each in fields(ServeRequest)}
# What somebody asks for; the preset comes by the model's name.
SITUATIONS: dict[str, dict[str, Any]] = {
    "one Spark": {"model": "openai/gpt-oss-120b"},
    "one Spark, open to the LAN": {
        "model": "openai/gpt-oss-20b",
        "host": "0.0.0.0",
        "port": 9000,
    },
    "head by RoCE": {"model": "openai/gpt-oss-120b", **TWO},
    "worker by RoCE": {"model": "openai/gpt-oss-120b", **WORKER},
    "head with Ray": {"model": "openai/gpt-oss-120b", **TWO, "executor": "ray"},
    "worker with Ray": {"model": "openai/gpt-oss-120b", **WORKER, "executor": "ray"},
    "ring of three": {
        "model": "openai/gpt-oss-120b",
        **TWO,
        "topology": "ring",
        "nodes": 3,
    },
    "ring of four": {
        "model": "openai/gpt-oss-120b",
        **TWO,
        "topology": "ring",
        "nodes": 4,
    },
    "head by sockets": {
        "model": "Qwen/Qwen2.5-72B-Instruct",
        **TWO,
        "topology": "socket",
    },
    "Spark and Thor": {"model": "openai/gpt-oss-120b", **TWO, "topology": "hetero"},
    "Thor as a worker": {
        "model": "openai/gpt-oss-120b",
        **WORKER,
        "topology": "hetero",
    },
    "too big for one": {"model": "Qwen/Qwen2.5-72B-Instruct"},
    "drafting": {"model": "nvidia/Qwen3.6-35B-A3B-NVFP4"},
    "drafting in a pipeline": {
        "model": "nvidia/Qwen3.6-35B-A3B-NVFP4",
        **TWO,
        "topology": "socket",
    },
    "files read fast, where that comes with vLLM": {
        "model": "Qwen/Qwen3-Coder-Next-FP8"
    },
    "experts by another kernel": {
        "model": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"
    },
    "a recipe without the flags of its build": {
        "model": "deepseek-ai/DeepSeek-V4-Flash-0731",
        **TWO,
    },
    "four bits on two": {"model": "Qwen/Qwen3-235B-A22B-GPTQ-Int4", **TWO},
    "JSON for sh": {"model": "saricles/MiniMax-M2.7-NVFP4-GB10", **TWO},
    "unknown model": {"model": "some/model"},
    "unknown model in NVFP4": {"model": "some/model-NVFP4", "quantization": "nvfp4"},
    "optional rules": {
        "model": "some/model-NVFP4",
        "quantization": "nvfp4",
        "choice": RuleChoice(wanted=frozenset({"nvfp4-linear", "b12x-moe"})),
    },
    "a folder with a space": {"model": "/my models/x", "folder_gib": 40.0},
}


def request(version: str, asked: dict[str, Any]) -> ServeRequest:
    """Return what is asked for, with the node as `decide` would have it."""
    options = NodeOptions(
        vllm=version,
        role=asked.get("role", "single"),
        nodes=asked.get("nodes", 0),
        head=asked.get("head", ""),
        topology=asked.get("topology", "auto"),
        executor=asked.get("executor", "auto"),
        target=asked.get("target", "gb10"),
        quantization=asked.get("quantization", ""),
        model=preset.id if (preset := find_preset(asked["model"])) else "",
    )
    return ServeRequest(
        node=decide_node(options, NOWHERE, addressed=False),
        memory=MemoryPool(
            gib=asked.get("gib", SPARK_GIB), shared=True, whose="a Spark"
        ),
        **{name: value for name, value in asked.items() if name in OF_REQUEST},
    )


def served(version: str, asked: dict[str, Any]) -> ServeCommand:
    return serve_args(request(version, asked), load_flag_rules())


def served_by_recipe(model: str) -> ServeCommand:
    """Return the command of a model that upstream has a recipe for, on the nodes that it takes."""
    nodes = named_preset(model).nodes
    return served(
        VERSIONS[-1], {"model": model, **({**TWO, "nodes": nodes} if nodes > 1 else {})}
    )


def everything(version: str) -> Iterator[ServeCommand]:
    """Yield every preset that a release serves, and a model without one, in every role."""
    places = [{}, *({**TWO, "topology": each} for each in ("roce", "socket", "hetero"))]
    places += [
        WORKER,
        {**TWO, "executor": "ray"},
        {**TWO, "topology": "ring", "nodes": 3},
    ]
    models = [*(preset.id for preset in load_presets()), "some/model"]
    for model, place in itertools.product(models, places):
        asked = {"model": model if "/" in model else f"some/{model}", **place}
        with contextlib.suppress(UsageError, HostError, DriftError):
            yield served(version, asked)


def text() -> str:
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for name, asked in SITUATIONS.items():
        yield f"# {name}"
        for version in VERSIONS:
            yield f"{version}: {_outcome(partial(served, version, asked))}"
        yield ""
    yield f"# as upstream's recipes, with {VERSIONS[-1]}; -: what they have and the command has not"
    for recipe in model_recipes().values():
        if recipe.settings:
            yield _outcome(partial(served_by_recipe, recipe.id))


def _outcome(make: Callable[[], ServeCommand]) -> str:
    try:
        done = make()
    except PatchkitError as error:
        return f"{type(error).__name__}: {error.what}"
    unlike = [f"- {each.flag}" for each in done.left_out if each.origin == "recipe"]
    return " ".join((shlex.join(done.words), *unlike))


if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
