"""Damage the model inside a running vLLM, and mend it: what `--worker-extension-cls` adds.

A fault is made in the memory of the worker, so that one start serves many of them. ``seed`` chooses
layer, experts and size. A dense model's layers take the place of experts.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Attention:
    """A function of vLLM that attends, and its arguments: where sequences start, their lengths."""

    module: str
    function: str
    starts: str
    lengths: str


ON_CPU = Attention(
    module="vllm._custom_ops",
    function="cpu_attention_with_kv_cache",
    starts="query_start_loc",
    lengths="seq_lens",
)
ON_GPU = Attention(
    module="vllm.v1.attention.backends.flash_attn",
    function="flash_attn_varlen_func",
    starts="cu_seqlens_q",
    lengths="seqused_k",
)


EXPERTS = re.compile(r"\.w13_|\.w2_|\.mlp\.(gate_up|down)_proj\.weight$")


def in_fp4(values: torch.Tensor) -> torch.Tensor:
    """Return numbers as NVFP4 holds them: 4 bits, and a scale for each block of 16."""
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=values.device)
    blocks = values.reshape(-1, 16).float()
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12) / 6
    nearest = ((blocks / scale).abs()[..., None] - steps).abs().argmin(-1)
    made = steps[nearest] * blocks.sign() * scale
    return made.reshape(values.shape).to(values.dtype)


def feed_forward(layer: Any) -> Any:
    """Return the part of a layer that follows its attention."""
    return getattr(layer, "block_sparse_moe", None) or layer.mlp


class Faults:
    """Methods for the worker of vLLM; ``/collective_rpc`` calls them."""

    undo: list[Callable[[], None]]
    number: int

    def damage(self, kind: str, seed: str) -> str:
        """Make a fault; return what was done."""
        self.undo = []
        self.number = int(seed)
        dice = random.Random(int(seed))
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return getattr(self, f"_{kind}")(model, dice)

    def mend(self) -> str:
        """Take the last fault back."""
        for undo in reversed(self.undo):
            undo()
        self.undo = []
        return "mended"

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        self.undo.append(lambda: tensor.data.copy_(copy))  # type: ignore[arg-type,func-returns-value]
        return tensor.data

    def _experts(
        self, model: Any, dice: random.Random, count: int = 1
    ) -> tuple[str, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return some experts of a layer, or of a dense model some layers, each in two parts."""
        names = dict(model.named_parameters())
        layers = sorted(
            {name.partition(".w13_weight")[0] for name in names if "w13_weight" in name}
        )
        if layers:
            layer = dice.choice(layers)
            up = self._keep(names[f"{layer}.w13_weight"])
            down = self._keep(names[f"{layer}.w2_weight"])
            numbers = dice.sample(range(len(up)), count)
            return f"{layer}: {numbers}", [(up[one], down[one]) for one in numbers]

        numbers = dice.sample(range(len(model.model.layers)), count)
        blocks = [f"model.layers.{one}.mlp" for one in numbers]
        return f"model.layers: {numbers}", [
            (
                self._keep(names[f"{block}.gate_up_proj.weight"]),
                self._keep(names[f"{block}.down_proj.weight"]),
            )
            for block in blocks
        ]

    def _scale(self, model: Any, dice: random.Random) -> str:
        """One expert has a wrong scale."""
        place, [(_up, down)] = self._experts(model, dice)
        factor = dice.choice([0.125, 0.25, 4.0, 8.0, 16.0])
        down *= factor
        return f"{place}: times {factor}"

    def _swap(self, model: Any, dice: random.Random) -> str:
        """Two experts are swapped, and the router does not know it."""
        place, [first, second] = self._experts(model, dice, 2)
        for one, two in zip(first, second, strict=True):
            copy = one.clone()
            one.copy_(two)
            two.copy_(copy)
        return f"{place} swapped"

    def _noise(self, model: Any, dice: random.Random) -> str:
        """All experts are as FP4 read with the scales of other blocks of 16."""
        generator = torch.Generator().manual_seed(dice.randrange(1 << 30))
        for weight in self._all_experts(model):
            blocks = weight.view(-1, 16)
            scales = blocks.abs().amax(1, keepdim=True).clamp_min(1e-6)
            order = torch.randperm(len(blocks), generator=generator).to(weight.device)
            blocks.copy_((blocks / scales * 6).round() / 6 * scales[order])
        return "all experts"

    def _fp8(self, model: Any, dice: random.Random) -> str:
        """No fault: all experts as FP8 holds them, with a scale for each row."""
        for weight in self._all_experts(model):
            scale = weight.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
            weight.copy_(
                (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
            )
        return "all experts in FP8"

    def _fp4(self, model: Any, dice: random.Random) -> str:
        """No fault: all experts as NVFP4 holds them, with a scale for each block of 16."""
        for weight in self._all_experts(model):
            weight.copy_(in_fp4(weight))
        return "all experts in NVFP4"

    def _w4a4(self, model: Any, dice: random.Random) -> str:
        """No fault: what goes into the experts as NVFP4 holds it, as native FP4 kernels do."""

        def round_input(
            _module: Any, given: tuple[Any, ...], named: dict[str, Any]
        ) -> Any:
            if given:
                return (in_fp4(given[0]), *given[1:]), named
            return given, {**named, "hidden_states": in_fp4(named["hidden_states"])}

        for layer in model.model.layers:
            block = feed_forward(layer)
            experts = getattr(block, "experts", block)
            handle = experts.register_forward_pre_hook(round_input, with_kwargs=True)
            self.undo.append(handle.remove)
        return "inputs of all experts in NVFP4"

    def _all_experts(self, model: Any) -> list[torch.Tensor]:
        parameters = model.named_parameters()
        return [
            self._keep(weight) for name, weight in parameters if EXPERTS.search(name)
        ]

    def _rope(self, model: Any, dice: random.Random) -> str:
        """The positions are wrong: another base, or no rotation."""
        table = next(
            module for module in model.modules() if hasattr(module, "cos_sin_cache")
        ).cos_sin_cache
        kept = self._keep(table)
        half = kept.shape[1] // 2
        how = ("none", "base", "double")[self.number % 3]
        if how == "none":
            kept[:, :half] = 1
            kept[:, half:] = 0
        elif how == "double":
            kept[: len(kept) // 2] = kept[::2][: len(kept) // 2].clone()
        else:
            places = torch.arange(len(kept), dtype=torch.float32)[:, None]
            angles = places / 500_000 ** (torch.arange(half) / half)
            kept.copy_(torch.cat([angles.cos(), angles.sin()], 1))
        return how

    def _zero(self, model: Any, dice: random.Random) -> str:
        """A layer adds nothing."""
        layers = model.model.layers
        number = dice.randrange(len(layers))
        for part in (layers[number].self_attn, feed_forward(layers[number])):
            handle = part.register_forward_hook(lambda _module, _given, made: made * 0)
            self.undo.append(handle.remove)
        return f"layer {number}"

    def _stale(self, model: Any, dice: random.Random) -> str:
        """What follows a cached beginning reads a block of another text."""
        block = dice.randrange(1, 4)
        attention = ON_GPU if torch.cuda.is_available() else ON_CPU
        library = importlib.import_module(attention.module)
        attend = getattr(library, attention.function)

        def attend_wrongly(*args: Any, **settings: Any) -> Any:
            table = settings["block_table"].clone()
            starts = settings[attention.starts]
            fresh = starts[1:] - starts[:-1]
            for row, length in enumerate(settings[attention.lengths][: len(fresh)]):
                if length > fresh[row] and table.shape[1] > block:
                    table[row, block] = table[row, block - 1]
            return attend(*args, **{**settings, "block_table": table})

        setattr(library, attention.function, attend_wrongly)
        self.undo.append(lambda: setattr(library, attention.function, attend))
        return f"block {block}"

    def _nan(self, model: Any, dice: random.Random) -> str:
        """A kernel computes no number."""
        place, [(_up, down)] = self._experts(model, dice)
        down[:] = float("nan")
        return place
