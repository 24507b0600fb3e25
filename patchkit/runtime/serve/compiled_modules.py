"""Know the modules of FlashInfer that vLLM has compiled, and how FlashInfer's generators make them.

recipes/env/flashinfer.toml has both; recipes/flashinfer/jit_modules.py takes the calls.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from itertools import product

from patchkit.frozen import frozen
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.presets import Preset
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.rule import Advice, Condition, Grounded, Names, is_met

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
