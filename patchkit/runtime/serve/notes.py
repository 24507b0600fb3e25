"""Say what a user should know about a request that is valid."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.finding import SINGLE_REPORT
from patchkit.quoting import quoted
from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import ModelRecipe, Preset, model_recipes
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.serve.listen import listening
from patchkit.runtime.serve.request import ServeRequest


def notes(request: ServeRequest) -> Iterator[str]:
    """Yield notes on who reaches the server, the memory and the model."""
    node, unknown = request.node, request.weights is None
    yield from listening(request)
    if node.preset is None and request.folder_gib is None:
        more = ", and whether it fits was not checked" if unknown else ""
        yield f"{request.model} has no preset: these flags fit any model{more}"
    elif unknown:
        yield "whether it fits was not checked: nobody names the size of its weights"
    if request.memory.note and not unknown:
        yield request.memory.note
    if node.preset:
        yield from _preset_notes(node.preset, node.nodes, node.vllm)
    elif recipe := model_recipes().get(request.model.lower()):
        yield from _recipe_notes(recipe, request)


def _recipe_notes(recipe: ModelRecipe, request: ServeRequest) -> Iterator[str]:
    """Yield what upstream says of a model without a preset."""
    if recipe.min_vllm[:1].isdigit() and not within(request.node.vllm, f">={recipe.min_vllm}"):
        yield f"upstream's recipe of {recipe.id} takes vLLM {recipe.min_vllm} or newer"
    if recipe.settings:
        # As a shell takes them.
        settings = recipe.settings.items()
        variables = [f"{name}={value}" for name, value in settings if name[0] != "-"]
        flags = [word for pair in settings if pair[0][0] == "-" for word in pair if word]
        words = quoted(*variables, *flags)
        yield f"upstream's recipe of {recipe.id} for a GB10 sets: {words}"
    for limit in holding(load_flag_rules().limits, request.node.situation):
        value = recipe.settings.get(limit.flag, "")
        if value and float(value) > limit.most:
            yield f"its {limit.flag} {value} is too much here. {limit.reason} Take {limit.instead}"


def _preset_notes(preset: Preset, nodes: int, vllm: str) -> Iterator[str]:
    if preset.build:
        yield f"served with {preset.build}; no release is known to do"
    if preset.measured_with and not within(vllm, f">={preset.measured_with}"):
        yield f"measured with vLLM {preset.measured_with}; that {vllm} serves it is upstream's word"
    if preset.variables:
        pairs = " ".join(f"{name}={value}" for name, value in preset.variables.items())
        yield (
            f"the environment must hold {pairs}: "
            f"`{quoted('patchkit', 'env', '--model', preset.id)}` writes it"
        )
    if preset.needs_token:
        yield f"{preset.id} needs its licence accepted at Hugging Face, and HF_TOKEN"
    if nodes < preset.nodes:
        yield f"it fits one Spark, and is meant for {preset.nodes}"
    if preset.evidence == SINGLE_REPORT:
        yield f"the preset rests on one report ({preset.source})"
    if preset.note:
        yield preset.note
