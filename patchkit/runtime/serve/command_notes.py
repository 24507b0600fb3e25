"""Write the notes on a command: model, size, context, flags, and what its first start compiles.

The modules of FlashInfer that vLLM has compiled, and how FlashInfer's generators make them, stand
in recipes/env/flashinfer.toml; recipes/flashinfer/jit_modules.py takes the calls.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field
from itertools import product

from patchkit.finding import SINGLE_REPORT
from patchkit.frozen import Values, frozen
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.host.host import FlashInfer
from patchkit.runtime.memory.plan import LENGTH, LOADER, SEQUENCES, MemoryPlan
from patchkit.runtime.memory.weights import drafting_settings
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.presets import Preset, find_recipe
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import (
    Advice,
    Condition,
    Grounded,
    Names,
    is_met,
    select_entries,
)
from patchkit.runtime.rules.secret_texts import find_code_risk
from patchkit.runtime.serve.dense_layers import find_dense_layers
from patchkit.runtime.serve.request import ServeRequest
from patchkit.target import targets

SCRIPT = RECIPES / "flashinfer" / "jit_modules.py"

Value = str | bool | int


@frozen
class Module(Grounded):
    """A module that vLLM asks for: ``seconds`` of a CPU for its units, ``gib`` for one of them.

    ``generators`` are ids of the rows that make it.
    """

    name: str
    units: int
    seconds: float
    gib: float
    generators: Names


@frozen
class Call:
    """A call of a function of FlashInfer, ``package.module:function``, that makes one module.

    ``gib`` is the memory of one compiler, ``libraries`` those of CUDA that are compiled against.
    """

    function: str
    arguments: Mapping[str, Value]
    gib: float
    libraries: Names


@frozen
class Generator:
    """How a module is made in some releases of FlashInfer; flashinfer.toml describes the fields."""

    id: str
    function: str
    sets: Names
    gib: float = 1.5
    flashinfer: str = ""
    majors: tuple[int, ...] = ()
    libraries: Names = ()
    arguments: Mapping[str, Value | tuple[Value, ...]] = field(default_factory=dict)

    @property
    def calls(self) -> Iterator[Call]:
        """Yield a call for each combination of the listed values."""
        columns = [
            values if isinstance(values, tuple) else (values,)
            for values in self.arguments.values()
        ]
        for row in product(*columns):
            arguments = {
                name: value
                for names, value in zip(self.arguments, row, strict=True)
                for name in names.split()
            }
            yield Call(
                function=self.function,
                arguments=arguments,
                gib=self.gib,
                libraries=self.libraries,
            )


@frozen
class ModuleTable:
    """All of flashinfer.toml; ``jobs`` is MAX_JOBS of an env file."""

    jobs: int
    module: tuple[Module, ...]
    more: tuple[Advice, ...]
    advice: tuple[Advice, ...]
    generator: tuple[Generator, ...]

    def calls(
        self, flashinfer: str, major: int, names: Collection[str]
    ) -> tuple[Call, ...]:
        """Return the calls that make the modules of some generators, in the table's order.

        ``names`` are ids of generators, and sets that they are in. Generators that the release
        ``flashinfer`` lacks are left out, and those for other devices: ``major`` is the first
        number of the device's compute capability.
        """
        return tuple(
            call
            for row in self.generator
            if {row.id, *row.sets} & {*names}
            and within(flashinfer, row.flashinfer)
            and (not row.majors or major in row.majors)
            for call in row.calls
        )

    def generators_of(self, preset: Preset) -> set[str]:
        """Return the ids of the generators whose modules a model may need.

        Conditions about vLLM and the device are ignored.
        """
        situation = {
            "quantization": preset.quantization,
            "moe": "yes" if preset.moe else "no",
            "family": preset.family,
            **preset.settings,
        }
        return {
            generator_id
            for row in self.module
            if is_met(_about_model(row.when), situation)
            for generator_id in row.generators
        }


def _about_model(when: Condition) -> Condition:
    """Return a row's condition without what it says of vLLM and the device."""
    return {fact: when[fact] for fact in when.keys() - {"target", "vllm"}}


MODULES = read_toml(ModuleTable, RECIPES / "env" / "flashinfer.toml")


# Beginnings of keys in configs of models with states of a fixed size.
RECURRENT = ("mamba", "ssm_", "linear_")


def flag_notes(values: Values) -> Iterator[str]:
    """Yield notes on flags that make vLLM run code, and on drafting."""
    for name in values:
        if risk := find_code_risk(name):
            yield f"{name}: {risk}"

    if drafting := drafting_settings(values):
        by = f" with the checkpoint {drafting['model']}" if "model" in drafting else ""
        yield f"it drafts{by}: faster, for code above all; --without drafter leaves it out"


def model_notes(request: ServeRequest) -> Iterator[str]:
    """Yield notes on the memory and the model."""
    yield from _weight_notes(request)

    vllm = request.node.vllm
    preset = request.node.preset
    if preset is None:
        recipe = find_recipe(request.model)
        oldest = recipe.min_vllm if recipe else ""
        if recipe and oldest[:1].isdigit() and not within(vllm, f">={oldest}"):
            yield f"upstream's recipe of {recipe.id} takes vLLM {oldest} or newer"
        return

    yield from _preset_notes(preset)


def _weight_notes(request: ServeRequest) -> Iterator[str]:
    """Yield notes on the source of the weights' size, and on the memory they must fit into."""
    weights = request.weights
    if request.node.preset is None and request.folder_gib is None:
        more = "" if weights else ", and whether it fits was not checked"
        yield f"{request.model} has no preset: these flags fit any model{more}"
        if request.model.startswith(("/", ".")):
            yield f"{request.model} is no folder with weights on this machine"
    elif weights is None:
        yield "whether it fits was not checked: nobody names the size of its weights"

    if weights and weights.from_name:
        yield f"at least {weights.gib:.0f} GiB of weights, by {weights.source}"
    if weights and request.memory.note:
        yield request.memory.note


def _preset_notes(preset: Preset) -> Iterator[str]:
    """Yield notes on what a preset needs, and on how well it is known to work."""
    if preset.build:
        yield f"served with {preset.build}; no release is known to do"
    if preset.variables:
        pairs = [f"{name}={value}" for name, value in preset.variables.items()]
        command = quoted("patchkit", "env", "--model", preset.id)
        yield f"the environment must hold {' '.join(pairs)}: `{command}` writes it"
    if preset.needs_token:
        yield f"{preset.id} needs its licence accepted at Hugging Face, and HF_TOKEN"
    if preset.evidence == SINGLE_REPORT:
        yield f"the preset rests on one report ({preset.source})"
    if preset.note:
        yield preset.note


def read_gigabytes(request: ServeRequest, flags: Values) -> float:
    """Return the GB of weights that are read for a token, 0 if that is unknown."""
    checkpoint = request.checkpoint
    preset = request.node.preset
    if not (checkpoint and checkpoint.reads):
        return (preset.reads_gb if preset else None) or 0.0

    read_bytes = checkpoint.reads
    dense = find_dense_layers(checkpoint, request.node.nodes)
    if dense and flags.get("--quantization-config") == dense.setting:
        read_bytes -= dense.saved
    return read_bytes / 1e9


def speed_notes(request: ServeRequest, flags: Values) -> Iterator[str]:
    """Yield a note with the most tokens per second for one stream, if the figures are known."""
    read_gb = read_gigabytes(request, flags)
    device = targets().get(request.node.target)
    if not (read_gb and device and device.bandwidth):
        return

    # Only tensor parallelism adds bandwidth: the nodes of a pipeline read one after the other.
    nodes = int(flags.get("--tensor-parallel-size", 1))
    speed = device.bandwidth * nodes
    place = f"{nodes} nodes" if nodes > 1 else "one node"
    alone = " without drafting" if "--speculative-config" in flags else ""
    prefix = "" if request.checkpoint else "at least "
    yield (
        f"at most {speed / read_gb:.3g} tok/s for one stream{alone} on {place}: {prefix}"
        f"{read_gb:.3g} GB of weights are read for each token, at {speed} GB/s; its context's "
        "cache adds to that"
    )


def asked_modules(node: Node, flags: Values) -> tuple[Module, ...]:
    """Return the modules that vLLM asks for; none for a build that is no release."""
    if node.preset and node.preset.build:
        return ()
    return select_entries(MODULES.module, {**node.situation, **flags})


def _missing_modules(node: Node, modules: Iterable[Module]) -> list[Module]:
    """Return the modules that are not compiled, as far as the node's FlashInfer is known."""
    kernels = node.kernels
    return [row for row in modules if not (kernels and kernels.has(row.name))]


def missing_calls(node: Node, modules: Iterable[Module]) -> list[Call]:
    """Return calls of FlashInfer's generators for what is not compiled, as far as that is known.

    Modules that depend on the sizes of attention heads are left to the start.
    """
    if node.kernels is None:
        return []

    missing = _missing_modules(node, modules)
    names = {name for row in missing for name in row.generators}
    major = targets()[node.target].capability[0]
    calls = MODULES.calls(node.kernels.version, major, names)
    return [call for call in calls if "head_dim" not in str(call.arguments)]


def kernel_advice(kernels: FlashInfer, vllm: str) -> tuple[Advice, ...]:
    """Return what keeps vLLM from FlashInfer's kernels, and FlashInfer from compiled ones."""
    return select_entries(MODULES.advice, {"vllm": vllm, **kernels.facts})


def first_start_notes(node: Node, modules: Iterable[Module]) -> Iterator[str]:
    """Yield what compiles before the first answer, and what keeps compiled modules from use."""
    modules = _missing_modules(node, modules)
    if node.kernels:
        for advice in kernel_advice(node.kernels, node.vllm):
            yield f"{advice.says}; instead: {advice.instead}"
    if not modules:
        return

    unless = "" if node.kernels else ", if an earlier one did not"
    names = ", ".join(row.id for row in modules)
    units = sum(row.units for row in modules)
    minutes = sum(row.seconds for row in modules) / MODULES.jobs / 60
    gib = max(row.gib for row in modules)
    more = "".join(row.says for row in select_entries(MODULES.more, node.situation))
    yield (
        f"FlashInfer compiles at the first start{unless}: {names}; {units} units, up to {gib} GiB "
        f"for a compiler, about {minutes:.0f} min with {MODULES.jobs} at once{more}"
    )


def context_notes(plan: MemoryPlan | None, flags: Values) -> Iterator[str]:
    """Yield what the cache has room for, and whether a shorter context had to be set."""
    if plan is None or not plan.is_whole:
        return

    if plan.loading_gib > plan.cache_gib:
        yield (
            f"{LOADER} {flags[LOADER]} holds a file of {plan.loading_gib:.1f} GiB beside the "
            f"weights, and {plan.cache_gib:.1f} are left: {LOADER} auto maps it instead"
        )

    fitting = plan.fitting_sequences(1)
    sequences = int(flags.get(SEQUENCES, 0))
    if sequences > fitting:
        yield f"{SEQUENCES} {sequences}: the cache has room for {fitting} requests at once"

    longest = plan.longest_context
    if 0 < longest < plan.context:
        yield (
            f"a context of {plan.context:,} tokens does not fit: its KV cache takes "
            f"{plan.request_gib(plan.context):.1f} GiB per node, {plan.cache_gib:.1f} are left for "
            f"it, and vLLM would not start; {LENGTH} {flags.get(LENGTH)} is set"
        )
